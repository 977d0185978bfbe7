// SPDX-License-Identifier: Apache-2.0

// Package nritest provides the container runtime's side of NRI, with the library that containerd
// and CRI-O use.
package nritest

import (
	"context"

	"github.com/containerd/nri/pkg/adaptation"
)

// Start runs a runtime at a socket until its Stop is called. It reports these sandboxes to plugins
// that connect; nil stands for none. The path must be short, because paths of sockets are limited.
func Start(
	socket string, sandboxes func() []*adaptation.PodSandbox, options ...adaptation.Option,
) (*adaptation.Adaptation, error) {
	synchronize := func(ctx context.Context, plugin adaptation.SyncCB) error {
		var all []*adaptation.PodSandbox
		if sandboxes != nil {
			all = sandboxes()
		}
		_, err := plugin(ctx, all, nil)
		return err
	}

	update := func(
		context.Context, []*adaptation.ContainerUpdate,
	) ([]*adaptation.ContainerUpdate, error) {
		return nil, nil
	}

	// Without these directories, the runtime has only the plugins that connect.
	options = append([]adaptation.Option{
		adaptation.WithSocketPath(socket), adaptation.WithPluginPath(socket + ".plugins"),
		adaptation.WithPluginConfigPath(socket + ".conf"),
	}, options...)

	runtime, err := adaptation.New("runtime", "v1", synchronize, update, options...)
	if err != nil {
		return nil, err
	}

	return runtime, runtime.Start()
}

// Sandbox returns the sandbox of a pod in the namespace default, with the network namespace at the
// path.
func Sandbox(id, pod, podUID, netNS string) *adaptation.PodSandbox {
	return &adaptation.PodSandbox{Id: id, Namespace: "default", Name: pod, Uid: podUID,
		Linux: &adaptation.LinuxPodSandbox{
			Namespaces: []*adaptation.LinuxNamespace{{Type: "network", Path: netNS}},
		}}
}
