package health

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Unusable says why an attach of a free Function would fail, by what the inventory shows of the
// Function; ok is true for a Function that can be attached. One answer decides whether a Function
// is offered and whether it is attached. p is the pool of the Function, the zero value for none.
// driver is the one that will be bound for the owner, "" for the Function's own.
//
// The answer is about a Function that no pod has: the netdev of one in a pod is away, and its
// driver may be the owner's.
func Unusable(f function.Function, p pool.Pool, driver string) (problem function.Problem, ok bool) {
	if f.Potential || f.Class != function.Network {
		return function.Problem{}, true
	}

	fault := cannotServe(f, p)
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

// cannotServe says why the driver that the Function has now gives a pod nothing, "" if it serves
// the pods of its pool.
func cannotServe(f function.Function, p pool.Pool) string {
	switch {
	case f.Driver == "":
		return "the Function has no driver: load the module and bind it; " +
			"if sriov_drivers_autoprobe of the PF is 0, write 1 there, and make the VFs again"
	case f.Userspace() && p.Name != "" && !p.NamesDriver(f.Driver):
		return fmt.Sprintf("driver is %s, which makes no netdev, and its pool has netdevs: "+
			"bind the Function's own driver again; if programs are to have the Function, "+
			"name the driver in spec.selectors[].drivers of DevicePool %s", f.Driver, p.Name)
	case f.Userspace() || !f.NoNetdev || f.VDPA.Name != "" || f.RDMA && p.Options(f).RDMA:
		return ""
	}
	return fmt.Sprintf("driver %s has made no netdev yet: "+
		"if that stays so, see the kernel's log, and bind the driver anew", f.Driver)
}
