// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/cordon"
)

// completionPatience bounds how long a shell waits for names. A cluster may be out of reach.
const completionPatience = 3 * time.Second

// addCompletions lets the shell complete the names of objects of the cluster, for all commands
// below c that have a flag for it.
func addCompletions(c *cobra.Command) {
	names := map[string]cobra.CompletionFunc{
		clientcmd.FlagNamespace: namesOf[*corev1.NamespaceList],
		"agent-namespace":       namesOf[*corev1.NamespaceList],
		"node":                  namesOf[*v1alpha1.XPUNodeList],
		"nodes":                 namesOf[*v1alpha1.XPUNodeList],
		"network":               namesOf[*v1alpha1.XPUNetworkList],
		"class":                 namesOf[*resourceapi.DeviceClassList],
		"resource":              resourceNames,
		clientcmd.FlagContext:   contextNames,
	}

	isClusters := c.Flags().Lookup(clientcmd.RecommendedConfigPathFlag) != nil
	for name, complete := range names {
		if isClusters && c.Flags().Lookup(name) != nil {
			_ = c.RegisterFlagCompletionFunc(name, complete) // of a flag that is there, and new
		}
	}
	for _, below := range c.Commands() {
		addCompletions(below)
	}
}

// clusterOf returns the cluster that the flags of a command mean. When a shell completes, only the
// flags are known.
func clusterOf(c *cobra.Command) *clusterFlags {
	cluster := &clusterFlags{}
	flags := cluster.flags()
	cluster.addNamespaceTo(flags, "")
	c.Flags().Visit(func(given *pflag.Flag) {
		flag := flags.Lookup(given.Name)
		if flag == nil {
			return
		}
		from, isList := given.Value.(pflag.SliceValue)
		if to, ok := flag.Value.(pflag.SliceValue); ok && isList {
			_ = to.Replace(from.GetSlice())
			return
		}
		_ = flag.Value.Set(given.Value.String()) // which has been parsed before
	})
	return cluster
}

// listFor lists objects for a completion, in one namespace if their kind has namespaces. It
// returns false if the cluster does not answer, because a shell has no place for errors.
func listFor(c *cobra.Command, list client.ObjectList) bool {
	ctx, cancel := context.WithTimeout(cmp.Or(c.Context(), context.Background()),
		completionPatience)
	defer cancel()
	cluster := clusterOf(c)
	api, err := cluster.client(ctx)
	if err != nil {
		return false
	}

	var options []client.ListOption
	if _, isPods := list.(*corev1.PodList); isPods {
		namespace, err := cluster.namespace()
		if err != nil {
			return false
		}
		options = append(options, client.InNamespace(namespace))
	}
	return api.List(ctx, list, options...) == nil
}

// objectNames returns the names of listed objects.
func objectNames(list client.ObjectList) (names []string) {
	_ = meta.EachListItem(list, func(o runtime.Object) error {
		names = append(names, o.(client.Object).GetName())
		return nil
	})
	return names
}

// namesOf completes the names of a kind.
func namesOf[L interface {
	*P
	client.ObjectList
}, P any](c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	list := L(new(P))
	if !listFor(c, list) {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return objectNames(list), cobra.ShellCompDirectiveNoFileComp
}

// firstArgument completes the first argument of a command only.
func firstArgument(complete cobra.CompletionFunc) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return complete(c, args, begun)
	}
}

// resourceNames completes the extended resources of DevicePools.
func resourceNames(
	c *cobra.Command, _ []string, _ string,
) (names []string, _ cobra.ShellCompDirective) {
	var pools v1alpha1.DevicePoolList
	listFor(c, &pools)
	for _, pool := range pools.Items {
		if name := pool.Spec.ResourceName(pool.Name); name != "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), cobra.ShellCompDirectiveNoFileComp
}

// contextNames completes the contexts of the kubeconfig, without asking a cluster.
func contextNames(
	c *cobra.Command, _ []string, _ string,
) (names []string, _ cobra.ShellCompDirective) {
	cluster := clusterOf(c)
	cluster.overrides.CurrentContext = "" // the word that is not complete
	loaded, err := cluster.load()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	config, err := loaded.RawConfig()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	for name := range config.Contexts {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, cobra.ShellCompDirectiveNoFileComp
}

// releaseNames completes a node or an XPU, of which xpuctl release frees Functions.
func releaseNames(
	c *cobra.Command, _ []string, _ string,
) ([]string, cobra.ShellCompDirective) {
	var nodes v1alpha1.XPUNodeList
	var xpus v1alpha1.XPUList
	listFor(c, &nodes)
	listFor(c, &xpus)
	names := objectNames(&nodes)
	for _, name := range objectNames(&xpus) {
		names = append(names, "xpu/"+name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// cordonNames completes a kind and then a name of that kind.
func cordonNames(
	c *cobra.Command, args []string, _ string,
) (names []string, _ cobra.ShellCompDirective) {
	var nodes v1alpha1.XPUNodeList
	switch {
	case len(args) == 0:
		for _, kind := range cordon.Kinds() {
			names = append(names, string(kind))
		}
	case len(args) == 1 && args[0] == string(cordon.XPU):
		return namesOf[*v1alpha1.XPUList](c, args, "")
	case len(args) == 1 && listFor(c, &nodes):
		names = cardNames(cordon.Kind(args[0]), nodes.Items)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// cardNames returns the names of nodes, or of their cards or PFs.
func cardNames(kind cordon.Kind, nodes []v1alpha1.XPUNode) (names []string) {
	for _, node := range nodes {
		if kind == cordon.Node {
			names = append(names, node.Name)
		}
		for _, pf := range node.Status.PFs {
			switch {
			case kind == cordon.PF:
				names = append(names, node.Name+"/"+pf.Address)
			case kind == cordon.Card && pf.Serial != "":
				names = append(names, pf.Serial)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
