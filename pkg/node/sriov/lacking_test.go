// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// TestVFsWithoutDriver checks that VFs without a driver count as lacking.
func TestVFsWithoutDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 3)
		for i := range 3 {
			h.bind(vf(pf0, i), "")
			h.must(os.RemoveAll(h.dir(vf(pf0, i), "net")))
		}

		h.write(pf0, "sriov_drivers_autoprobe", "0")
		binding := wants("binding", 3, "ens0")
		binding.Spec.Driver = v1alpha1.DriverVFIO
		h.declare(wants("three", 3, "ens0"), binding)
		h.run()
		synctest.Wait()
		h.wrote()
		h.short("three", v1alpha1.ReasonNoDriver,
			"has 3 VFs without a driver: sriov_drivers_autoprobe of the PF is 0: write 1 there")
		h.short("binding", "", "") // the driver comes with the pod

		h.write(pf0, "sriov_drivers_autoprobe", "1")
		h.bind(vf(pf0, 0), "igbvf")
		h.must(os.MkdirAll(h.dir(vf(pf0, 0), "net", "v0-0"), 0o755))
		// the pod of this VF has its driver
		h.record(journal.Attachment{Function: function.ID{Address: vf(pf0, 1)}})
		synctest.Wait()
		h.short("three", v1alpha1.ReasonNoDriver, "has 1 VFs without a driver: load the module")

		h.bind(vf(pf0, 2), "igbvf")
		h.functions.Notify()
		synctest.Wait()
		h.short("three", v1alpha1.ReasonNoNetdev,
			"has 1 VFs without a netdev, which driver igbvf may still make")
		h.must(os.MkdirAll(h.dir(vf(pf0, 2), "net", "v0-2"), 0o755))
		h.functions.Notify()
		synctest.Wait()
		h.short("three", "", "")
	})
}

// TestSickCardIsLeftAlone checks that the number of VFs of a card in error is not changed before
// the driver has recovered.
func TestSickCardIsLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 3)
		h.sick = `see "devlink health show pci/0000:3b:00.0 reporter fw"`
		h.declare(wants("two", 2, "ens0"), wants("three", 3, "ens1"))
		h.run()
		synctest.Wait()
		h.short("two", v1alpha1.ReasonFault,
			`is not changed: see "devlink health show pci/0000:3b:00.0 reporter fw"`)
		time.Sleep(time.Hour)
		h.wrote()

		h.set(func() { h.sick = "" })
		h.poolChanges.Notify() // as after every change of health
		time.Sleep(pause + time.Millisecond)
		synctest.Wait()
		h.wrote("0000:3b:00.0 0", "0000:3b:00.0 2")
		h.short("two", "", "")
	})
}

// TestNoVFsWhilePFIsDown checks the message for a driver that reports success but made no VFs,
// because the PF is down.
func TestNoVFsWhilePFIsDown(t *testing.T) {
	for _, test := range []struct {
		name, flags, want string
	}{
		{"down", "0x1002", "has 0 VFs after driver igb was told to make 5: see the kernel's log; " +
			`the PF is administratively down: set it up by "ip link set ens0 up"`},
		{"up without a link", "0x1003", "has 0 VFs after driver igb was told to make 5: see the " +
			"kernel's log"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t, 0)
				h.must(os.WriteFile(h.dir(pf0, "net/ens0/flags"), []byte(test.flags+"\n"), 0o644))
				h.refused = 5
				h.declare(wants("five", 5, "ens0"))
				h.run()
				time.Sleep(showTimeout + pause)
				synctest.Wait()
				h.short("five", v1alpha1.ReasonRefused, test.want)
			})
		})
	}
}
