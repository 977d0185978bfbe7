package release_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/release"
)

// returning plays the kernel that ends a namespace in the background: the netdev is nowhere for some looks.
type returning struct {
	gone  int // looks that do not find it
	looks int
	fail  error
}

func (r *returning) Restore(context.Context, link.Device, link.Snapshot, link.Place) (link.Restored, error) {
	r.looks++
	if r.looks <= r.gone {
		return link.Restored{}, link.ErrGone
	}
	return link.Restored{Name: "ens3f0v1"}, r.fail
}

func (r *returning) Alive(link.Place) (bool, error) { return false, nil }

func TestNowhere(t *testing.T) {
	const never = 1 << 30
	hardware, virtual := link.Identity{Parent: "0000:3b:02.1", Bus: "pci"}, link.Identity{Kind: "veth", Peer: 3}
	there := finderFunc(func(inventory.ID) (string, error) { return "", nil })
	refusal := errors.New("refused")
	tests := map[string]struct {
		identity link.Identity
		gone     int
		fail     error
		netdevs  finderFunc
		stopped  time.Duration // since
		err      error
	}{
		"returns late":                  {hardware, 2, nil, there, 0, nil},
		"hardware is expected back":     {hardware, never, nil, there, 0, link.ErrGone},
		"hardware lost its driver":      {hardware, never, nil, there, time.Hour, nil},
		"a veth ends with its pod":      {virtual, never, nil, there, 0, nil},
		"the Function is gone":          {hardware, never, nil, func(inventory.ID) (string, error) { return "", errors.New("is gone") }, 0, nil},
		"a property cannot be put back": {hardware, 0, refusal, there, time.Hour, refusal},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
			must(t, err)
			defer j.Close()
			a := journal.Attachment{
				Function: function(0), State: journal.Detaching, BootID: "boot-1", Sandbox: "s1",
				Before: &link.Snapshot{Name: "ens3f0v1", Identity: test.identity}, StoppedAt: time.Now().Add(-test.stopped),
			}
			must(t, j.Put(a))
			engine := &returning{gone: test.gone, fail: test.fail}
			r := release.New(j, engine, test.netdevs, release.Options{
				BootID: "boot-1", Patience: wait.Backoff{Duration: time.Millisecond, Steps: 4},
			}, logr.Discard())
			if err := r.Release(t.Context(), a.Function, ""); !errors.Is(err, test.err) {
				t.Errorf("error %v, want %v", err, test.err)
			}
			record, ok := j.Get(a.Function)
			if free := test.err == nil; ok == free {
				t.Errorf("free %v, want %v", !ok, free)
			}
			if ok && record.State != journal.Releasing {
				t.Errorf("state %s", record.State)
			}
		})
	}
}

// A caller that gives up while a netdev is nowhere has not made it gone.
func TestNowhereCancelled(t *testing.T) {
	j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
	must(t, err)
	defer j.Close()
	must(t, j.Put(journal.Attachment{
		Function: function(0), State: journal.Detaching, BootID: "boot-1", Before: &link.Snapshot{Identity: link.Identity{Kind: "veth"}},
	}))
	ctx, cancel := context.WithCancel(t.Context())
	netdevs := finderFunc(func(inventory.ID) (string, error) { cancel(); return "", nil })
	r := release.New(j, &returning{gone: 1 << 30}, netdevs, release.Options{BootID: "boot-1"}, logr.Discard())
	if err := r.Release(ctx, function(0), ""); err == nil {
		t.Error("released")
	}
	if record, ok := j.Get(function(0)); !ok || record.State != journal.Releasing {
		t.Errorf("record %v, state %s", ok, record.State)
	}
}
