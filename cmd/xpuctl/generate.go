// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/generate"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

func generateCommand() *cobra.Command {
	var o generate.Options
	var allocated, output string
	var stats bool
	c := &cobra.Command{
		Use:   "generate SHAPE",
		Short: "Make Nodes and ResourceSlices of a cluster that does not exist",
		Long: `Prints the Nodes, DeviceClasses and ResourceSlices of a cluster whose hosts all have one shape, to try claims on it with
xpuctl schedule, or in the API server of xpuctl serve. The same flags always give the same objects.

Shapes:
` + shapes() + `
Claims that --allocated makes have their devices in status, which kubectl apply leaves out and xpuctl schedule reads.`,
		Example: `  # Two hosts with two PFs of 64 VFs each, and whether a pod would get its device there:
  xpuctl generate sriov --nodes 2 > cluster.yaml
  xpuctl schedule -f cluster.yaml -f pod.yaml

  # The same on 100 hosts of which 40 % of the VFs are taken:
  xpuctl generate sriov --nodes 100 --allocated 40% -o json | xpuctl schedule -f - -f pod.yaml

  # What 1000 such hosts cost an API server:
  xpuctl generate sriov --nodes 1000 --pfs 4 --vfs 128 --stats`,
		Args:      cobra.ExactArgs(1),
		ValidArgs: shapeNames(),
		RunE: func(c *cobra.Command, args []string) error {
			shape, err := generate.Find(args[0])
			if err != nil {
				return err
			}
			if o.Allocated, err = share(allocated); err != nil {
				return err
			}

			cluster, err := generate.Generate(shape, o)
			if err != nil {
				return err
			}

			if stats {
				s, err := cluster.Stats()
				if err != nil {
					return err
				}
				return s.Text(c.OutOrStdout())
			}

			return printObjects(c.OutOrStdout(), cluster.Objects(), output)
		},
	}

	c.Flags().IntVar(&o.Nodes, "nodes", 1, "how many hosts")
	c.Flags().IntVar(&o.PFs, "pfs",
		0, "how many PFs a host has; 0 for 2, only of shapes with SR-IOV")
	c.Flags().IntVar(&o.VFs, "vfs",
		0, "how many VFs a PF has; 0 for 64, only of shapes with SR-IOV")
	c.Flags().StringVar(&allocated, "allocated", "0%", "share of the devices that claims have")
	c.Flags().BoolVar(&stats, "stats", false, "print how many objects and bytes that is, and "+
		"what a change of a link writes, instead of the objects")
	c.Flags().StringVarP(&output, "output", "o", "yaml",
		"yaml, or json for one List, which is read faster")

	return c
}

// shapes returns a table of the shapes.
func shapes() string {
	var rows [][]string
	for _, shape := range generate.Shapes() {
		rows = append(rows, []string{"  " + shape.Name, shape.Description})
	}
	return strings.Join(terminal.Columns(2, rows), "")
}

func shapeNames() []string {
	var names []string
	for _, shape := range generate.Shapes() {
		names = append(names, shape.Name)
	}
	return names
}

// share parses a percentage, with or without its sign.
func share(text string) (float64, error) {
	percent, err := strconv.ParseFloat(strings.TrimSuffix(text, "%"), 64)
	if err != nil {
		return 0, fmt.Errorf("--allocated %q: must be a percentage, such as 40%%", text)
	}
	return percent / 100, nil
}

// printObjects prints objects as documents of YAML, or as a List in JSON.
func printObjects(to io.Writer, objects []runtime.Object, output string) error {
	to = terminal.Raw(to)
	switch output {
	case "json":
		encoder := json.NewEncoder(to)
		encoder.SetIndent("", " ")
		return encoder.Encode(map[string]any{"apiVersion": "v1", "kind": "List", "items": objects})
	case "yaml":
		for i, object := range objects {
			content, err := yaml.Marshal(object)
			if err != nil {
				return err
			}

			if i > 0 {
				content = append([]byte("---\n"), content...)
			}
			if _, err := to.Write(content); err != nil {
				return err
			}
		}
		return nil
	}

	return fmt.Errorf("--output %q: must be yaml or json", output)
}
