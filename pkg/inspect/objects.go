// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// rowOf returns a row with what the conditions of an object say, and the status of its condition
// Ready.
func rowOf(conditions []metav1.Condition) (row Row, ready string) {
	row.Notes, row.Remarks = judge(conditions)
	return row, cmp.Or(string(v1alpha1.ReadyOf(conditions).Status), string(metav1.ConditionUnknown))
}

// judge returns the messages of conditions that are not True. Of an object that is Ready these are
// problems only if its devices lack something. Other conditions that stay False as long as an OPI
// agent or the cluster cannot do something, such as Verified and Supported, are remarks.
func judge(conditions []metav1.Condition) (problems, remarks []string) {
	if len(conditions) == 0 {
		return []string{"nobody has looked at it yet: is xpu-controller running?"}, nil
	}

	isReady := v1alpha1.ReadyOf(conditions).Status == metav1.ConditionTrue
	for _, c := range conditions {
		switch {
		case c.Status == metav1.ConditionTrue:
		case isReady && c.Type != v1alpha1.ConditionSupplied && c.Type != v1alpha1.ConditionCard:
			remarks = append(remarks, noteOf(c))
		default:
			problems = append(problems, noteOf(c))
		}
	}

	return problems, remarks
}

// noteOf returns what a condition says.
func noteOf(c metav1.Condition) string {
	return fmt.Sprintf("%s %s: %s", c.Type, c.Reason, c.Message)
}

// age returns the time since an object was created, in kubectl's format.
func age(o metav1.Object, now time.Time) string {
	return duration.HumanDuration(now.Sub(o.GetCreationTimestamp().Time))
}

// deletionNotes returns a note if an object is being deleted.
func deletionNotes(o metav1.Object) []string {
	if o.GetDeletionTimestamp() == nil {
		return nil
	}
	note := "is being deleted"
	if finalizers := o.GetFinalizers(); len(finalizers) > 0 {
		note += ", and is kept by " + strings.Join(finalizers, ", ")
	}
	return []string{note}
}

// Pools returns a table of DevicePools, with their Functions on each node.
func Pools(
	ctx context.Context, reader client.Reader, now time.Time,
) (*v1alpha1.DevicePoolList, Table, error) {
	var pools v1alpha1.DevicePoolList
	var nodes v1alpha1.XPUNodeList
	var claims resourceapi.ResourceClaimList
	for _, list := range []client.ObjectList{&pools, &nodes, &claims} {
		if err := reader.List(ctx, list); err != nil {
			return nil, Table{}, err
		}
	}

	allocated := map[string]int{}
	for i := range claims.Items {
		for _, id := range allocatedPools(&claims.Items[i]) {
			allocated[id.DevicePool]++
		}
	}

	resources := map[string]bool{}
	for i := range pools.Items {
		if resource := resourceOf(&pools.Items[i]); resource != "" {
			resources[resource] = true
		}
	}
	var byPods map[string]int64
	known := true
	if len(resources) > 0 {
		var err error
		if byPods, known, err = requested(ctx, reader, resources); err != nil {
			return nil, Table{}, err
		}
	}

	table := Table{
		Header: []string{"NAME", "PUBLISH", "PROVISION", "NETWORK", "NODES", "FUNCTIONS", "HEALTHY",
			"ALLOCATED", "READY", "AGE", "PRIORITY", "RESOURCE"},
		Wide: 2, Empty: "There are no DevicePools: no Function is offered to pods. See " +
			"docs/tutorial/first-pod.md.",
	}

	for i := range pools.Items {
		p := &pools.Items[i]
		row, ready := rowOf(p.Status.Conditions)
		resource, provision := resourceOf(p), string(p.Spec.Provision)
		taken := strconv.Itoa(allocated[p.Name])
		if resource != "" {
			spec := ptr.Deref(p.Spec.DevicePlugin, v1alpha1.DevicePluginSpec{})
			provision = string(cmp.Or(spec.ProvisionAt, v1alpha1.ProvisionAtAdd))
			taken = strconv.FormatInt(byPods[resource], 10)
		}
		if resource != "" && !known {
			taken = "?"
			row.Remarks = append(row.Remarks,
				"how many are allocated is not known, because you may not list pods")
		}

		row.Cells = []string{
			p.Name, string(p.Spec.Publish), provision, p.Spec.Network,
			fmt.Sprint(p.Status.NodeCount),
			fmt.Sprint(p.Status.Functions), fmt.Sprint(p.Status.Healthy), taken, ready,
			age(p, now), number(p.Spec.Priority), resource,
		}
		row.Notes = slices.Concat(row.Notes, deletionNotes(p), nodeNotes(p, nodes.Items))
		table.Rows = append(table.Rows, row)
	}

	return &pools, table, nil
}

// resourceOf returns the extended resource of a pool, "" if it is published by DRA.
func resourceOf(p *v1alpha1.DevicePool) string {
	if p.Spec.Publish != v1alpha1.PublishDevicePlugin {
		return ""
	}
	spec := ptr.Deref(p.Spec.DevicePlugin, v1alpha1.DevicePluginSpec{})
	return cmp.Or(spec.ResourcePrefix, v1alpha1.GroupName) + "/" + cmp.Or(spec.ResourceName, p.Name)
}

// controllerLease is the Lease that the leader of xpu-controller renews, by default every 10 s.
const controllerLease = "xpu-controller"

// ControllerAway returns a sentence if the leader of xpu-controller has not renewed its Lease in the
// namespace for five minutes, because conditions are as old then. The time is so long because the
// clock of the user may be wrong. ControllerAway returns "" if the controller runs. It also returns
// "" if nothing is known, because the user may not read the Lease, or because a controller without
// leader election has none.
func ControllerAway(
	ctx context.Context, reader client.Reader, namespace string, now time.Time,
) (string, error) {
	var lease coordinationv1.Lease
	err := reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: controllerLease}, &lease)
	switch {
	case apierrors.IsForbidden(err), apierrors.IsNotFound(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("Lease %s/%s: %w", namespace, controllerLease, err)
	}

	const longest = 5 * time.Minute
	if lease.Spec.RenewTime == nil || now.Sub(lease.Spec.RenewTime.Time) <= longest {
		return "", nil
	}
	return fmt.Sprintf("xpu-controller has not run for %s: conditions, and what follows from them, "+
		"are as old", duration.HumanDuration(now.Sub(lease.Spec.RenewTime.Time))), nil
}

// allocatedPools returns the pools of the claim's devices of this driver, one entry per device.
func allocatedPools(c *resourceapi.ResourceClaim) []claim.PoolID {
	var ids []claim.PoolID
	if c.Status.Allocation == nil {
		return nil
	}

	for _, result := range c.Status.Allocation.Devices.Results {
		if result.Driver != v1alpha1.GroupName || ptr.Deref(result.AdminAccess, false) {
			continue
		}
		if id, err := claim.ParsePoolID(result.Pool); err == nil {
			ids = append(ids, id)
		}
	}

	return ids
}

// nodeNotes returns the pool's problems on each node.
func nodeNotes(p *v1alpha1.DevicePool, nodes []v1alpha1.XPUNode) []string {
	var notes []string
	for i := range nodes {
		for _, note := range notesOn(p, &nodes[i]) {
			notes = append(notes, "node "+nodes[i].Name+": "+note)
		}
	}
	return notes
}

// notesOn returns the pool's problems on a node.
func notesOn(p *v1alpha1.DevicePool, node *v1alpha1.XPUNode) []string {
	i := slices.IndexFunc(node.Status.Pools, func(n v1alpha1.XPUNodePool) bool {
		return n.Name == p.Name
	})
	if i < 0 {
		return nil
	}

	var notes []string
	has := node.Status.Pools[i]
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	if has.ObservedGeneration != 0 && has.ObservedGeneration < p.Generation {
		note("xpu-agent has not taken the last change of the DevicePool up; is it running there?")
	}

	if c := meta.FindStatusCondition(node.Status.Conditions,
		v1alpha1.ConditionAgentReady); c != nil && c.Status == metav1.ConditionFalse {
		note("%s: no xpu-agent has run there since %s, and what it said is as old", c.Reason,
			c.LastTransitionTime.UTC().Format(time.DateTime))
	}

	if has.Error != "" {
		note("%s", has.Error)
	}

	for _, problem := range has.Problems {
		note("%d of %d Functions: %s", problem.Functions, has.Functions, problem.Message)
	}

	for _, shortage := range has.Shortages {
		note("PF %s: %s: %s", shortage.PF, shortage.Reason, shortage.Message)
	}

	if len(has.Overlapping) > 0 {
		note("other pools have %s", strings.Join(has.Overlapping, ", "))
	}
	return notes
}

// JudgeNode returns the messages of a node's conditions that are not True. An inventory that could
// not be compared is a remark, because nothing wrong was found.
func JudgeNode(node *v1alpha1.XPUNode) (problems, remarks []string) {
	for _, c := range node.Status.Conditions {
		switch {
		case c.Status == metav1.ConditionTrue:
		case c.Type == v1alpha1.ConditionInventoryVerified && c.Status == metav1.ConditionUnknown:
			remarks = append(remarks, noteOf(c))
		default:
			problems = append(problems, noteOf(c))
		}
	}
	return problems, remarks
}

// PoolNotes returns the problems that pools have on a node.
func PoolNotes(node *v1alpha1.XPUNode, pools []v1alpha1.DevicePool) []string {
	var notes []string
	for i := range pools {
		for _, note := range notesOn(&pools[i], node) {
			notes = append(notes, "pool "+pools[i].Name+": "+note)
		}
	}
	return notes
}

// Ports returns a table of the XPUPorts in a namespace, or in all namespaces for "".
func Ports(
	ctx context.Context, reader client.Reader, namespace string, now time.Time,
) (*v1alpha1.XPUPortList, Table, error) {
	var ports v1alpha1.XPUPortList
	if err := reader.List(ctx, &ports, client.InNamespace(namespace)); err != nil {
		return nil, Table{}, err
	}

	table := Table{
		Header: []string{"NAMESPACE", "NAME", "NODE", "FUNCTION", "NETWORK", "FOR", "ADDRESSES",
			"READY", "AGE", "XPU", "MAC", "BRIDGEPORT"},
		Wide: 3, Empty: "There are no XPUPorts: no pod has a Function in a network.",
	}

	for i := range ports.Items {
		p := &ports.Items[i]
		row, ready := rowOf(p.Status.Conditions)
		row.Cells = []string{
			p.Namespace, p.Name, p.Spec.NodeName, claim.FunctionOf(p.Spec.Function).String(),
			strings.Join(p.Spec.AllNetworks(), ","), owner(p),
			strings.Join(addressesOf(p), ","), ready,
			age(p, now), p.Spec.XPU, p.Spec.MAC, p.Status.BridgePort,
		}
		row.Notes = append(row.Notes, deletionNotes(p)...)
		table.Rows = append(table.Rows, row)
	}

	return &ports, table, nil
}

// owner returns what a Port is for: a claim, a pod or nothing yet.
func owner(p *v1alpha1.XPUPort) string {
	switch {
	case p.Spec.Ahead:
		return "the next claim"
	case p.Spec.Pod != nil:
		return "pod " + p.Spec.Pod.Namespace + "/" + p.Spec.Pod.Name
	case p.Status.Pod != "":
		return "pod " + p.Status.Pod
	case p.Spec.Claim.Name != "":
		return "claim " + p.Spec.Claim.Name
	}
	return ""
}

// Networks returns a table of XPUNetworks, with the number of XPUPorts in each.
func Networks(
	ctx context.Context, reader client.Reader, now time.Time,
) (*v1alpha1.XPUNetworkList, Table, error) {
	var networks v1alpha1.XPUNetworkList
	var ports v1alpha1.XPUPortList
	for _, list := range []client.ObjectList{&networks, &ports} {
		if err := reader.List(ctx, list); err != nil {
			return nil, Table{}, err
		}
	}

	joined := map[string]int{}
	for _, p := range ports.Items {
		for _, network := range p.Spec.AllNetworks() {
			joined[network]++
		}
	}

	table := Table{
		Header: []string{
			"NAME", "VLAN", "VNI", "MTU", "SUBNETS", "PORTS", "XPUS", "READY", "AGE", "NAMESPACES",
			"VRF",
		},
		Wide: 2, Empty: "There are no XPUNetworks: Functions are attached without a Port at " +
			"their xPU.",
	}

	for i := range networks.Items {
		n := &networks.Items[i]
		row, ready := rowOf(n.Status.Conditions)
		for _, failure := range n.Status.Failures {
			row.Notes = append(row.Notes, "XPU "+failure.XPU+": "+failure.Message)
		}

		row.Cells = []string{
			n.Name, number(n.Spec.VLAN), number(ptr.Deref(n.Spec.VNI, 0)),
			number(ptr.Deref(n.Spec.MTU, 0)), strings.Join(n.Spec.Subnets, ","),
			strconv.Itoa(joined[n.Name]),
			fmt.Sprintf("%d/%d", n.Status.ReadyXPUs, n.Status.XPUs), ready, age(n, now),
			allowed(n), vrfOf(n),
		}
		row.Notes = append(row.Notes, deletionNotes(n)...)
		table.Rows = append(table.Rows, row)
	}

	return &networks, table, nil
}

func vrfOf(n *v1alpha1.XPUNetwork) string {
	if n.Spec.Routed == nil {
		return ""
	}
	return n.Spec.Routed.VRF
}

func allowed(n *v1alpha1.XPUNetwork) string {
	if n.Spec.AllowedNamespaces.From != v1alpha1.NamespacesFromSelector {
		return string(n.Spec.AllowedNamespaces.From)
	}
	return metav1.FormatLabelSelector(n.Spec.AllowedNamespaces.Selector)
}

// XPUs returns a table of XPUs, with the number of XPUPorts of each.
func XPUs(
	ctx context.Context, reader client.Reader, now time.Time,
) (*v1alpha1.XPUList, Table, error) {
	var xpus v1alpha1.XPUList
	var ports v1alpha1.XPUPortList
	for _, list := range []client.ObjectList{&xpus, &ports} {
		if err := reader.List(ctx, list); err != nil {
			return nil, Table{}, err
		}
	}

	count, up := map[string]int{}, map[string]int{}
	for _, p := range ports.Items {
		count[p.Spec.XPU]++
		if meta.IsStatusConditionTrue(p.Status.Conditions, v1alpha1.ConditionReady) {
			up[p.Spec.XPU]++
		}
	}

	table := Table{
		Header: []string{
			"NAME", "NODE", "ENDPOINT", "SERIAL", "PORTS UP", "READY", "AGE", "DIALECT", "PFS",
		},
		Wide: 2, Empty: "There are no XPUs: no OPI agent is known. See " +
			"docs/tutorial/first-pod.md.",
	}

	for i := range xpus.Items {
		x := &xpus.Items[i]
		row, ready := rowOf(x.Status.Conditions)
		row.Cells = []string{
			x.Name, x.Node(), x.Spec.Endpoint, x.Status.Serial,
			fmt.Sprintf("%d/%d", up[x.Name], count[x.Name]), ready, age(x, now),
			string(x.Spec.Dialect), strings.Join(pfsOf(x), ","),
		}
		row.Notes = append(row.Notes, deletionNotes(x)...)
		row.Remarks = append(row.Remarks, foreignNotes(x)...)
		table.Rows = append(table.Rows, row)
	}

	return &xpus, table, nil
}

// pfsOf returns the PFs that the xPU serves, if they are named.
func pfsOf(x *v1alpha1.XPU) []string {
	if len(x.Spec.PFs) > 0 {
		return x.Spec.PFs
	}
	var pfs []string
	for _, pf := range x.Status.PFs {
		pfs = append(pfs, pf.Address)
	}
	return pfs
}

// number formats n, and returns "" for 0, which means none.
func number(n int32) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(int(n))
}

// foreignNotes returns notes about objects of the XPU's agent that are not known to be the
// cluster's.
func foreignNotes(x *v1alpha1.XPU) []string {
	foreign := x.Status.Foreign
	if foreign == nil {
		return nil
	}

	what := fmt.Sprintf("%d ports and %d networks", foreign.Ports, foreign.Networks)
	if foreign.VRFs+foreign.Gateways > 0 {
		what = fmt.Sprintf("%d ports, %d networks, %d gateways and %d VRFs", foreign.Ports,
			foreign.Networks, foreign.Gateways, foreign.VRFs)
	}
	note := "its OPI agent also has " + what + " that are not this cluster's"
	if foreign.Unknown > 0 {
		note += fmt.Sprintf(", and %d ports of which it does not tell whose they are",
			foreign.Unknown)
	}

	return []string{note + ": " + strings.Join(foreign.Examples, ", ")}
}

// addressesOf returns the addresses of an XPUPort in all its networks.
func addressesOf(p *v1alpha1.XPUPort) []string {
	all := slices.Clone(p.Status.Addresses)
	for _, network := range p.Status.Networks {
		all = append(all, network.Addresses...)
	}
	return all
}
