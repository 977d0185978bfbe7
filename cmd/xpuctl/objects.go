// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// lister lists objects of one kind, in a namespace or in all.
type lister func(ctx context.Context, reader client.Reader, namespace string) (client.ObjectList, inspect.Table, error)

// objectsCommands returns the commands that show objects of a cluster.
func objectsCommands() []*cobra.Command {
	return []*cobra.Command{
		objectsCommand("pools",
			"Show the DevicePools, who has their Functions, and what keeps Functions from pods",
			`DevicePools with the Functions that they have on the nodes. Below each is what is wrong with it, node by node. ALLOCATED is how many
devices ResourceClaims have; of pools that the device plugin offers the kubelets know.`, "",
			func(
				ctx context.Context, reader client.Reader, _ string,
			) (client.ObjectList, inspect.Table, error) {
				return withList(inspect.Pools(ctx, reader, time.Now()))
			}),
		objectsCommand("ports", "Show the XPUPorts, whom they are for, and why one is not up",
			`XPUPorts: what the xPUs serve, or are to serve, for Functions that pods have. Below each is why it is not up.`,
			"\n  # Of one namespace:\n  xpuctl ports -n default\n",
			func(
				ctx context.Context, reader client.Reader, namespace string,
			) (client.ObjectList, inspect.Table, error) {
				return withList(inspect.Ports(ctx, reader, namespace, time.Now()))
			}),
		objectsCommand("networks", "Show the XPUNetworks, and the xPUs that do not serve one",
			`XPUNetworks, how many XPUPorts join each, and how many of the XPUs that need it serve it. Below each is why one does not.`, "",
			func(
				ctx context.Context, reader client.Reader, _ string,
			) (client.ObjectList, inspect.Table, error) {
				return withList(inspect.Networks(ctx, reader, time.Now()))
			}),
		objectsCommand("xpus", "Show the XPUs, and why an OPI agent is not connected",
			`XPUs, the nodes that have their cards, and how many of their XPUPorts are up. Below each is what is wrong with it.`, "",
			func(
				ctx context.Context, reader client.Reader, _ string,
			) (client.ObjectList, inspect.Table, error) {
				return withList(inspect.XPUs(ctx, reader, time.Now()))
			}),
	}
}

func withList[L client.ObjectList](
	list L, table inspect.Table, err error,
) (client.ObjectList, inspect.Table, error) {
	return list, table, err
}

func objectsCommand(name, short, long, example string, list lister) *cobra.Command {
	cluster := &clusterFlags{}
	var output, agents string
	c := &cobra.Command{
		Use:   name,
		Short: short,
		Long:  long,
		Example: "  xpuctl " + name + "\n" + example + `
  # With more columns, or for a program:
  xpuctl ` + name + ` -o wide
  xpuctl ` + name + ` -o json`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkOutput(output, "text", "wide", "yaml", "json"); err != nil {
				return err
			}

			reader, err := cluster.client(c.Context())
			if err != nil {
				return err
			}

			objects, table, err := list(c.Context(), reader, cluster.overrides.Context.Namespace)
			if meta.IsNoMatchError(err) {
				return errors.New("this cluster has no custom resources of xpu-device-plugin: in direct " +
					"mode xpu-agent has its pools and networks in a file, and \"xpuctl discover --node " +
					"NODE\" shows them; otherwise xpu-device-plugin is not installed")
			}
			if err != nil {
				return err
			}

			away, err := inspect.ControllerAway(c.Context(), reader, agents, time.Now())
			if err != nil {
				return err
			}
			if away != "" {
				terminal.Line(c.ErrOrStderr(), "note: %s", away)
			}

			if output == "text" || output == "wide" {
				return table.Write(c.OutOrStdout(), output == "wide")
			}

			return printList(c.OutOrStdout(), output, objects)
		},
	}

	cluster.addTo(c.Flags())
	if name == "ports" {
		cluster.addNamespaceTo(c.Flags(), "")
	}
	addAgentsFlag(c.Flags(), &agents)
	addOutputFlag(c, &output, "text", "wide", "yaml", "json")

	return c
}

// addOutputFlag adds the flag -o. The first form is the default.
func addOutputFlag(c *cobra.Command, output *string, forms ...string) {
	c.Flags().StringVarP(output, "output", "o", forms[0], strings.Join(forms[:len(forms)-1], ", ")+
		" or "+forms[len(forms)-1])
	_ = c.RegisterFlagCompletionFunc("output",
		cobra.FixedCompletions(forms, cobra.ShellCompDirectiveNoFileComp))
}

func checkOutput(output string, forms ...string) error {
	if slices.Contains(forms, output) {
		return nil
	}
	return fmt.Errorf("--output %q: must be %s or %s", output,
		strings.Join(forms[:len(forms)-1], ", "), forms[len(forms)-1])
}

// printValue prints a value that is not a Kubernetes object, as JSON or YAML.
func printValue(to io.Writer, form string, value any) error {
	to = terminal.Raw(to)
	if form == "yaml" {
		content, err := yaml.Marshal(value)
		if err != nil {
			return err
		}
		_, err = to.Write(content)
		return err
	}

	encoder := json.NewEncoder(to)
	encoder.SetIndent("", "  ")

	return encoder.Encode(value)
}

// printList prints a list like kubectl.
func printList(to io.Writer, form string, objects client.ObjectList) error {
	var printer printers.ResourcePrinter = &printers.JSONPrinter{}
	if form == "yaml" {
		printer = &printers.YAMLPrinter{}
	}

	scheme, err := newScheme()
	if err != nil {
		return err
	}

	var delegate printers.ResourcePrinter = &printers.OmitManagedFieldsPrinter{Delegate: printer}
	return printers.NewTypeSetter(scheme).ToPrinter(delegate).PrintObj(objects, terminal.Raw(to))
}

// newScheme returns a scheme with the kinds that commands read.
func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	builder := runtime.NewSchemeBuilder(corev1.AddToScheme, appsv1.AddToScheme,
		coordinationv1.AddToScheme, resourceapi.AddToScheme, v1alpha1.AddToScheme)
	return scheme, builder.AddToScheme(scheme)
}
