// SPDX-License-Identifier: Apache-2.0

package connectivity

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// agent is the name of the DaemonSet of xpu-agent and of its container.
const agent = "xpu-agent"

// Plan finds out what a test of the cluster does, and changes nothing. An error says what the user
// has to name.
func Plan(ctx context.Context, cluster Cluster, o Options) (*Test, error) {
	t := &Test{Cluster: cluster, Options: o, run: strings.ToLower(rand.Text()),
		failed: map[string]bool{}, owners: map[types.UID]bool{}, devices: map[device]bool{}}
	t.namespace = o.Namespace
	if t.namespace == "" {
		t.namespace = DefaultNamespace
	}

	for _, step := range []func(context.Context) error{
		t.chooseNetworks, t.chooseOffer, t.chooseNodes, t.chooseImage,
	} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}

	t.planPods()
	return t, nil
}

// chooseNetworks reads the networks, and checks that pods of the test may join them.
func (t *Test) chooseNetworks(ctx context.Context) error {
	var all v1alpha1.XPUNetworkList
	err := t.API.List(ctx, &all)
	switch {
	case meta.IsNoMatchError(err):
		return errors.New("the cluster has no kind XPUNetwork: direct mode, which this does not " +
			"test, or xpu-device-plugin is not installed")
	case err != nil:
		return fmt.Errorf("list XPUNetworks: %w", err)
	}

	labels, err := t.namespaceLabels(ctx)
	if err != nil {
		return err
	}
	if len(t.Options.Networks) > 0 {
		return t.takeNetworks(all.Items, labels)
	}

	var why []string
	for _, n := range all.Items {
		if err := joinable(n, labels); err != nil {
			why = append(why, err.Error())
		} else if len(t.networks) < 2 {
			t.networks = append(t.networks, n)
		}
	}
	if len(t.networks) == 0 {
		return fmt.Errorf("no XPUNetwork is for pods of namespace %s; --namespace names another "+
			"one: %s", t.namespace, strings.Join(why, "; "))
	}

	return nil
}

// takeNetworks takes the networks that were named.
func (t *Test) takeNetworks(all []v1alpha1.XPUNetwork, labels map[string]string) error {
	for _, name := range t.Options.Networks {
		i := slices.IndexFunc(all, func(n v1alpha1.XPUNetwork) bool { return n.Name == name })
		if i < 0 {
			var names []string
			for _, n := range all {
				names = append(names, n.Name)
			}
			return fmt.Errorf("XPUNetwork %s does not exist; there are: %s", name,
				strings.Join(names, ", "))
		}
		if err := joinable(all[i], labels); err != nil {
			return err
		}

		t.networks = append(t.networks, all[i])
	}
	return nil
}

// namespaceLabels returns the labels of the namespace of the pods, or nil if the user may not read
// it.
func (t *Test) namespaceLabels(ctx context.Context) (map[string]string, error) {
	var namespace corev1.Namespace
	err := t.API.Get(ctx, types.NamespacedName{Name: t.namespace}, &namespace)
	switch {
	case apierrors.IsForbidden(err):
		return nil, nil
	case err != nil && (t.Options.Namespace != "" || !apierrors.IsNotFound(err)):
		return nil, fmt.Errorf("namespace %s: %w", t.namespace, err)
	case err == nil && t.Options.Namespace == "":
		return nil, fmt.Errorf("namespace %s exists: another test runs, or was kept; \"xpuctl "+
			"test --cleanup\" removes it", t.namespace)
	case err == nil:
		return namespace.Labels, nil
	}

	labels := t.labels()
	labels[corev1.LabelMetadataName] = t.namespace
	return labels, nil
}

// joinable returns why pods of a namespace with these labels cannot test the network. Labels that
// are nil are not known.
func joinable(n v1alpha1.XPUNetwork, labels map[string]string) error {
	if len(n.Spec.Subnets) == 0 {
		return fmt.Errorf("XPUNetwork %s has no subnets, so that its pods have no addresses to ask",
			n.Name)
	}
	if labels == nil {
		return nil
	}

	allowed, err := n.Spec.AllowedNamespaces.Allows(labels)
	switch {
	case err != nil:
		return fmt.Errorf("XPUNetwork %s: allowedNamespaces: %w", n.Name, err)
	case !allowed:
		return fmt.Errorf("XPUNetwork %s does not allow namespace %s", n.Name,
			labels[corev1.LabelMetadataName])
	}
	return nil
}

// chooseNodes reads which nodes have Functions that the pods could get.
func (t *Test) chooseNodes(ctx context.Context) error {
	var all v1alpha1.XPUNodeList
	err := t.API.List(ctx, &all)
	if apierrors.IsForbidden(err) && len(t.Nodes) > 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list XPUNodes: %w", err)
	}

	offered, err := t.offeredPools(ctx)
	if err != nil {
		return err
	}
	free, err := t.freeNodes(ctx)
	if err != nil {
		return err
	}

	var names []string
	for _, node := range all.Items {
		has, fits := false, false
		for _, p := range node.Status.Pools {
			has = has || p.Functions > 0
			fits = fits || p.Functions > 0 && offered(p.Name)
		}
		if fits && (free == nil || free[node.Name]) {
			names = append(names, node.Name)
		} else if has {
			t.leftOut = append(t.leftOut, node.Name)
		}
	}
	return t.takeNodes(names)
}

// takeNodes takes the nodes that were named, or all that have Functions for the pods.
func (t *Test) takeNodes(names []string) error {
	if len(names) == 0 {
		return fmt.Errorf("no node has Functions in a DevicePool%s: see xpuctl pools", t.wanted())
	}

	for _, name := range t.Nodes {
		if !slices.Contains(names, name) {
			return fmt.Errorf("node %s has no Functions in a DevicePool%s; these have: %s", name,
				t.wanted(), strings.Join(names, ", "))
		}
	}
	if len(t.Nodes) > 0 {
		t.leftOut = nil // the user knows
		return nil
	}

	t.Nodes = names
	return nil
}

// wanted says which Functions the pods could get.
func (t *Test) wanted() string {
	if t.Resource != "" {
		return " with resource " + t.Resource
	}
	return " that claims get"
}

// offeredPools returns which DevicePools offer Functions in the way that the pods ask for them. A
// DevicePool that the user may not read may do so.
func (t *Test) offeredPools(ctx context.Context) (func(pool string) bool, error) {
	var all v1alpha1.DevicePoolList
	err := t.API.List(ctx, &all)
	if apierrors.IsForbidden(err) {
		return func(string) bool { return true }, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list DevicePools: %w", err)
	}

	resources := map[string]string{} // "" for a pool for claims
	for _, pool := range all.Items {
		resources[pool.Name] = pool.Spec.ResourceName(pool.Name)
	}
	return func(pool string) bool { return resources[pool] == t.Resource }, nil
}

// chooseOffer finds out how pods get Functions, unless the user says so.
func (t *Test) chooseOffer(ctx context.Context) error {
	if t.Class != "" || t.Resource != "" {
		return nil
	}

	classes, err := t.classes(ctx)
	if err != nil {
		return err
	}
	resources, err := t.resources(ctx)
	if err != nil {
		return err
	}

	switch {
	case len(classes) == 1 && len(resources) == 0:
		t.Class = classes[0]
	case len(classes) == 0 && len(resources) == 1:
		t.Resource = resources[0]
	case len(classes)+len(resources) == 0:
		return errors.New("the cluster offers no Functions: it has no DeviceClass with driver " +
			v1alpha1.GroupName + ", and no DevicePool for the device plugin")
	default:
		return errors.New("name how pods get Functions: " + offers(classes, resources))
	}

	return nil
}

// offers lists the ways in which pods get Functions.
func offers(classes, resources []string) string {
	var flags []string
	for _, name := range classes {
		flags = append(flags, "--class "+name)
	}
	for _, name := range resources {
		flags = append(flags, "--resource "+name)
	}
	return strings.Join(flags, ", ")
}

// classes returns the DeviceClasses that select devices of this driver. It returns none if the user
// may not read them.
func (t *Test) classes(ctx context.Context) (names []string, err error) {
	var all resourceapi.DeviceClassList
	if err := t.API.List(ctx, &all); err != nil {
		if apierrors.IsForbidden(err) || meta.IsNoMatchError(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("list DeviceClasses: %w", err)
	}

	isOurs := func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && strings.Contains(s.CEL.Expression, v1alpha1.GroupName)
	}
	for _, class := range all.Items {
		if slices.ContainsFunc(class.Spec.Selectors, isOurs) {
			names = append(names, class.Name)
		}
	}
	return names, nil
}

// resources returns the extended resources of the DevicePools.
func (t *Test) resources(ctx context.Context) (names []string, err error) {
	var all v1alpha1.DevicePoolList
	if err := t.API.List(ctx, &all); err != nil {
		return nil, fmt.Errorf("list DevicePools: %w", err)
	}
	for _, pool := range all.Items {
		if name := pool.Spec.ResourceName(pool.Name); name != "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// chooseImage takes the image of the agents, which their nodes have already.
func (t *Test) chooseImage(ctx context.Context) error {
	if t.Image != "" {
		return nil
	}

	var set appsv1.DaemonSet
	if err := t.API.Get(ctx, client.ObjectKey{Namespace: t.Agents, Name: agent}, &set); err != nil {
		return fmt.Errorf("name the image of xpu-agent by --image, because its DaemonSet in "+
			"namespace %s is not readable: %w", t.Agents, err)
	}
	for _, c := range set.Spec.Template.Spec.Containers {
		if c.Name == agent {
			t.Image = c.Image
			return nil
		}
	}

	return fmt.Errorf("name the image of xpu-agent by --image: its DaemonSet in namespace %s has "+
		"no container %s", t.Agents, agent)
}

// planPods lists the pods: one of each network on each node, and two where there is only one node,
// so that packets have somewhere to go.
func (t *Test) planPods() {
	places := t.Nodes
	if len(places) == 1 {
		places = append(slices.Clone(places), places[0])
	}

	for _, n := range t.networks {
		for i, node := range places {
			t.pods = append(t.pods, &pod{
				name: fmt.Sprintf("xpu-test-%s-%d", n.Name, i+1), node: node, network: n.Name,
			})
		}
	}
}

// families returns the subnets of a network.
func subnets(n v1alpha1.XPUNetwork) (all []netip.Prefix) {
	for _, text := range n.Spec.Subnets {
		if prefix, err := netip.ParsePrefix(text); err == nil { // the API server has validated it
			all = append(all, prefix)
		}
	}
	return all
}
