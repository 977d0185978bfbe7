// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// faults watches health reporters.
type faults struct {
	*health.Reporters
	changed chan struct{}
}

func followFaults(t *testing.T, conn *devlink.Conn) faults {
	t.Helper()
	f := faults{changed: make(chan struct{}, 1)}
	f.Reporters = health.NewReporters(health.ReportersOptions{
		SysRoot: "/sys", Devlink: conn, Log: testr.New(t),
		Follow: func(ctx context.Context, changed func()) {
			devlink.Follow(ctx, "", changed, testr.New(t))
		},
		Changed: func() {
			select {
			case f.changed <- struct{}{}:
			default:
			}
		},
	})

	must.Run(t, f.Run)
	if !f.Synced(t.Context()) {
		t.Fatal("the reporters were not looked at")
	}

	return f
}

// of returns the Functions that have a fault.
func (f faults) of(functions []function.Function) []string {
	var faulty []string
	for _, function := range functions {
		if f.Fault(function) != "" {
			faulty = append(faulty, function.ID.String())
		}
	}
	return faulty
}

// await waits until exactly these Functions have a fault.
func (f faults) await(t *testing.T, begin time.Time, functions []function.Function, want []string) {
	t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()

	for {
		got := f.of(functions)
		if slices.Equal(got, want) {
			t.Logf("known %s after the driver's change",
				time.Since(begin).Round(10*time.Microsecond))
			return
		}

		select {
		case <-f.changed:
		case <-late.C:
			t.Fatalf("Functions with a fault are %q, want %q", got, want)
		}
	}
}

// fail makes the driver simnic report an error, or its end.
func fail(t *testing.T, pf pci.Address, how string) (begin time.Time) {
	t.Helper()
	begin = time.Now()
	card.SetAttribute(t, pf, "simnic_break", how)
	return begin
}

// TestHealthReporter checks that an error that a driver reports applies to the right Functions, and
// only as long as it lasts.
func TestHealthReporter(t *testing.T) {
	card.InGuest(t, "simnic")
	pfs := card.PFs(t)
	if len(pfs) < 2 {
		t.Fatalf("the guest has %d cards, want 2", len(pfs))
	}

	pf := pfs[0]
	conn, err := devlink.Dial("")
	must.Succeed(t, err)
	defer conn.Close()

	functions := inventoried(t)
	ofPF, ofOther := functionsOf(functions, pf), functionsOf(functions, pfs[1])
	if len(ofPF) < 2 || len(ofOther) == 0 {
		t.Fatalf("PF %s has the Functions %q, PF %s %q: the guest lacks what is tested", pf,
			ofPF, pfs[1], ofOther)
	}

	f := followFaults(t, conn)

	t.Run("error of a PF is one of all its Functions until it recovers", func(t *testing.T) {
		f.await(t, fail(t, pf, "1"), functions, ofPF)
		function := functions[slices.IndexFunc(functions, func(f function.Function) bool {
			return f.PF == pf
		})]
		if message := f.Fault(function); !strings.Contains(message, "devlink health show pci/"+
			string(pf)+" reporter fw") {
			t.Errorf("message %q does not say where to look", message)
		}
		f.await(t, fail(t, pf, "0"), functions, nil)
	})

	t.Run("error that the driver recovered from is none", func(t *testing.T) {
		before := count(t, conn, pf)
		fail(t, pf, "x")
		if after := count(t, conn, pf); after != before+1 {
			t.Fatalf("%d errors were told of, want %d", after, before+1)
		}
		// The next observation comes after it, and must not contain it.
		f.await(t, fail(t, pfs[1], "1"), functions, ofOther)
		f.await(t, fail(t, pfs[1], "0"), functions, nil)
	})

	t.Run("error of a VF's port is that VF's", func(t *testing.T) {
		must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Switchdev))
		t.Cleanup(func() {
			must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Legacy))
		})
		f.await(t, fail(t, pf, "1 2"), functions, []string{string(card.VF(t, pf, 2))})
		f.await(t, fail(t, pf, "0 2"), functions, nil)
	})

	t.Run("error ends with the device that it was of", func(t *testing.T) {
		vfs := card.Attribute(t, pf, "sriov_numvfs")
		f.await(t, fail(t, pf, "1"), functions, ofPF)
		card.Set(t, "/sys/bus/pci/drivers/simnic/unbind", string(pf))
		begin := time.Now()

		t.Cleanup(func() {
			card.Set(t, "/sys/bus/pci/drivers/simnic/bind", string(pf))
			card.SetAttribute(t, pf, "sriov_numvfs", vfs)
			must.Succeed(t, netlink.LinkSetUp(linkOf(t, card.Netdev(pf))))
		})

		f.await(t, begin, functions, nil)
	})
}

// functionsOf returns the PF and its VFs and SFs.
func functionsOf(functions []function.Function, pf pci.Address) []string {
	var its []string
	for _, f := range functions {
		if f.PF == pf {
			its = append(its, f.ID.String())
		}
	}
	return its
}

// count returns how many errors the PF's own reporter has reported.
func count(t *testing.T, conn *devlink.Conn, pf pci.Address) uint64 {
	t.Helper()
	reporters, err := conn.Reporters()
	must.Succeed(t, err)

	for _, r := range reporters {
		if r.Device == devlink.OfPCI(pf) && r.Port < 0 {
			return r.Errors
		}
	}

	t.Fatalf("PF %s has no reporter in %+v", pf, reporters)
	return 0
}
