// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// sandboxes is an engine whose network namespaces all exist, without the pods' netdevs.
type sandboxes struct{ lifecycle.Engine }

func (sandboxes) Alive(netdev.Place) (bool, error)                  { return true, nil }
func (sandboxes) Holds(netdev.Place, netdev.Identity) (bool, error) { return false, nil }

// bus is a sysfs with a root port and a PF.
type bus struct {
	*testing.T
	root string
}

func (b bus) path(name string) string { return filepath.Join(b.root, "bus/pci/devices", name) }

func (b bus) plug(address string, attributes map[string]string) {
	b.Helper()
	for name, text := range attributes {
		must.Succeed(b, os.MkdirAll(filepath.Join(b.path(address), filepath.Dir(name)), 0o755))
		must.Succeed(b, os.WriteFile(filepath.Join(b.path(address), name), []byte(text+"\n"), 0o600))
	}
}

func (b bus) plugPF() {
	b.Helper()
	b.plug("0000:3b:00.0", map[string]string{"class": "0x020000", "vendor": "0x15b3",
		"device": "0xa2dc", "net/ens3f0/ifindex": "7", "net/ens3f0/type": "1"})
}

// TestEvictOwnSF: a PF that resets ends the SFs of all pods. They are made again on it, which may
// wait for the OPI agent for long. No pod is evicted while the PF is there, or while the PF may be.
func TestEvictOwnSF(t *testing.T) {
	const after = 300 * time.Millisecond
	b := bus{t, filepath.Join(t.TempDir(), "sys")}
	b.plug("0000:00:00.0", map[string]string{"class": "0x060400"})
	b.plugPF()

	changes := make(chan struct{}, 16)
	found := inventory.New(inventory.Options{
		SysRoot: b.root, Log: testr.New(t),
		HostNetdevs: func() (hostuse.Netdevs, error) { return nil, nil },
		Changed: func() {
			select {
			case changes <- struct{}{}:
			default:
			}
		},
	})
	must.Run(t, found.Run)
	if !found.Synced(t.Context()) {
		t.Fatal("no inventory")
	}

	l := newLosing(t)
	sf := pooltest.SF(0x3b, 7)
	must.Succeed(t, l.journal.Delete(l.record.Function))
	l.record.Function, l.record.PF, l.record.PFName = sf.ID, sf.PF, sf.PFName
	l.record.Claim.Device, l.record.Setup = sf.ID.DeviceName(), &journal.Setup{SF: true}
	must.Succeed(t, l.journal.Put(l.record))
	manager := lifecycle.New(l.journal, sandboxes{}, found, lifecycle.Options{
		BootID: "boot", Seen: found.Get, SweepEvery: 10 * time.Millisecond,
		Expose: func(journal.Attachment) error { return nil }, Report: func(journal.Attachment) {},
		Changed: func() {},
		// The OPI agent is away.
		Serve: func(context.Context, journal.Attachment) error { return context.DeadlineExceeded },
	}, logr.Discard())
	must.Run(t, func(ctx context.Context) error { return manager.Run(ctx, changes) })

	losses := &Losses{Node: "node1", Journal: l.journal, MissingFor: found.MissingFor,
		Replaced: manager.Replaced}
	offering := pooltest.DRA("fast", sf)
	offering.Spec.EvictLostAfter = &metav1.Duration{Duration: after}
	evicted := func() bool {
		t.Helper()
		empty := pooltest.DRA("fast")
		empty.Spec = offering.Spec
		pools := []pool.Pool{empty}
		resources := devicemodel.Resources("node1", pools, noProblems().Problems, nil)
		losses.mark(resources, pools, devicemodel.AllFeatures())
		for _, slice := range resources.Pools[evictingPool].Slices {
			for _, d := range slice.Devices {
				if len(d.Taints) > 0 && d.Taints[0].Key == v1alpha1.TaintLost {
					return true
				}
			}
		}
		return false
	}
	// The SF as the pod had it.
	losses.held = map[deviceName]function.Function{{evictingPool, sf.ID.DeviceName()}: sf}
	must.EventuallySucceed(t, "the pod has lost its SF", func() error {
		if a, _ := l.journal.Get(sf.ID); a.State != journal.Lost {
			return fmt.Errorf("it is %s", a.State)
		}
		return nil
	})

	staysFor := func(what string) {
		t.Helper()
		for deadline := time.Now().Add(2 * after); time.Now().Before(deadline); {
			if evicted() {
				t.Fatalf("the pod is evicted although %s", what)
			}
		}
	}
	staysFor("the PF is there, and only its Port is missing")

	must.Succeed(t, os.Rename(b.path(""), filepath.Join(b.root, "away")))
	staysFor("the bus is not to be seen")
	must.Succeed(t, os.Rename(filepath.Join(b.root, "away"), b.path("")))
	must.Succeed(t, os.RemoveAll(b.path("0000:3b:00.0")))
	gone := time.Now()
	must.EventuallySucceed(t, "the pod is evicted after its card is gone", func() error {
		if !evicted() {
			return fmt.Errorf("not after %s", time.Since(gone))
		}
		return nil
	})
	if early := time.Since(gone); early < after {
		t.Errorf("evicted %s after the card went, want %s", early, after)
	}

	b.plugPF()
	staysFor("the PF is back")
}
