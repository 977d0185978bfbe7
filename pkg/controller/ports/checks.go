// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"context"
	"fmt"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

// check returns a refusal if the XPU must not serve the Port in its networks. The XPU is nil if it
// does not exist.
func (r *reconciler) check(
	ctx context.Context, port *v1alpha1.XPUPort, joined []*v1alpha1.XPUNetwork, xpu *v1alpha1.XPU,
) error {
	if xpu == nil {
		return reconciling.Refuse(v1alpha1.ReasonNoXPU, "XPU %s does not exist", port.Spec.XPU)
	}
	if xpus.AtAnotherNode(port, xpu) {
		return reconciling.Refuse(v1alpha1.ReasonNoXPU,
			"XPU %s belongs to node %s, not to node %s", xpu.Name, xpu.Node(), port.Spec.NodeName)
	}
	if err := checkFunction(port, xpu); err != nil {
		return err
	}
	if err := r.checkNumber(ctx, port); err != nil {
		return err
	}
	for _, network := range joined {
		if err := r.checkRouted(port, network, xpu); err != nil {
			return err
		}
	}
	if isGivenUp(port, xpu) && port.Status.BridgePort == "" {
		return keptFromPods(port, xpu)
	}

	if r.Allocator != nil && port.Spec.Claim.Name != "" {
		return r.Allocator.CheckOwn(ctx, port)
	}

	return nil
}

// checkRouted returns a refusal if the network is routed and the XPU's agent cannot be its gateway,
// or if the Port has the gateway's MAC address or an address of it.
func (r *reconciler) checkRouted(
	port *v1alpha1.XPUPort, network *v1alpha1.XPUNetwork, xpu *v1alpha1.XPU,
) error {
	if network.Spec.Routed == nil {
		return nil
	}
	if dialect, err := dialects.Named(string(xpu.Spec.Dialect)); err == nil &&
		!dialect.Traits.Gateways {
		return reconciling.Refuse(v1alpha1.ReasonNoGateways,
			"XPUNetwork %s is routed, and OPI agents of dialect %s, which XPU %s has, make no "+
				"gateways; use a network without spec.routed there", network.Name, dialect.Name,
			xpu.Name)
	}
	return addresses.CheckGateway(port, network, r.Installation)
}

// checkFunction returns a refusal if the XPU's PFs are known and the Port's Function does not
// belong to them, because the OPI agent might take the id for a port of something else. A Port that
// is up has its id and stays up.
func checkFunction(port *v1alpha1.XPUPort, xpu *v1alpha1.XPU) error {
	f := claim.FunctionOf(port.Spec.Function)
	if port.Status.BridgePort != "" || len(xpu.Status.PFs) == 0 ||
		xpus.HasFunction(xpu.Status.PFs, f) {
		return nil
	}

	var pfs []string
	for _, pf := range xpu.Status.PFs {
		pfs = append(pfs, fmt.Sprintf("%s with at most %d VFs", pf.Address, pf.TotalVFs))
	}

	return reconciling.Refuse(v1alpha1.ReasonNoXPU,
		"XPU %s does not have Function %s: its PFs are %s; see whether the xpu-agent of "+
			"node %s reports the Function's PF in the XPUNode", xpu.Name, f,
		strings.Join(pfs, ", "), port.Spec.NodeName)
}

// An XPU may have freePorts Ports independently of its node's report, which leaves room for new
// SFs. It may have mostPorts at most, because longer lists of an OPI agent are not read.
const freePorts, mostPorts = 1024, 1 << 14

// checkNumber returns a refusal if the XPU has many more Ports than its node has Functions.
// Without this check, a node could name any number of Functions, because an SF may have any number.
func (r *reconciler) checkNumber(ctx context.Context, port *v1alpha1.XPUPort) error {
	if port.Status.BridgePort != "" {
		return nil
	}

	all, err := r.Ports.By(ctx, model.ByXPU, port.Spec.XPU)
	if err != nil || len(all) <= freePorts {
		return err
	}

	var node v1alpha1.XPUNode // stays empty if it does not exist
	err = r.Client.Get(ctx, client.ObjectKey{Name: port.Spec.NodeName}, &node)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("XPUNode %s: %w", port.Spec.NodeName, err)
	}

	up := 0
	for i := range all {
		if all[i].Status.BridgePort != "" {
			up++
		}
	}

	most := min(mostPorts, max(freePorts, 2*int(node.Status.Functions)))
	if up < most {
		return nil
	}

	return reconciling.Refuse(v1alpha1.ReasonForbidden,
		"XPU %s has %d Ports, and node %s reports %d Functions; see which XPUPorts the agent "+
			"of the node made, and delete those that no pod uses", port.Spec.XPU, up,
		port.Spec.NodeName, node.Status.Functions)
}
