// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// AgentPorts knows which port an OPI agent must have for an XPUPort.
type AgentPorts struct {
	Client       client.Reader // reads come from the cache
	Ports        *model.Ports
	Installation opi.Installation // marks the ports at OPI agents
}

// Of returns the port that the XPU's agent must have for the XPUPort. The XPU may be nil.
func (a AgentPorts) Of(port *v1alpha1.XPUPort, xpu *v1alpha1.XPU) (opi.Port, error) {
	mac, err := function.ParseMAC(port.Spec.MAC)
	if err != nil {
		return opi.Port{}, fmt.Errorf("spec.mac: %w", err)
	}
	id, err := PortID(port, xpu)
	if port.Spec.IsTrunk() {
		return a.Installation.Trunk(id, mac, port.Spec.AllNetworks()), err
	}
	return a.Installation.Port(id, mac, port.Spec.Network), err
}

// ClaimedElsewhere names the XPUPort of another XPU that a port of the installation belongs to, or
// returns "". Two XPUs can have the same agent although their endpoints differ, and their
// nodes can have Functions with the same addresses.
func (a AgentPorts) ClaimedElsewhere(ctx context.Context, xpu string, port opi.PortStatus) string {
	same, err := a.Ports.By(ctx, model.ByMAC, port.MAC.String())
	if err != nil { // the cache is not running
		return "an XPUPort that cannot be read: " + err.Error()
	}

	var own v1alpha1.XPU
	if err := a.Client.Get(ctx, client.ObjectKey{Name: xpu},
		&own); client.IgnoreNotFound(err) != nil {
		return "an XPU that cannot be read: " + err.Error()
	}

	elsewhere := ""
	for i := range same {
		other := same[i]
		// A standby Port is not served, and the Port that it will replace may have the same id at
		// its own xPU.
		if addresses.IsStandby(other) {
			continue
		}

		var its v1alpha1.XPU
		err := a.Client.Get(ctx, client.ObjectKey{Name: other.Spec.XPU}, &its)
		if apierrors.IsNotFound(err) {
			continue // it is gone, and nothing of it is served
		}
		if err != nil {
			elsewhere = "an XPU that cannot be read: " + err.Error()
			continue
		}

		want, err := a.Of(other, &its)
		switch {
		case err != nil || !port.Equal(want):
		case other.Spec.XPU == xpu:
			return ""
		case differ(own.Status.Serial, its.Status.Serial): // two cards, and so two agents
		default:
			elsewhere = fmt.Sprintf(
				"XPUPort %s/%s of XPU %s, which seems to have the same OPI agent", other.Namespace,
				other.Name, other.Spec.XPU,
			)
		}
	}

	return elsewhere
}

// differ reports whether two serial numbers are known and differ.
func differ(a, b string) bool { return a != "" && b != "" && a != b }

// PortID returns the id of a Port at the OPI agent. It is the id that the Port has already, or else
// the name of the Function's eswitch port if the XPU's status has the name of its PF. The XPU may
// be nil.
func PortID(port *v1alpha1.XPUPort, xpu *v1alpha1.XPU) (string, error) {
	if port.Status.BridgePort != "" {
		return port.Status.BridgePort, nil
	}

	f := claim.FunctionOf(port.Spec.Function)
	if xpu != nil && !AtAnotherNode(port, xpu) {
		if id := eswitchPort(xpu.Status.PFs, f); id != "" {
			return id, nil
		}
	}

	return opi.PortID(f)
}

// AtAnotherNode reports whether the XPU belongs to another node. Ports of two nodes can have the
// same id, so that a Port at another node's XPU could take over a port of that node.
func AtAnotherNode(port *v1alpha1.XPUPort, xpu *v1alpha1.XPU) bool {
	return port.Spec.NodeName != xpu.Node()
}

// HasFunction reports whether a Function is one of these PFs, one of their VFs, or an SF of one of
// them with any number.
func HasFunction(pfs []v1alpha1.XPUPF, f function.ID) bool {
	_, _, ok := pfOf(pfs, f)
	return ok
}

// eswitchPort returns the port id of a Function of one of these PFs, "" for other Functions.
func eswitchPort(pfs []v1alpha1.XPUPF, f function.ID) string {
	pf, name, ok := pfOf(pfs, f)
	if !ok {
		return ""
	}

	id := opi.PortIDAt(pf.Name, name)
	if len(id) < opi.MinID { // a whole PF whose card names no controllers, "pf0"
		return ""
	}
	return id
}

// pfOf is [function.PFOf] for the PFs of an XPU's status.
func pfOf(pfs []v1alpha1.XPUPF, f function.ID) (pf v1alpha1.XPUPF, name string, ok bool) {
	return function.PFOf(pfs, f,
		func(pf v1alpha1.XPUPF) pci.Address { return pci.Address(pf.Address) },
		func(pf v1alpha1.XPUPF, vf pci.Address) (index, distance int, ok bool) {
			index, distance, ok = pci.VFIndex(pci.Address(pf.Address), vf, int(pf.VFOffset),
				int(pf.VFStride))
			return index, distance, ok && index < int(pf.TotalVFs)
		})
}
