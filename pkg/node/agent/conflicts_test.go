// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// declared is one DevicePool and the VF that it selects.
type declared v1alpha1.PublishMode

func (d declared) Snapshot() []function.Function {
	return []function.Function{{ID: vf, Kind: function.VF, Class: function.Network, Vendor: "15b3"}}
}

func (d declared) Get(id function.ID) (function.Function, bool) {
	f := d.Snapshot()[0]
	return f, f.ID == id
}

func (d declared) DevicePools(context.Context) ([]v1alpha1.DevicePool, error) {
	p := v1alpha1.DevicePool{}
	p.Name, p.Spec.Publish = "fast", v1alpha1.PublishMode(d)
	p.Spec.Selectors = []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}
	return []v1alpha1.DevicePool{p}, nil
}

func (d declared) NodeLabels(context.Context) (map[string]string, error) { return nil, nil }

// newConflicts returns the conflicts of a node with a kubelet and one Function, in a pool that is
// published in this way.
func newConflicts(
	t *testing.T, records *journal.Journal, publish v1alpha1.PublishMode,
) (c *conflicts, manager *lifecycle.Manager, played *kubelettest.Pods, dir string) {
	t.Helper()
	dir = must.SocketDir(t)
	played, err := kubelettest.ServePods(dir)
	must.Succeed(t, err)
	t.Cleanup(played.Stop)

	tracker := pool.NewTracker(declared(publish), declared(publish), nil, testr.New(t))
	ctx, stop := context.WithCancel(t.Context())
	if err := tracker.Run(ctx, nil, stop); err != nil {
		t.Fatal(err)
	}

	pods, err := podresources.NewClient(podresources.Options{KubeletDir: dir, Log: logr.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pods.Close() })

	c = &conflicts{
		journal: records, tracker: tracker, changed: func() {},
		kubelet: &kubelet{pods: pods, changed: func() {}},
	}
	manager = lifecycle.New(records, nil, nil, lifecycle.Options{Kubelet: pods, Reserved: c.reserved},
		testr.New(t))

	return c, manager, played, dir
}

func TestElsewhere(t *testing.T) {
	const fast = "xpu.opiproject.org/fast"
	byResource := kubelettest.Pod("web", fast, vf.String())
	pod := journal.Pod{Namespace: "default", Name: "web"}
	for _, test := range []struct {
		name    string
		publish v1alpha1.PublishMode
		record  journal.Attachment
		kubelet *podresourcesapi.PodResources
		want    string // "" for none
	}{
		{"free", v1alpha1.PublishDevicePlugin, journal.Attachment{}, nil, ""},
		{"by its resource", v1alpha1.PublishDevicePlugin,
			journal.Attachment{State: journal.Attached, Resource: fast, Pod: pod}, byResource, ""},
		{"by its claim", v1alpha1.PublishDRA,
			journal.Attachment{State: journal.Attached, Claim: journal.Claim{UID: "c"}}, nil, ""},
		{"by a claim", v1alpha1.PublishDevicePlugin,
			journal.Attachment{
				State: journal.Reserved, Claim: journal.Claim{
					Namespace: "default", Name: "net", UID: "c",
				},
			},
			nil, "claim default/net"},
		{"by another resource", v1alpha1.PublishDevicePlugin,
			journal.Attachment{State: journal.Attached, Resource: "intel.com/old", Pod: pod}, nil,
			"pod default/web has it by resource intel.com/old"},
		{"allocated by a resource, for a pod that has not come", v1alpha1.PublishDRA,
			journal.Attachment{State: journal.Reserved, Resource: fast},
			nil, "a pod has it by resource " + fast},
		{"being released", v1alpha1.PublishDRA,
			journal.Attachment{State: journal.Releasing, Resource: fast}, nil, ""},
		{"by the kubelet alone", v1alpha1.PublishDRA, journal.Attachment{}, byResource,
			"pod default/web"},
		{"the kubelet did not answer when CNI came, and does now", v1alpha1.PublishDevicePlugin,
			journal.Attachment{State: journal.Attached, Pod: pod}, byResource, ""},
		{"by CNI, and not from the kubelet", v1alpha1.PublishDevicePlugin,
			journal.Attachment{State: journal.Attached, Pod: pod}, nil,
			"pod default/web has it by CNI"},
		{"by CNI, and from the kubelet by another resource", v1alpha1.PublishDevicePlugin,
			journal.Attachment{State: journal.Attached, Pod: pod},
			kubelettest.Pod("web", "intel.com/old", vf.String()), "pod default/web has it by CNI"},
		{"by CNI, of a pool of claims", v1alpha1.PublishDRA,
			journal.Attachment{State: journal.Attached, Pod: pod}, nil,
			"pod default/web has it by CNI"},
	} {
		t.Run(test.name, func(t *testing.T) {
			records := openJournal(t)
			c, _, played, _ := newConflicts(t, records, test.publish)

			if test.record.State != "" {
				test.record.Function = vf
				if test.record.State == journal.Attached {
					test.record.Before, test.record.Observed = &netdev.Snapshot{}, &netdev.Observed{}
				}
				put(t, records, test.record)
			}

			if test.kubelet != nil {
				played.Set(test.kubelet)
			}

			c.kubelet.refresh(t.Context())
			got := c.elsewhere(vf)
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("elsewhere = %q, want %q", got, test.want)
			}
		})
	}
}

// TestPrepareAsksAgain: the kubelet gave the Function to a pod after it was asked, just when the
// pool moved to DRA.
func TestPrepareAsksAgain(t *testing.T) {
	c, manager, played, _ := newConflicts(t, openJournal(t), v1alpha1.PublishDRA)
	c.kubelet.refresh(t.Context())
	want := journal.Attachment{
		Function: vf, Claim: journal.Claim{UID: "c"}, Interface: function.Interface{Name: "net1"},
	}
	if err := manager.Reserve(t.Context(), want); err != nil {
		t.Errorf("Reserve = %v", err)
	}

	played.Set(kubelettest.Pod("web", "xpu.opiproject.org/fast", vf.String()))
	if err := manager.Reserve(t.Context(), want); err == nil ||
		!strings.Contains(err.Error(), "default/web") {
		t.Errorf("Reserve = %v; want an error that names the pod", err)
	}
}

// TestTakenByAnotherWay: the device plugin is notified at once if a claim, or CNI alone, has a
// Function of its pool.
func TestTakenByAnotherWay(t *testing.T) {
	for _, test := range []struct {
		name     string
		publish  v1alpha1.PublishMode
		want     journal.Attachment
		notified bool
	}{
		{"a claim, of a pool of claims", v1alpha1.PublishDRA,
			journal.Attachment{Claim: journal.Claim{UID: "c"}}, false},
		{"a claim, of a pool of the device plugin", v1alpha1.PublishDevicePlugin,
			journal.Attachment{Claim: journal.Claim{UID: "c"}}, true},
		{"CNI alone", v1alpha1.PublishDevicePlugin,
			journal.Attachment{CNI: &journal.CNI{ContainerID: "c1", IfName: "net1"}}, true},
		{"CNI, by its resource", v1alpha1.PublishDevicePlugin,
			journal.Attachment{
				Resource: "xpu.opiproject.org/fast",
				CNI:      &journal.CNI{ContainerID: "c1", IfName: "net1"},
			}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, manager, _, _ := newConflicts(t, openJournal(t), test.publish)
			notified := false
			c.changed = func() { notified = true }
			test.want.Function, test.want.Interface.Name = vf, "net1"
			err := manager.Reserve(t.Context(), test.want)
			if err != nil || notified != test.notified {
				t.Errorf("Reserve = %v, notified: %t, want %t", err, notified, test.notified)
			}
		})
	}
}

// TestUsesOfAKubeletThatIsAway: claims do not wait for a kubelet that does not answer, and it is
// asked again soon.
func TestUsesOfAKubeletThatIsAway(t *testing.T) {
	c, manager, played, dir := newConflicts(t, openJournal(t), v1alpha1.PublishDRA)
	played.Stop()
	c.kubelet.refresh(t.Context())
	if !c.kubelet.unanswered.Load() {
		t.Fatal("the kubelet does not count as away")
	}

	begin := time.Now()
	for range 10 {
		want := journal.Attachment{
			Function: vf, Claim: journal.Claim{UID: "c"},
			Interface: function.Interface{Name: "net1"},
		}
		if err := manager.Reserve(t.Context(), want); err != nil {
			t.Fatal(err)
		}
	}

	if took := time.Since(begin); took > refreshTimeout {
		t.Errorf("10 reservations took %s: each asks a kubelet that does not answer", took)
	}

	c.times.conflict = time.Millisecond
	asked := make(chan struct{})
	c.kubelet.changed = sync.OnceFunc(func() { close(asked) })
	again, err := kubelettest.ServePods(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Stop)

	again.Set(kubelettest.Pod("web", "intel.com/other", vf.String()))
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.run(ctx, nil) })
	defer running.Wait()
	defer stop()

	select {
	case <-asked:
	case <-time.After(20 * time.Second):
		t.Error("the kubelet came back and was not asked soon")
	}
}

func openJournal(t *testing.T) *journal.Journal {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func put(t *testing.T, j *journal.Journal, a journal.Attachment) {
	t.Helper()
	if err := j.Put(a); err != nil {
		t.Fatal(err)
	}
}

var vf = function.ID{Address: "0000:3b:00.2"}
