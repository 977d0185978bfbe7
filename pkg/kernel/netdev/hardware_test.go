// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// realVF returns the first VF of the machine that has a netdev on the host and a PF that reports
// it.
func realVF(t *testing.T) netdev.Device {
	t.Helper()
	const skip = "needs a machine with an SR-IOV PF, VFs made (sriov_numvfs) and their driver " +
		"loaded, such as the QEMU guest with igb"
	links, _ := filepath.Glob("/sys/bus/pci/devices/*/virtfn0")
	for _, virtfn := range links {
		pf, vf := netdevOf(filepath.Dir(virtfn)), netdevOf(virtfn)
		if pf != "" && vf != "" {
			return netdev.Device{
				Name: vf, PF: &netdev.PF{
					Name: pf, Address: filepath.Base(filepath.Dir(virtfn)), VF: 0,
				},
			}
		}
	}

	t.Skip(skip)
	return netdev.Device{}
}

func netdevOf(device string) string {
	entries, err := os.ReadDir(filepath.Join(device, "net"))
	if err != nil || len(entries) == 0 {
		return ""
	}
	return entries[0].Name()
}

func hardwareSnapshot(t *testing.T, engine *netdev.Engine, device netdev.Device) netdev.Snapshot {
	t.Helper()
	s, _, err := engine.Plan(t.Context(), device, netns.New(t).Path(),
		function.Interface{Name: "any0"})
	must.Succeed(t, err)
	return s
}

// TestHardwareVF attaches a real VF with properties that its PF enforces.
func TestHardwareVF(t *testing.T) {
	device := realVF(t)
	engine, err := netdev.New(netdev.Options{Trace: func(step string) { t.Log(step) }})
	must.Succeed(t, err)
	defer engine.Close()

	before := hardwareSnapshot(t, engine, device)
	if before.VF == nil {
		t.Fatalf("PF %s tells nothing about VF %d", device.PF.Name, device.PF.VF)
	}

	t.Logf("before: %+v, VF %+v", before, *before.VF)

	t.Run("round trip", func(t *testing.T) {
		pod := netns.New(t)
		want := function.Interface{Name: "net1", MTU: 1400, VF: &function.VFConfig{
			VLAN: new(100), QoS: new(3), Trust: new(true), SpoofCheck: new(false),
		}, Addresses: fullInterface.Addresses}
		snapshot, place, err := engine.Plan(t.Context(), device, pod.Path(), want)
		must.Succeed(t, err)
		observed, err := engine.Attach(t.Context(), device, snapshot, place, want)
		must.Succeed(t, err)
		if observed.Name != "net1" || observed.MTU != 1400 {
			t.Errorf("observed %+v", observed)
		}

		attached := netdev.Attached{Before: snapshot, Place: place, Want: want, Observed: observed}
		if got, err := engine.Check(t.Context(), device, attached); err != nil || len(got) > 0 {
			t.Errorf("check: %q, %v", got, err)
		}

		restored, err := engine.Restore(t.Context(), netdev.Device{PF: device.PF}, snapshot, place)
		must.Succeed(t, err)
		if diff := cmp.Diff(netdev.Restored{Name: device.Name}, restored); diff != "" {
			t.Errorf("restored (-want +got):\n%s", diff)
		}
		if left := netdev.Diff(before, hardwareSnapshot(t, engine, device)); len(left) > 0 {
			t.Errorf("after restore: %q", left)
		}
	})

	t.Run("MAC of a trusted VF", func(t *testing.T) {
		pod := netns.New(t)
		want := function.Interface{
			Name: "net1", MAC: "02:00:00:00:00:01", VF: &function.VFConfig{Trust: new(true)},
		}
		snapshot, place, err := engine.Plan(t.Context(), device, pod.Path(), want)
		must.Succeed(t, err)
		observed, err := engine.Attach(t.Context(), device, snapshot, place, want)
		must.Succeed(t, err)
		if observed.MAC != want.MAC {
			t.Errorf("observed %+v", observed)
		}

		_, err = engine.Restore(t.Context(), netdev.Device{PF: device.PF}, snapshot, place)
		must.Succeed(t, err)
		if left := netdev.Diff(before, hardwareSnapshot(t, engine, device)); len(left) > 0 {
			t.Errorf("after restore: %q", left)
		}
	})

	// Some drivers (igbvf) refuse a new address of an untrusted VF until the PF has set it.
	t.Run("MAC of an untrusted VF", func(t *testing.T) {
		pod := netns.New(t)
		want := function.Interface{Name: "net1", MAC: "02:00:00:00:00:01"}
		snapshot, place, err := engine.Plan(t.Context(), device, pod.Path(), want)
		must.Succeed(t, err)
		observed, err := engine.Attach(t.Context(), device, snapshot, place, want)
		must.Succeed(t, err)
		if observed.MAC != want.MAC || observed.Name != want.Name {
			t.Errorf("observed %+v", observed)
		}

		_, err = engine.Restore(t.Context(), netdev.Device{PF: device.PF}, snapshot, place)
		must.Succeed(t, err)
		if left := netdev.Diff(before, hardwareSnapshot(t, engine, device)); len(left) > 0 {
			t.Errorf("after restore: %q", left)
		}
	})

	t.Run("refused by the PF", func(t *testing.T) {
		pod := netns.New(t)
		// A driver refuses more than its port's rate, and no port has 2000 Gbit/s.
		want := function.Interface{
			Name: "net1", VF: &function.VFConfig{VLAN: new(200), MaxTxRate: new(2_000_000)},
		}
		snapshot, place, err := engine.Plan(t.Context(), device, pod.Path(), want)
		must.Succeed(t, err)
		_, err = engine.Attach(t.Context(), device, snapshot, place, want)
		if refuses := "PF " + device.PF.Name + " (" + device.PF.Address +
			") refuses rates"; err == nil || !strings.Contains(err.Error(), refuses) {
			t.Errorf("error %v, want one with %q", err, refuses)
		}

		t.Log(err)
		if left := netdev.Diff(before, hardwareSnapshot(t, engine, device)); len(left) > 0 {
			t.Errorf("after the refusal: %q", left)
		}
	})

	// The netdev of this VF is not touched, as if a userspace driver had the VF.
	t.Run("without a netdev", func(t *testing.T) {
		pod := netns.New(t)
		want := function.Interface{
			Name: "net1", MAC: "02:00:00:00:00:01", VF: &function.VFConfig{VLAN: new(100)},
			Userspace: true,
		}

		snapshot, place, err := engine.Plan(t.Context(), netdev.Device{PF: device.PF},
			pod.Path(), want)
		must.Succeed(t, err)
		observed, err := engine.Attach(t.Context(), netdev.Device{PF: device.PF}, snapshot,
			place, want)
		must.Succeed(t, err)
		if diff := cmp.Diff(netdev.Observed{Name: "net1", MAC: want.MAC}, observed); diff != "" {
			t.Errorf("observed (-want +got):\n%s", diff)
		}

		attached := netdev.Attached{Before: snapshot, Place: place, Want: want, Observed: observed}
		if got, err := engine.Check(t.Context(), netdev.Device{PF: device.PF},
			attached); err != nil || len(got) > 0 {
			t.Errorf("check: %q, %v", got, err)
		}

		_, err = engine.Restore(t.Context(), netdev.Device{PF: device.PF}, snapshot, place)
		must.Succeed(t, err)
		if left := netdev.Diff(before, hardwareSnapshot(t, engine, device)); len(left) > 0 {
			t.Errorf("after restore: %q", left)
		}
	})

	var snapshot netdev.Snapshot
	var place netdev.Place
	t.Run("pod", func(t *testing.T) { // whose namespace ends with the subtest
		pod := netns.New(t)
		want := function.Interface{Name: "net1", MTU: 1400, VF: &function.VFConfig{VLAN: new(100)}}
		var err error
		snapshot, place, err = engine.Plan(t.Context(), device, pod.Path(), want)
		must.Succeed(t, err)
		_, err = engine.Attach(t.Context(), device, snapshot, place, want)
		must.Succeed(t, err)
	})

	t.Run("namespace ended", func(t *testing.T) {
		var err error
		patience := wait.Backoff{Duration: 10 * time.Millisecond, Factor: 1.5, Steps: 14}
		_ = wait.ExponentialBackoff(patience, func() (bool, error) {
			_, err = engine.Restore(t.Context(), netdev.Device{PF: device.PF}, snapshot, place)
			return err == nil, nil
		})

		must.Succeed(t, err)
		if left := netdev.Diff(before, hardwareSnapshot(t, engine, device)); len(left) > 0 {
			t.Errorf("after restore: %q", left)
		}
	})
}
