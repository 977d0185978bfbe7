// SPDX-License-Identifier: Apache-2.0

package story

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// xpuctl runs the program like an administrator, and returns its output.
func (w *World) xpuctl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(w.Bin, "xpuctl"),
		append(args, "--kubeconfig="+w.cluster.Kubeconfig)...)
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("xpuctl %s: %w: %s%s", strings.Join(args, " "), err,
			&problems, &out)
	}
	return out.String(), nil
}

// inspectPods checks that xpuctl finds no problem with the story's pods, and shows its dashboard.
func (w *World) inspectPods(ctx context.Context) error {
	var names []string
	for _, p := range w.pods {
		names = append(names, p.name)
	}
	if err := w.inspect(ctx, names); err != nil {
		return err
	}
	return w.showDashboard(ctx)
}

func (w *World) inspectResourcePods(ctx context.Context) error {
	var names []string
	for _, p := range resourcePods {
		names = append(names, p.name)
	}
	return w.inspect(ctx, names)
}

func (w *World) inspect(ctx context.Context, names []string) error {
	for i, name := range names {
		out, err := w.xpuctl(ctx, "explain", "pod", name, "--namespace=default")
		if err != nil {
			return err
		}
		if !strings.HasPrefix(out, "pod default/"+name+": nothing is wrong") {
			return fmt.Errorf("xpuctl explain pod %s says\n%s", name, out)
		}

		if i == 0 {
			w.printCommand("xpuctl explain pod "+name, out)
		}
	}

	for _, node := range w.cluster.Nodes {
		out, err := w.xpuctl(ctx, "discover", "--node="+node.Name)
		if err != nil {
			return err
		}
		if !strings.Contains(out, "Attached") {
			return fmt.Errorf("xpuctl discover --node=%s shows no Function in a pod:\n%s",
				node.Name, out)
		}

		if node.Name == w.cluster.Nodes[0].Name {
			w.printCommand("xpuctl discover --node="+node.Name, out)
		}
	}

	for _, command := range []string{"pools", "ports", "networks", "xpus"} {
		out, err := w.xpuctl(ctx, command)
		if err != nil {
			return err
		}

		for line := range strings.Lines(out) {
			// Indented lines are problems, except for what an older Kubernetes lacks.
			if strings.HasPrefix(line, " ") &&
				!strings.HasPrefix(line, "  "+v1alpha1.ConditionSupported+" ") {
				return fmt.Errorf("xpuctl %s says\n%s", command, out)
			}
		}
	}

	if _, err := w.xpuctl(ctx, "dead-letters"); err != nil {
		return err
	}

	out, err := w.xpuctl(ctx, "status", "--wait", "--timeout=1m")
	if err != nil {
		return err
	}
	w.printCommand("xpuctl status", out)

	return w.collect(ctx)
}

// testAndService tests the cluster, and then takes a card from it for a while.
func (w *World) testAndService(ctx context.Context) error {
	if err := w.testByClaims(ctx); err != nil {
		return err
	}
	return w.serviceCard(ctx)
}

// testByClaims runs xpuctl test on the networks blue and red.
func (w *World) testByClaims(ctx context.Context) error {
	return w.test(ctx, "--class=xpu-fast", "--network=blue,red")
}

// testByResources runs xpuctl test with the device plugin and Multus.
func (w *World) testByResources(ctx context.Context) error {
	return w.test(ctx, "--resource="+string(resourceName(poolPlain)), "--network=blue,red")
}

// test runs xpuctl test, and checks that it leaves everything as it was.
func (w *World) test(ctx context.Context, args ...string) error {
	args = append([]string{"test", "--namespace=default"}, args...)
	out, err := w.xpuctl(ctx, args...)
	if err != nil {
		return err
	}

	w.printCommand("xpuctl "+strings.Join(args, " "), out)
	return w.waitForBaseline(ctx)
}

// collect creates the archive for a bug report, and checks that nothing is missing.
func (w *World) collect(ctx context.Context) error {
	file := filepath.Join(w.dir, "bundle.tar.gz")
	// from the previous act
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, err := w.xpuctl(ctx, "bundle", "--filename="+file); err != nil {
		return err
	}

	missing, err := exec.CommandContext(ctx, "tar", "--extract", "--to-stdout", "--wildcards",
		"--file="+file, "*/errors.txt").Output()
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if len(missing) > 0 {
		return fmt.Errorf("xpuctl bundle could not read everything:\n%s", missing)
	}

	return nil
}

// printCommand prints a command and its output.
func (w *World) printCommand(command, out string) {
	w.Detail("$ %s", command)
	for line := range strings.Lines(strings.TrimSpace(out)) {
		w.Detail("  %s", strings.TrimRight(line, "\n"))
	}
}
