// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"path/filepath"
)

func (w *World) directSteps() []Step {
	return []Step{
		{"Everything is uninstalled; agents come back that call the OPI agents themselves",
			w.goDirect},
		{"The same pods", w.runResourcePods},
		{"Packets, as before", w.exchangeResources},
		{"Pods are deleted, and everything is as it was", w.deleteResourcePods},
	}
}

// goDirect uninstalls the product, and installs it again in direct mode, by kustomize.
func (w *World) goDirect(ctx context.Context) error {
	if err := w.uninstall(ctx); err != nil {
		return err
	}

	w.direct = true
	if _, err := w.Cluster.Kubectl(ctx, "apply", "-k",
		filepath.Join(w.Source, "test/e2e/direct")); err != nil {
		return err
	}
	if err := w.giveIdentity(ctx, "xpu-agent"); err != nil {
		return err
	}
	if err := w.waitForProduct(ctx); err != nil {
		return err
	}

	w.Detail("no CRDs, no controller, no ServiceAccount token")
	return w.expectResources(ctx)
}
