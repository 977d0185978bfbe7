package story

import (
	"context"
	"path/filepath"
)

func (w *World) directSteps() []Step {
	return []Step{
		{"Everything is uninstalled; agents come back that call the OPI agents themselves", w.goDirect},
		{"The same pods", w.runResourcePods},
		{"Packets, as before", w.exchangeResources},
		{"Pods are deleted, and everything is as it was", w.deleteResourcePods},
	}
}

// goDirect takes the product away with all that was declared to it, and installs it anew in direct mode.
func (w *World) goDirect(ctx context.Context) error {
	// One kind after the other: the controller needs the XPUs to take the networks away.
	for _, kind := range []string{"devicepools", "xpunetworks", "xpus"} {
		if _, err := w.Cluster.Kubectl(ctx, "delete", kind, "--all", "--timeout=60s"); err != nil {
			return err
		}
	}
	installed := filepath.Join(w.Source, "test/e2e/deploy")
	if _, err := w.Cluster.Kubectl(ctx, "delete", "-k", installed, "--timeout=90s"); err != nil {
		return err
	}
	w.direct = true
	if _, err := w.Cluster.Kubectl(ctx, "apply", "-k", filepath.Join(w.Source, "test/e2e/direct")); err != nil {
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
