// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// environments returns the environment variables of containers, by CDI device.
func (n *node) environments() map[string]string {
	n.t.Helper()
	out := map[string]string{}
	cache := n.runtime()
	for _, name := range cache.ListDevices() {
		_, device, _ := strings.Cut(name, "=")
		out[device] = strings.Join(cache.GetDevice(name).ContainerEdits.Env, " ")
	}
	return out
}

// TestBondInPoolWithNetwork: in the network of a DevicePool, the ports of a bond keep their own MAC
// addresses, those of their XPUPorts.
func TestBondInPoolWithNetwork(t *testing.T) {
	n := newNode(t)
	with := func(mode string) *resourceapi.ResourceClaim {
		return of("pod1", "net", claimtest.Result("vf", plainPool, "0000-3b-00-2"),
			claimtest.Result("vf", plainPool, "0000-3b-00-3"),
			claimtest.FromClaim(`"bond": {"name": "net2", "mode": "`+mode+`"}`))
	}
	n.specs["plain"] = v1alpha1.DevicePoolSpec{Network: "blue"}
	n.wantRefused(with("802.3ad"), "bond.mode 802.3ad", "joins a network (blue)")

	n.wantPrepared(with("active-backup"))
	for _, a := range n.journal.All() {
		if mac := n.ports[a.Function].Spec.MAC; string(a.Interface.MAC) != mac ||
			a.Interface.Addresses[0].String() != "10.1.0.2/24" {
			t.Errorf("Function %s gets %+v, want %s and the address of the XPUPort", a.Function,
				a.Interface, mac)
		}
	}
	// net2 is the bond.
	n.wantInterfaces(map[string]string{"0000-3b-00-2": "net1", "0000-3b-00-3": "net3"})
}

// TestEnvironmentOfSeveralDevices: a container that gets several Functions finds all of them,
// whether one request or two claims of a template ask for them.
func TestEnvironmentOfSeveralDevices(t *testing.T) {
	named := func(name string, c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
		c.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: name}
		return c
	}
	for _, test := range []struct {
		name   string
		claims []*resourceapi.ResourceClaim
		want   map[string]string
	}{
		{"count: 2", []*resourceapi.ResourceClaim{
			of("pod1", "net", claimtest.Result("vf", fastPool, "0000-3b-00-2"),
				claimtest.Result("vf", fastPool, "0000-3b-00-3")),
		}, map[string]string{
			"net-uid-0000-3b-00-2": "XPU_FUNCTION_VF=0000:3b:00.2,0000:3b:00.3 " +
				"XPU_INTERFACE_VF=net1,net2",
			"net-uid-0000-3b-00-3": "XPU_FUNCTION_VF=0000:3b:00.2,0000:3b:00.3 " +
				"XPU_INTERFACE_VF=net1,net2",
		}},
		{"two claims of a template", []*resourceapi.ResourceClaim{
			named("left",
				of("pod1", "pod1-left-x7k2p", claimtest.Result("vf", fastPool, "0000-3b-00-2"))),
			named("right",
				of("pod1", "pod1-right-9qz4c", claimtest.Result("vf", fastPool, "0000-3b-00-3"))),
		}, map[string]string{
			"pod1-left-x7k2p-uid-0000-3b-00-2": "XPU_FUNCTION_LEFT_VF=0000:3b:00.2 " +
				"XPU_INTERFACE_LEFT_VF=net1",
			"pod1-right-9qz4c-uid-0000-3b-00-3": "XPU_FUNCTION_RIGHT_VF=0000:3b:00.3 " +
				"XPU_INTERFACE_RIGHT_VF=net2",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := newNode(t)
			n.wantPrepared(test.claims...)
			n.attach(n.driver())
			if diff := gocmp.Diff(test.want, n.environments()); diff != "" {
				t.Errorf("environment: -want +got\n%s", diff)
			}
		})
	}
}

// TestPoolWentAfterPrepare: a claim keeps its MAC, MTU and addresses, on which the xPU relies, when
// its DevicePool is deleted or names no network any more, and the kubelet prepares the claim again.
func TestPoolWentAfterPrepare(t *testing.T) {
	for name, change := range map[string]func(n *node){
		"deleted":    func(n *node) { delete(n.specs, "fast") },
		"no network": func(n *node) { n.specs["fast"] = v1alpha1.DevicePoolSpec{} },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			c := of("pod1", "net", claimtest.Result("vf", fastPool, "0000-3b-00-2"))
			n.wantPrepared(c)
			before := n.journal.All()
			change(n)
			n.wantPrepared(c)
			if diff := gocmp.Diff(before[0].Interface.MAC,
				n.journal.All()[0].Interface.MAC); diff != "" || before[0].Interface.MAC == "" {
				t.Errorf("MAC: -want +got\n%s", diff)
			}
			if got := n.journal.All()[0].Interface; got.MTU != 1500 || len(got.Addresses) != 1 ||
				got.Name != "net1" {
				t.Errorf("interface %+v", got)
			}
		})
	}
}

// TestPoolWentBeforePrepare: a claim gets no Function of a DevicePool that is gone, because it would
// get it without the network of the pool, and may say for itself what the pool decides. It is
// prepared once the pool is there again.
func TestPoolWentBeforePrepare(t *testing.T) {
	n := newNode(t)
	spec := n.specs["fast"]
	delete(n.specs, "fast")
	c := of("pod1", "net", claimtest.Result("vf", fastPool, "0000-3b-00-2"))
	err := prepare(t, n.driver(), c)[c.UID].Err
	if err == nil || !strings.Contains(err.Error(), "DevicePool fast does not exist any more") {
		t.Errorf("error %v, want one that names the pool", err)
	}
	if all := n.journal.All(); len(all) > 0 {
		t.Errorf("attachments %+v, want none", all)
	}

	n.specs["fast"] = spec
	n.wantPrepared(c)
}

// TestUnprepareEndsPrepare: a Prepare that waits when its claim is unprepared reserves nothing
// afterwards.
func TestUnprepareEndsPrepare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.ports = nil // the xPU does not serve the Ports
		d := n.driver()
		c := of("pod1", "net", claimtest.Result("vf", fastPool, "0000-3b-00-2"))
		done := make(chan error, 1)
		go func() { done <- prepare(t, d, c)[c.UID].Err }()
		time.Sleep(time.Second)
		synctest.Wait()
		begin := time.Now()
		results, err := d.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{
			NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}, UID: c.UID,
		}})
		if err != nil || results[c.UID] != nil || time.Since(begin) > 0 {
			t.Errorf("Unprepare = %v, %v after %s, want success at once", results,
				err, time.Since(begin))
		}
		if err := <-done; !errors.Is(err, errUnprepared) {
			t.Errorf("Prepare = %v, want %v", err, errUnprepared)
		}
		if all := n.journal.All(); len(all) > 0 {
			t.Errorf("%+v stays reserved", all)
		}
	})
}

// goingPods says that a pod is being deleted from a time on.
type goingPods struct{ at time.Time }

func (p goingPods) Terminating(context.Context, journal.Pod) (bool, error) {
	return time.Now().After(p.at), nil
}

// TestPodGoesWhilePreparing: a Prepare ends when its pod is being deleted. The kubelet does not say
// so, and does nothing about the pod until the Prepare returns.
func TestPodGoesWhilePreparing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.ports = nil
		d := n.driver()
		begin := time.Now()
		d.PodTerminating = goingPods{begin.Add(5 * time.Second)}.Terminating
		c := of("pod1", "net", claimtest.Result("vf", fastPool, "0000-3b-00-2"))
		err := prepare(t, d, c)[c.UID].Err
		if err == nil || !strings.Contains(err.Error(), "pod default/pod1 is being deleted") {
			t.Errorf("error %v, want why it ended", err)
		}
		if took := time.Since(begin); took > 7*time.Second {
			t.Errorf("Prepare ended %s after the pod began to go, want 2 s at most",
				took-5*time.Second)
		}
	})
}

// noRuntime is a runtime that does not connect.
func noRuntime(ctx context.Context) error {
	<-ctx.Done()
	return errors.New("not connected to the container runtime")
}

// TestPrepareWithoutRuntime: a Prepare fails without a runtime that reports sandboxes, because the
// pod would start without its interface.
func TestPrepareWithoutRuntime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		d := n.driver()
		d.RuntimeConnected = noRuntime
		c := of("pod1", "net", claimtest.Result("vf", fastPool, "0000-3b-00-2"))
		err := prepare(t, d, c)[c.UID].Err
		if err == nil ||
			!strings.Contains(err.Error(),
				"claim default/net: not connected to the container runtime") {
			t.Errorf("error %v, want what is missing", err)
		}

		if _, exists := n.journal.Get(function.ID{Address: "0000:3b:00.2"}); exists {
			t.Error("the Function is reserved")
		}
	})
}

// TestForbiddenField: the node refuses a field that the DevicePool does not allow, whatever the
// controller did, except for a claim that it has prepared before.
func TestForbiddenField(t *testing.T) {
	n := newNode(t)
	c := of("pod1", "net", claimtest.Result("vf", plainPool, "0000-3b-00-2"),
		claimtest.FromClaim(`"vf": {"trust": true}`))
	n.specs["plain"] = v1alpha1.DevicePoolSpec{}
	n.wantRefused(c, "vf.trust: Forbidden: DevicePool plain")
	n.specs["plain"] = v1alpha1.DevicePoolSpec{
		Allow: []v1alpha1.PrivilegedField{v1alpha1.FieldTrust},
	}
	if err := prepare(t, n.driver(), c)[c.UID].Err; err != nil {
		t.Fatal(err)
	}

	n.specs["plain"] = v1alpha1.DevicePoolSpec{}
	if err := prepare(t, n.driver(), c)[c.UID].Err; err != nil {
		t.Errorf("prepared again: %v", err)
	}
}
