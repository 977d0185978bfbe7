// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Unusable returns the problem because of which a free Function cannot be attached, according to
// the inventory. ok is true if the Function can be attached. The offer and the attachment of a
// Function both use this answer.
//
// p is the pool of the Function, or the zero value if it is in no pool. driver is the driver that
// will be bound for the owner, or "" for the Function's current driver.
//
// The answer is valid only for a Function that no pod has. The netdev of a Function in a pod is not
// on the host, and its driver may be the one of the owner.
func Unusable(f function.Function, p pool.Pool, driver string) (problem function.Problem, ok bool) {
	if f.Class != function.Network {
		return function.Problem{}, true
	}

	if err := f.CheckLinkType(function.Interface{}, p.Spec.Network); err != nil {
		message := fmt.Sprintf("DevicePool %s: spec.%v", p.Name, err)
		return function.Problem{Taint: v1alpha1.TaintFault, Message: message}, false
	}

	fault := cannotServe(f, p)
	if fault == "" {
		fault = cannotShare(f, p)
	}

	switch {
	case driver == "" && fault != "":
		return function.Problem{Taint: v1alpha1.TaintFault, Message: fault}, false
	case f.HostUse != "":
		message := fmt.Sprintf("the host uses the Function: netdev %s %s; "+
			"the Function is offered again when that has ended", f.Netdev, f.HostUse)
		return function.Problem{Taint: v1alpha1.TaintInUse, Message: message}, false
	}

	return function.Problem{}, true
}

// cannotServe returns why a pod cannot use the Function with its current driver, or "" if pods of
// its pool can use it.
func cannotServe(f function.Function, p pool.Pool) string {
	switch {
	case f.Potential:
		return ""
	case f.Driver == "":
		return "the Function has no driver: load the module and bind it; " +
			"if sriov_drivers_autoprobe of the PF is 0, write 1 there, and make the VFs again"
	case f.Userspace() && p.Name != "" && !p.NamesDriver(f):
		return fmt.Sprintf("driver is %s, which makes no netdev, and its pool has netdevs: "+
			"bind the Function's own driver again; if programs are to have the Function, "+
			"name the driver in spec.selectors[].drivers of DevicePool %s", f.Driver, p.Name)
	case f.Userspace() || !f.NoNetdev || f.VDPA.Name != "" || f.RDMA && p.Options(f).RDMA:
		return ""
	}
	return fmt.Sprintf("driver %s has made no netdev yet: "+
		"if that stays so, see the kernel's log, and bind the driver anew", f.Driver)
}

// cannotShare returns why a pod could not open the RDMA device of the Function. It returns "" if
// the pod could, or if the pool does not ask for the device.
//
// In mode exclusive, only processes in the network namespace of the device can open it
// (ib_uverbs_open of drivers/infiniband/core/uverbs_main.c), and the device goes to the pod. The
// IPoIB netdev of an InfiniBand Function ends then, and the kernel makes another one
// (disable_device and enable_device_and_get of drivers/infiniband/core/device.c).
//
// If the mode is unknown, the Function is not offered. An SF that does not exist yet is checked again
// when it is made, because its PF may lack an RDMA device that shows the mode.
func cannotShare(f function.Function, p pool.Pool) string {
	unknown := f.RDMA && f.RDMAMode == ""
	again := f.RDMAMode == function.RDMAExclusive && f.LinkType == function.InfiniBand
	switch {
	case !again && !unknown, !p.Options(f).RDMA:
		return ""
	case again:
		return "the RDMA system of the node is in mode exclusive, in which the kernel makes the IPoIB " +
			"netdev of the Function anew when its RDMA device goes to a pod: have " +
			`"options ib_core netns_mode=1" in /etc/modprobe.d and boot the node anew, or run ` +
			`"rdma system set netns shared" when it boots, as the kernel refuses that once there ` +
			"are network namespaces"
	}

	return "whether a pod can open the RDMA device of the Function is not known: the agent's log " +
		"says why /sys/module/ib_core/parameters/netns_mode cannot be read; make it readable"
}
