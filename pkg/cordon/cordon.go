// SPDX-License-Identifier: Apache-2.0

// Package cordon keeps new pods away from the Functions of PFs, as "kubectl cordon" keeps them away
// from a node, and says which pods have such Functions. It writes spec.cordons of XPUNodes; the
// agents of the nodes do the rest.
package cordon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Kind is what a name is the name of.
type Kind string

// The kinds of things that can be cordoned.
const (
	Card Kind = "card" // by serial number
	Node Kind = "node" // all PFs of a node
	PF   Kind = "pf"   // "<node>/<PCI address>" or "<node>/<netdev>"
	XPU  Kind = "xpu"  // the PFs that an XPU serves, by its name
)

// Kinds returns all kinds, in the order of their names.
func Kinds() []Kind { return []Kind{Card, Node, PF, XPU} }

// Target is a PF of a node.
type Target struct {
	Node   string
	PF     pci.Address
	Netdev string // "" if it is not known

	vfs, offset, stride int // as in the XPUNode
}

// has reports whether a PCI function is the PF or one of its VFs.
func (t Target) has(address pci.Address) bool {
	index, _, isVF := pci.VFIndex(t.PF, address, t.offset, t.stride)
	return address == t.PF || isVF && index < t.vfs
}

func (t Target) String() string {
	if t.Netdev == "" {
		return fmt.Sprintf("pf %s/%s", t.Node, t.PF)
	}
	return fmt.Sprintf("pf %s/%s (%s)", t.Node, t.PF, t.Netdev)
}

// Resolve returns the PFs that a name means, sorted by node and address. It returns an error that
// names what there is if the name means nothing.
func Resolve(ctx context.Context, reader client.Reader, kind Kind, name string) ([]Target, error) {
	if !slices.Contains(Kinds(), kind) {
		return nil, fmt.Errorf("kind %q: must be card, node, pf or xpu", kind)
	}

	var nodes v1alpha1.XPUNodeList
	if err := reader.List(ctx, &nodes); err != nil {
		return nil, fmt.Errorf("list XPUNodes: %w", err)
	}
	var all v1alpha1.XPUList
	if kind == XPU {
		if err := reader.List(ctx, &all); err != nil {
			return nil, fmt.Errorf("list XPUs: %w", err)
		}
	}

	var found []Target
	known := map[string]bool{}
	for _, node := range nodes.Items {
		for _, pf := range withCordoned(node) {
			for _, meant := range namesOf(kind, node.Name, pf, all.Items) {
				known[meant] = true
				if tenant := node.Labels[v1alpha1.LabelTenant]; meant == name && tenant != "" {
					return nil, fmt.Errorf("%s %s: XPUNode %s is the copy of one in the cluster of "+
						"XPUTenant %s, whose agents do not see this cluster; run this there", kind, name,
						node.Name, tenant)
				}
				if meant == name {
					found = append(found, Target{
						Node: node.Name, PF: pci.Address(pf.Address), Netdev: pf.Name,
						vfs: int(pf.VFs), offset: int(pf.VFOffset), stride: int(pf.VFStride),
					})
				}
			}
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no agent reports a PF of %s %q; %s. Cordons of PFs that are gone are "+
			"taken back by uncordon pf NODE/ADDRESS", kind, name, among(known, kind))
	}

	slices.SortFunc(found, func(a, b Target) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(found), nil
}

// withCordoned returns the PFs of a node, and those that are cordoned although its agent does not
// report them: of a card that was taken out, or has another address now.
func withCordoned(node v1alpha1.XPUNode) []v1alpha1.XPUNodePF {
	pfs := slices.Clone(node.Status.PFs)
	for _, cordon := range node.Spec.Cordons {
		reported := func(pf v1alpha1.XPUNodePF) bool { return pf.Address == cordon.PF }
		if !slices.ContainsFunc(pfs, reported) {
			pfs = append(pfs, v1alpha1.XPUNodePF{Address: cordon.PF})
		}
	}
	return pfs
}

// namesOf returns the names of a kind that mean a PF.
func namesOf(kind Kind, node string, pf v1alpha1.XPUNodePF, all []v1alpha1.XPU) []string {
	switch kind {
	case Card:
		if pf.Serial != "" {
			return []string{pf.Serial}
		}
	case Node:
		return []string{node}
	case PF:
		if pf.Name == "" {
			return []string{node + "/" + pf.Address}
		}
		return []string{node + "/" + pf.Address, node + "/" + pf.Name}
	case XPU:
		ofNode := slices.DeleteFunc(slices.Clone(all), func(x v1alpha1.XPU) bool {
			return x.Node() != node
		})
		if xpu := claim.XPUOf(ofNode, pci.Address(pf.Address)); xpu != nil {
			return []string{xpu.Name}
		}
	}
	return nil
}

// mostListed bounds the names in an error.
const mostListed = 8

// among says which names there are.
func among(known map[string]bool, kind Kind) string {
	var names []string
	for name := range known {
		names = append(names, name)
	}
	slices.Sort(names)

	switch more := len(names) - mostListed; {
	case len(names) == 0:
		return fmt.Sprintf("it reports no %s at all", kind)
	case more > 0:
		return fmt.Sprintf("there are %s and %d more", strings.Join(names[:mostListed], ", "), more)
	}
	return "there is " + strings.Join(names, ", ")
}

// Set cordons the PFs with a reason, or takes their cordons back if cordoned is false. It returns
// those that changed. It may be repeated.
func Set(
	ctx context.Context, api client.Client, targets []Target, cordoned bool, reason string,
) (changed []Target, err error) {
	byNode := map[string][]Target{}
	var order []string
	for _, t := range targets {
		if byNode[t.Node] == nil {
			order = append(order, t.Node)
		}
		byNode[t.Node] = append(byNode[t.Node], t)
	}

	for _, node := range order {
		ofNode, err := setOn(ctx, api, node, byNode[node], cordoned, reason)
		if err != nil {
			return changed, fmt.Errorf("XPUNode %s: %w", node, err)
		}
		changed = append(changed, ofNode...)
	}

	return changed, nil
}

// setOn is [Set] for one node.
func setOn(
	ctx context.Context, api client.Client, name string, targets []Target, cordoned bool,
	reason string,
) (changed []Target, err error) {
	err = retry.RetryOnConflict(retry.DefaultRetry, func() error {
		var node v1alpha1.XPUNode
		if err := api.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
			return err
		}

		before := node.DeepCopy()
		changed = nil
		for _, t := range targets {
			if apply(&node.Spec, t.PF, cordoned, reason) {
				changed = append(changed, t)
			}
		}
		if len(changed) == 0 {
			return nil
		}

		wanted := slices.Clone(node.Spec.Cordons)
		patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
		if err := api.Patch(ctx, &node, patch); err != nil {
			return err
		}
		if !slices.Equal(node.Spec.Cordons, wanted) {
			return errors.New("the API server does not keep spec.cordons; upgrade the CRDs first")
		}

		return nil
	})
	if apierrors.IsInvalid(err) {
		err = fmt.Errorf("%w; at most 64 PFs of a node can be cordoned", err)
	}
	return changed, err
}

// apply changes the cordon of one PF, and reports whether it was another one.
func apply(spec *v1alpha1.XPUNodeSpec, pf pci.Address, cordoned bool, reason string) bool {
	i := slices.IndexFunc(spec.Cordons, func(c v1alpha1.Cordon) bool { return c.PF == string(pf) })
	switch {
	case !cordoned && i < 0:
		return false
	case !cordoned:
		spec.Cordons = slices.Delete(spec.Cordons, i, i+1)
		return true
	case i < 0:
		spec.Cordons = append(spec.Cordons, v1alpha1.Cordon{PF: string(pf), Reason: reason})
		return true
	}

	same := spec.Cordons[i].Reason == reason
	spec.Cordons[i].Reason = reason
	return !same
}
