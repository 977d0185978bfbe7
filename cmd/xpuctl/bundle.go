// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect/bundle"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// bundleOptions are the options of xpuctl bundle.
type bundleOptions struct {
	cluster      *clusterFlags
	agents, file string
	lines        int64
}

// defaultLogLines is how many lines of each log are taken.
const defaultLogLines = 20000

func bundleCommand() *cobra.Command {
	o := &bundleOptions{cluster: &clusterFlags{}}
	c := &cobra.Command{
		Use:   "bundle [-f FILE.tar.gz]",
		Short: "Collect what a bug report needs in an archive, without secrets",
		Long: `Collects in an archive: the objects of xpu-device-plugin; claims, ResourceSlices, events and the pods that have to do with them;
what each agent knows of its node; and the logs of xpu-agent and xpu-controller.

It reads no Secrets and no ConfigMaps, and takes of each kind of objects only the fields that docs/reference/bundle.md lists.
Arguments, images and logs are those of the project's own containers, which it knows by namespace, labels, ServiceAccount and owner.
Names of pods, namespaces and nodes, addresses, and logs are in it: look through it before you give it to others. What could not be
read is in its file errors.txt, and counted on standard error. If nothing could be read, no archive is left.

Exit codes: 0 if an archive is written, 2 for failures.`,
		Example: `  xpuctl bundle
  xpuctl bundle -f /tmp/for-ticket-4711.tar.gz --log-lines 100000`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}

	o.cluster.addTo(c.Flags())
	addAgentsFlag(c.Flags(), &o.agents)
	c.Flags().StringVarP(&o.file, "filename", "f", "",
		"file to write; xpu-bundle-DATE-TIME.tar.gz if empty. It must not exist")
	c.Flags().Int64Var(&o.lines, "log-lines", defaultLogLines,
		"lines of each log that are taken, from its end")

	return c
}

func (o *bundleOptions) run(c *cobra.Command) error {
	if o.lines < 1 {
		return fmt.Errorf("--log-lines %d: must be 1 or more", o.lines)
	}

	if err := o.write(c); err != nil {
		return err
	}
	return terminal.Line(c.OutOrStdout(), "%s", o.file)
}

// write writes the archive. It sets o.file if that is empty.
func (o *bundleOptions) write(c *cobra.Command) (err error) {
	agents, err := newAgents(c.Context(), o.cluster, o.agents)
	if err != nil {
		return err
	}

	core, err := typedcorev1.NewForConfig(agents.Config)
	if err != nil {
		return err
	}

	now := time.Now()
	if o.file == "" {
		o.file = "xpu-bundle-" + now.Format("20060102-150405") + ".tar.gz"
	}

	file, err := os.OpenFile(o.file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}

	defer func() {
		if err = errors.Join(err, file.Close()); err != nil {
			os.Remove(o.file)
		}
	}()

	progress := newProgress(c.ErrOrStderr(), "parts collected", unknownTotal)
	written, err := bundle.Write(c.Context(), file, bundle.Sources{
		Reader: agents.Reader, Pods: core, Namespace: o.agents, Nodes: agents.Nodes,
		State: agents.State, LogLines: o.lines,
		Step: progress.step,
	}, now)
	progress.clear()

	switch missing := len(written.Missing); {
	case err != nil:
		return err
	case written.Read == 0 && missing > 0:
		return fmt.Errorf("nothing could be read: %s", written.Missing[0])
	case missing > 0:
		terminal.Line(c.ErrOrStderr(), "note: %d parts could not be read: errors.txt in the archive "+
			"says why", missing)
	}
	return nil
}
