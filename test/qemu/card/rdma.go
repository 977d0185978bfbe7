// SPDX-License-Identifier: Apache-2.0

package card

import (
	"errors"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// ExclusiveRDMA gives each VF of a PF of simnic an RDMA device, and sets the mode of the RDMA system
// to exclusive, until the test ends.
func ExclusiveRDMA(t *testing.T, pf pci.Address) {
	t.Helper()
	setMode(t, "exclusive")
	t.Cleanup(func() { setMode(t, "shared") })
	RDMA(t, pf)
}

// RDMA gives each VF of a PF of simnic an RDMA device until the test ends.
func RDMA(t *testing.T, pf pci.Address) {
	t.Helper()
	SetAttribute(t, pf, "simnic_rdma", "1")
	t.Cleanup(func() { SetAttribute(t, pf, "simnic_rdma", "0") })
}

// setMode sets the mode of the RDMA system. The kernel refuses that while there are other network
// namespaces, and ends those of earlier tests a moment later.
func setMode(t *testing.T, mode string) {
	t.Helper()
	end := time.Now().Add(30 * time.Second)
	for {
		err := netlink.RdmaSystemSetNetnsMode(mode)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			must.Succeed(t, err)
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}
