// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

// OwnMAC returns the MAC address that a Port of the Function must have, or "" if the XPU accepts
// any. It is the permanent address of the Function if OPI agents of the XPU's dialect know
// Functions by it. A refusal says why the address is not known.
func OwnMAC(
	ctx context.Context, c client.Reader, xpu *v1alpha1.XPU, node string, f function.ID,
) (string, error) {
	dialect, err := dialects.Named(string(xpu.Spec.Dialect))
	if err != nil || !dialect.Traits.HardwareMAC {
		return "", nil
	}

	var report v1alpha1.XPUNode
	if err := c.Get(ctx, client.ObjectKey{Name: node},
		&report); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("XPUNode %s: %w", node, err)
	}

	if mac := permanentMAC(report.Status.PFs, f); mac != "" {
		return mac, nil
	}

	return "", reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
		"XPU %s knows Functions by their permanent MAC addresses, and XPUNode %s does not have "+
			"that of Function %s in status.pfs[].vfMACs: only VFs have one there, and only if "+
			"their drivers report it; see permaddr in \"ip --details link\" on the node", xpu.Name,
		node, f)
}

// CheckOwnMAC returns a refusal if the XPU knows the Port's Function by another MAC address than
// the Port's.
func CheckOwnMAC(
	ctx context.Context, c client.Reader, xpu *v1alpha1.XPU, port *v1alpha1.XPUPort,
) error {
	f := claim.FunctionOf(port.Spec.Function)
	own, err := OwnMAC(ctx, c, xpu, port.Spec.NodeName, f)
	if err != nil || own == "" || own == port.Spec.MAC {
		return err
	}
	return reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
		"XPU %s knows Function %s by its permanent MAC address %s, and the XPUPort has %s; leave "+
			"mac out where the pod asks for its interface", xpu.Name, f, own, port.Spec.MAC)
}

// permanentMAC returns the permanent address of a VF of one of these PFs, or "".
func permanentMAC(pfs []v1alpha1.XPUNodePF, f function.ID) string {
	if _, isSF := f.SFNum(); isSF {
		return ""
	}

	for _, pf := range pfs {
		index, _, ok := pci.VFIndex(pci.Address(pf.Address), f.Address, int(pf.VFOffset),
			int(pf.VFStride))
		if ok && index < min(int(pf.TotalVFs), len(pf.VFMACs)) {
			mac := pf.VFMACs[index]
			if _, err := function.ParseMAC(mac); err != nil || isShared(pfs, mac) {
				return ""
			}
			return mac
		}
	}

	return ""
}

// isShared reports whether several VFs have the address, so that it identifies none.
func isShared(pfs []v1alpha1.XPUNodePF, mac string) bool {
	has := 0
	for _, pf := range pfs {
		for _, other := range pf.VFMACs {
			if other == mac {
				has++
			}
		}
	}
	return has > 1
}
