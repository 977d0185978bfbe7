// SPDX-License-Identifier: Apache-2.0

package podresources_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const (
	fast = "xpu.opiproject.org/fast"
	vf   = "0000:3b:00.2"
	sf   = "0000:3b:00.0/sf88"
)

// start starts a kubelet, and a client for it.
func start(t *testing.T) (dir string, kubelet *kubelettest.Pods, client *podresources.Client) {
	t.Helper()
	dir = must.SocketDir(t)
	kubelet, err := kubelettest.ServePods(dir)
	must.Succeed(t, err)
	t.Cleanup(kubelet.Stop)
	return dir, kubelet, newClient(t, dir, podresources.Self{}, testr.New(t))
}

func newClient(
	t *testing.T, dir string, self podresources.Self, log logr.Logger,
) *podresources.Client {
	t.Helper()
	client, err := podresources.NewClient(
		podresources.Options{KubeletDir: dir, Self: self, Log: log})
	must.Succeed(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestAssigned(t *testing.T) {
	_, kubelet, client := start(t)
	in := func(pod, resource string) podresources.Assignment {
		return podresources.Assignment{
			Resource: resource, Namespace: "default", Pod: pod, Container: "main",
		}
	}

	for _, test := range []struct {
		name string
		pods []*podresourcesapi.PodResources
		want map[string]podresources.Assignment
	}{
		{"no pods", nil, map[string]podresources.Assignment{}},
		{"nothing of ours", []*podresourcesapi.PodResources{
			kubelettest.Pod("gpu", "nvidia.com/gpu", "GPU-fef8089b-4820-abfc-e83e-94318197576e"),
			kubelettest.Pod("none", "", ""),
			kubelettest.Pod("aux", "intel.com/sf", "mlx5_core.sf.2"),
			kubelettest.ClaimPod("cpu", "dra.cpu", "cpu-1"),
		}, map[string]podresources.Assignment{}},
		{"several pods and resources", []*podresourcesapi.PodResources{
			kubelettest.Pod("web", fast, vf, sf),
			kubelettest.Pod("dpdk", "intel.com/dpdk", "0000:3B:00.4"),
		}, map[string]podresources.Assignment{
			vf: in("web", fast), sf: in("web", fast), "0000:3b:00.4": in("dpdk", "intel.com/dpdk"),
		}},
		{"claims", []*podresourcesapi.PodResources{
			kubelettest.ClaimPod("ours", "xpu.opiproject.org", "0000-3b-00-2", "0000-3b-00-0-sf88"),
			kubelettest.ClaimPod("theirs", "sriovnetwork.k8snetworkplumbingwg.io", "0000-3b-00-4"),
			kubelettest.ClaimPod("dranets", "dra.net", "pci-0000-3b-00-5"),
		}, map[string]podresources.Assignment{
			vf: in("ours", ""), sf: in("ours", ""),
			"0000:3b:00.4": in("theirs", "sriovnetwork.k8snetworkplumbingwg.io"),
			"0000:3b:00.5": in("dranets", "dra.net"),
		}},
		{"given twice", []*podresourcesapi.PodResources{
			kubelettest.Pod("b", fast, vf), kubelettest.Pod("a", "intel.com/dpdk", vf),
		},
			map[string]podresources.Assignment{vf: in("a", "intel.com/dpdk")}},
	} {
		t.Run(test.name, func(t *testing.T) {
			kubelet.Set(test.pods...)
			got, err := client.Assigned(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("assigned: -want +got\n%s", diff)
			}
		})
	}
}

// TestNotHad checks that pods do not have the Functions that their claims only observe, nor a PF of
// which they have a share.
func TestNotHad(t *testing.T) {
	dir, kubelet, _ := start(t)
	client, err := podresources.NewClient(podresources.Options{
		KubeletDir: dir,
		HasAdminAccess: func(namespace, claim string, f function.ID) bool {
			return namespace == "default" && claim == "monitor" && f.String() == vf
		},
		Log: testr.New(t),
	})

	must.Succeed(t, err)
	t.Cleanup(func() { _ = client.Close() })

	share := kubelettest.ClaimPod("share", "xpu.opiproject.org", "0000-3b-00-0")
	share.Containers[0].DynamicResources[0].ClaimResources[0].ShareId = new("s1")
	kubelet.Set(share,
		kubelettest.ClaimPod("monitor", "xpu.opiproject.org", "0000-3b-00-2", "0000-3b-00-4"),
		kubelettest.ClaimPod("user", "xpu.opiproject.org", "0000-3b-00-5"))
	got, err := client.Assigned(t.Context())
	if err != nil || len(got) != 2 || got["0000:3b:00.4"].Pod != "monitor" ||
		got["0000:3b:00.5"].Pod != "user" {
		t.Errorf("Assigned = %v, %v; want what the monitor has beside what it looks at, and what "+
			"the user has", got, err)
	}

	if claimed, err := client.Claimed(t.Context(), "default", "monitor"); err != nil ||
		len(claimed) != 1 {
		t.Errorf("Claimed = %v, %v; want one", claimed, err)
	}
}

// TestManyPods checks that the answer may be longer than the default limit of gRPC.
func TestManyPods(t *testing.T) {
	_, kubelet, client := start(t)
	var pods []*podresourcesapi.PodResources
	for i := range 500 {
		pod := kubelettest.Pod(fmt.Sprint("pod", i), "example.com/tokens", make([]string, 1000)...)
		for j := range 1000 {
			pod.Containers[0].Devices[0].DeviceIds[j] = fmt.Sprint("token-", i, "-", j)
		}
		pods = append(pods, pod)
	}

	kubelet.Set(append(pods, kubelettest.Pod("web", fast, vf))...)
	got, err := client.Assigned(t.Context())
	if err != nil || len(got) != 1 {
		t.Errorf("Assigned = %v, %v, want one", got, err)
	}
}

func TestTracker(t *testing.T) {
	dir, kubelet, _ := start(t)
	var mutex sync.Mutex
	var logged []string
	tracker := newClient(t, dir, podresources.Self{}, funcr.New(func(_, args string) {
		mutex.Lock()
		defer mutex.Unlock()
		logged = append(logged, args)
	}, funcr.Options{}))

	vfID, err := function.ParseID(vf)
	if err != nil {
		t.Fatal(err)
	}
	if message := tracker.InUse(vfID, fast); message != "" {
		t.Errorf("InUse before the kubelet was asked = %q, want none", message)
	}

	refresh := func(wantChanged bool) {
		t.Helper()
		changed, err := tracker.Refresh(t.Context())
		if err != nil || changed != wantChanged {
			t.Errorf("Refresh = %t, %v, want %t", changed, err, wantChanged)
		}
	}

	kubelet.Set(kubelettest.Pod("web", fast, vf))
	refresh(true)
	refresh(false)
	if message := tracker.InUse(vfID, fast); message != "" {
		t.Errorf("InUse by its own resource = %q, want none", message)
	}
	if !tracker.Has(vfID, fast) || tracker.Has(vfID, "") || tracker.Has(vfID, "intel.com/dpdk") {
		t.Error("Has: want it of the pod's own resource only")
	}

	for _, resource := range []string{"", "intel.com/dpdk"} {
		message := tracker.InUse(vfID, resource)
		for _, want := range []string{"default/web", fast} {
			if !strings.Contains(message, want) {
				t.Errorf("InUse by another resource than %q = %q, want %q in it", resource,
					message, want)
			}
		}
	}

	kubelet.Set(kubelettest.ClaimPod("web", "xpu.opiproject.org", "0000-3b-00-2"))
	refresh(true)
	if message := tracker.InUse(vfID, ""); message != "" {
		t.Errorf("InUse by a claim = %q, want none", message)
	}
	if message := tracker.InUse(vfID, fast); !strings.Contains(message, "ResourceClaim") {
		t.Errorf("InUse by a claim = %q, want it to say so", message)
	}

	kubelet.Stop()
	for range 2 {
		if _, err := tracker.Refresh(t.Context()); err == nil ||
			!strings.Contains(err.Error(), dir) {
			t.Errorf("Refresh without a kubelet = %v, want an error with the socket's path", err)
		}
	}

	if message := tracker.InUse(vfID, fast); message == "" {
		t.Error("a kubelet that is away made the tracker forget")
	}
	if len(logged) != 1 {
		t.Errorf("logged %q, want that the kubelet is away, once", logged)
	}

	again, err := kubelettest.ServePods(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Stop)

	refresh(true)
	if message := tracker.InUse(vfID, fast); message != "" {
		t.Errorf("InUse after the pod went = %q, want none", message)
	}
	if len(logged) != 2 {
		t.Errorf("logged %q, want that the kubelet is back too", logged)
	}
}

// TestTrackerTimesOut checks that a kubelet that takes calls and does not answer is logged like a
// kubelet that is away.
func TestTrackerTimesOut(t *testing.T) {
	dir := must.SocketDir(t)
	if err := os.Mkdir(filepath.Join(dir, "pod-resources"), 0o750); err != nil {
		t.Fatal(err)
	}

	silent, err := net.Listen("unix", filepath.Join(dir, "pod-resources", "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })

	logged := 0
	tracker := newClient(t, dir, podresources.Self{}, funcr.New(func(string, string) {
		logged++
	}, funcr.Options{}))
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tracker.Refresh(canceled); err == nil || logged != 0 {
		t.Errorf("Refresh = %v, logged %d times; want an error and silence, as nobody wants the "+
			"answer any more", err, logged)
	}

	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		if _, err := tracker.Refresh(ctx); err == nil || logged != 1 {
			t.Errorf("Refresh = %v, logged %d times; want an error, logged once", err, logged)
		}
		cancel()
	}
}

// TestNoKubelet checks that a missing kubelet causes no wait.
func TestNoKubelet(t *testing.T) {
	client := newClient(t, t.TempDir(), podresources.Self{}, testr.New(t))
	for range 3 {
		begin := time.Now()
		if _, err := client.Assigned(t.Context()); err == nil {
			t.Fatal("Assigned without a kubelet: no error")
		}
		if took := time.Since(begin); took > 500*time.Millisecond {
			t.Errorf("took %s to find that there is no kubelet", took)
		}
	}
}

// TestClaimed checks that a pod's claimed Functions are limited to its own name and namespace, and
// that a Function that containers share counts once.
func TestClaimed(t *testing.T) {
	_, kubelet, client := start(t)
	claimed := func(namespace, pod, device string) *podresourcesapi.PodResources {
		p := kubelettest.ClaimPod(pod, v1alpha1.GroupName, device)
		p.Namespace = namespace
		return p
	}

	twice := claimed("default", "web", "0000-3b-00-2")
	twice.Containers = append(twice.Containers, twice.Containers[0])
	kubelet.Set(twice, claimed("other", "web", "0000-3b-00-3"),
		claimed("default", "db", "0000-3b-00-4"),
		kubelettest.Pod("web", "xpu.opiproject.org/fast", "0000:3b:00.5"))
	got, err := client.Claimed(t.Context(), "default", "web")
	if want := []function.ID{{Address: "0000:3b:00.2"}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("Claimed = %v, %v, want %v", got, err, want)
	}
	if assigned, err := client.Assigned(t.Context()); err != nil || len(assigned) != 4 {
		t.Errorf("Assigned = %v, %v, want four", assigned, err)
	}
	if _, err := client.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}

	// Two pods have the same name in different namespaces. A third has the Function by a resource
	// too.
	kubelet.Set(claimed("default", "web", "0000-3b-00-2"), claimed("other", "web", "0000-3b-00-2"),
		kubelettest.Pod("web", "xpu.opiproject.org/fast", "0000:3b:00.2"))
	if changed, err := client.Refresh(t.Context()); !changed || err != nil {
		t.Errorf("changed %t, %v", changed, err)
	}

	for resource, want := range map[string]bool{
		"": true, "xpu.opiproject.org/fast": true, "xpu.opiproject.org/slow": false,
	} {
		if has := client.Has(function.ID{Address: "0000:3b:00.2"}, resource); has != want {
			t.Errorf("has it by %q: %t", resource, has)
		}
	}
}

// TestTrackerFirstAnswer checks that a kubelet that answers from the start is not logged as back.
func TestTrackerFirstAnswer(t *testing.T) {
	dir, kubelet, _ := start(t)
	var lines []string
	tracker := newClient(t, dir, podresources.Self{}, funcr.New(func(_, args string) {
		lines = append(lines, args)
	}, funcr.Options{}))
	kubelet.Set()
	if _, err := tracker.Refresh(t.Context()); err != nil || len(lines) > 0 {
		t.Errorf("%v, logged %q", err, lines)
	}
}
