package main

import (
	"context"
	"fmt"
	"os"

	"github.com/containerd/nri/pkg/adaptation"
)

// startRuntime plays the container runtime's side of NRI, without which agents prepare no claims, until stop is called.
func (h *host) startRuntime() (stop func(), err error) {
	for _, dir := range []string{"nri-plugins", "nri-config"} {
		if err := os.MkdirAll(h.path(dir), 0o755); err != nil {
			return nil, err
		}
	}
	runtime, err := adaptation.New("bench", "v1",
		func(ctx context.Context, plugin adaptation.SyncCB) error {
			_, err := plugin(ctx, nil, nil)
			return err
		},
		func(context.Context, []*adaptation.ContainerUpdate) ([]*adaptation.ContainerUpdate, error) {
			return nil, nil
		},
		adaptation.WithSocketPath(h.path("nri.sock")), adaptation.WithPluginPath(h.path("nri-plugins")),
		adaptation.WithPluginConfigPath(h.path("nri-config")))
	if err != nil {
		return nil, fmt.Errorf("container runtime: %w", err)
	}
	if err := runtime.Start(); err != nil {
		return nil, fmt.Errorf("container runtime: %w", err)
	}
	return runtime.Stop, nil
}
