// SPDX-License-Identifier: Apache-2.0

package story

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// namespace is the product's namespace.
const namespace = "xpu-system"

// helm runs helm in the cluster.
func (w *World) helm(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(w.Bin, "helm"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+w.cluster.Kubeconfig)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("helm %s: %w: %s", args[0], err, strings.TrimSpace(out.String()))
	}
	return nil
}

// installChart loads images and installs the chart with values of test/e2e/values.
func (w *World) installChart(ctx context.Context, mode, values string, images ...string) error {
	if _, err := w.Cluster.Run(ctx, "load", w.images(images...)...); err != nil {
		return err
	}
	return w.helm(ctx, "install", "xpu", filepath.Join(w.productDir(), "chart.tgz"), "--namespace",
		namespace, "--create-namespace",
		"--set", "mode="+mode, "--values",
		filepath.Join(w.Source, "test/e2e/values", values+".yaml"))
}

// productDir returns the directory from which the product is installed.
func (w *World) productDir() string { return cmp.Or(w.product, w.Bin) }

// images returns the paths of images of the product.
func (w *World) images(names ...string) (paths []string) {
	for _, name := range names {
		paths = append(paths, filepath.Join(w.productDir(), "images", name+".tar"))
	}
	return paths
}

// install installs the product and its certificate.
func (w *World) install(ctx context.Context) error {
	if err := w.installChart(ctx, "cluster", "host", "xpu-agent", "xpu-controller"); err != nil {
		return err
	}
	if err := w.giveIdentity(ctx, "xpu-controller"); err != nil {
		return err
	}
	return w.waitForProduct(ctx)
}

// upgrade replaces every pod of the product. number must differ from the last upgrade's.
func (w *World) upgrade(ctx context.Context, number int) error {
	annotation := fmt.Sprintf("podAnnotations.example\\.com/upgrade=%d", number)
	err := w.helm(ctx, "upgrade", "xpu", filepath.Join(w.Bin, "chart.tgz"), "--namespace",
		namespace, "--reuse-values",
		"--set-string", "agent."+annotation, "--set-string", "controller."+annotation)
	if err != nil {
		return err
	}

	for _, workload := range []string{"daemonset/xpu-agent", "deployment/xpu-controller"} {
		if _, err := w.Cluster.Kubectl(ctx, "-n", namespace, "rollout", "status", workload,
			"--timeout=90s"); err != nil {
			return err
		}
	}

	return nil
}

// uninstall removes the product and all objects declared for it.
func (w *World) uninstall(ctx context.Context) error {
	if _, err := w.Cluster.Run(ctx, "load", w.images("xpuctl")...); err != nil {
		return err
	}

	err := w.helm(ctx, "upgrade", "xpu", filepath.Join(w.Bin, "chart.tgz"), "--namespace",
		namespace, "--reuse-values", "--set", "crds.keep=false")
	if err != nil {
		return err
	}
	if err := w.helm(ctx, "uninstall", "xpu", "--namespace", namespace, "--wait",
		"--timeout=150s"); err != nil {
		return err
	}

	_, err = w.Cluster.Kubectl(ctx, "delete", "namespace", namespace, "--timeout=60s")
	return err
}
