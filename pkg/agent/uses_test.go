package agent

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/podresources/podresourcestest"
	"github.com/opiproject/xpu-device-plugin/pkg/pool"
)

// declared is one DevicePool and the VF that it selects.
type declared v1alpha1.PublishMode

func (d declared) Snapshot() []inventory.Function {
	return []inventory.Function{{ID: vf, Kind: inventory.VF, Class: inventory.Network, Vendor: "15b3"}}
}

func (d declared) Get(id inventory.ID) (inventory.Function, bool) {
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

// newUses makes uses of a node with a kubelet and one Function, in a pool that is published this way.
func newUses(t *testing.T, publish v1alpha1.PublishMode) (u *uses, kubelet *podresourcestest.Kubelet, dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "u") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if kubelet, err = podresourcestest.Start(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kubelet.Stop)
	client, err := podresources.NewClient(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	tracker := pool.NewTracker(declared(publish), declared(publish), nil, testr.New(t))
	ctx, stop := context.WithCancel(t.Context())
	if err := tracker.Run(ctx, nil, stop); err != nil {
		t.Fatal(err)
	}
	return &uses{
		journal: openJournal(t), tracker: tracker, pods: podresources.NewTracker(client, logr.Discard()),
		changed: func() {}, log: testr.New(t),
	}, kubelet, dir
}

func TestElsewhere(t *testing.T) {
	const fast = "xpu.opiproject.org/fast"
	byResource := podresourcestest.Pod("web", fast, vf.String())
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
			journal.Attachment{State: journal.Reserved, Claim: journal.Claim{Namespace: "default", Name: "net", UID: "c"}},
			nil, "claim default/net"},
		{"by another resource", v1alpha1.PublishDevicePlugin,
			journal.Attachment{State: journal.Attached, Resource: "intel.com/old", Pod: pod}, nil,
			"pod default/web has it by resource intel.com/old"},
		{"allocated by a resource, for a pod that has not come", v1alpha1.PublishDRA,
			journal.Attachment{State: journal.Reserved, Resource: fast}, nil, "a pod has it by resource " + fast},
		{"being released", v1alpha1.PublishDRA, journal.Attachment{State: journal.Releasing, Resource: fast}, nil, ""},
		{"by the kubelet alone", v1alpha1.PublishDRA, journal.Attachment{}, byResource, "pod default/web"},
		{"the kubelet did not answer when CNI came, and does now", v1alpha1.PublishDevicePlugin,
			journal.Attachment{State: journal.Attached, Pod: pod}, byResource, ""},
		{"by CNI, and not from the kubelet", v1alpha1.PublishDevicePlugin,
			journal.Attachment{State: journal.Attached, Pod: pod}, nil, "pod default/web has it by CNI"},
		{"by CNI, of a pool of claims", v1alpha1.PublishDRA,
			journal.Attachment{State: journal.Attached, Pod: pod}, nil, "pod default/web has it by CNI"},
	} {
		t.Run(test.name, func(t *testing.T) {
			u, kubelet, _ := newUses(t, test.publish)
			if test.record.State != "" {
				test.record.Function = vf
				if test.record.State == journal.Attached {
					test.record.Before, test.record.Observed = &link.Snapshot{}, &link.Observed{}
				}
				put(t, u.journal, test.record)
			}
			if test.kubelet != nil {
				kubelet.Set(test.kubelet)
			}
			u.look(t.Context())
			got := u.elsewhere(vf)
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("elsewhere = %q, want %q", got, test.want)
			}
		})
	}
}

// reserving counts reservations.
type reserving int

func (r *reserving) Reserve(context.Context, journal.Attachment) error {
	*r++
	return nil
}

// TestGuardAsksAgain: the kubelet gave the Function to a pod just when its pool moved to DRA, after it was asked.
func TestGuardAsksAgain(t *testing.T) {
	u, kubelet, _ := newUses(t, v1alpha1.PublishDRA)
	u.look(t.Context())
	var reserved reserving
	g := guard{reserver: &reserved, uses: u}
	want := journal.Attachment{Function: vf, Claim: journal.Claim{UID: "c"}}
	if err := g.Reserve(t.Context(), want); err != nil || reserved != 1 {
		t.Errorf("Reserve = %v, want it passed on", err)
	}
	kubelet.Set(podresourcestest.Pod("web", "xpu.opiproject.org/fast", vf.String()))
	if err := g.Reserve(t.Context(), want); err == nil || !strings.Contains(err.Error(), "default/web") || reserved != 1 {
		t.Errorf("Reserve = %v, passed on %d times; want an error that names the pod", err, reserved)
	}
}

// TestUsesOfAKubeletThatIsAway: claims do not wait for it, and it is asked again soon.
func TestUsesOfAKubeletThatIsAway(t *testing.T) {
	u, kubelet, dir := newUses(t, v1alpha1.PublishDRA)
	kubelet.Stop()
	u.look(t.Context())
	if !u.away.Load() {
		t.Fatal("the kubelet does not count as away")
	}
	var reserved reserving
	begin := time.Now()
	for range 10 {
		if err := (guard{reserver: &reserved, uses: u}).Reserve(t.Context(), journal.Attachment{Function: vf}); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(begin); took > lookTimeout {
		t.Errorf("10 reservations took %s: each asks a kubelet that does not answer", took)
	}
	u.times.conflict = time.Millisecond
	asked := make(chan struct{})
	u.changed = sync.OnceFunc(func() { close(asked) })
	again, err := podresourcestest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Stop)
	again.Set(podresourcestest.Pod("web", "intel.com/other", vf.String()))
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { u.run(ctx, nil) })
	defer running.Wait()
	defer stop()
	select {
	case <-asked:
	case <-time.After(20 * time.Second):
		t.Error("the kubelet came back and was not asked soon")
	}
}
