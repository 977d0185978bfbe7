// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// migrate does with two pods what KubeVirt does with the pods of a virtual machine: the second pod,
// on the other node, runs before the first ends. A third pod checks which of them has the address.
func (w *World) migrate(ctx context.Context) error {
	source, target := launcher("machine-1", "node1"), launcher("machine-2", "node2")
	// Both are the first pods of their nodes. So their VFs have the same PCI address, and their
	// ports the same id at the two agents, which is the harder case.
	if err := w.startResourcePod(ctx, source); err != nil {
		return err
	}
	if err := w.startResourcePod(ctx, onNetwork("blue", "here", "node1", 61)); err != nil {
		return err
	}

	was, err := w.networkStatuses(ctx, source)
	if err != nil {
		return err
	}

	address := was[0].IPs[0]
	if err := w.startResourcePod(ctx, target); err != nil {
		return err
	}

	is, err := w.networkStatuses(ctx, target)
	if err != nil {
		return err
	}
	if is[0].MAC != was[0].MAC || !slices.Equal(is[0].IPs, was[0].IPs) {
		return fmt.Errorf("%s has %s %q, want %s %q as %s", target.name, is[0].MAC, is[0].IPs,
			was[0].MAC, was[0].IPs, source.name)
	}
	if err := w.checkConnectivity(ctx, connectivityCheck{"here", source.name, true},
		address); err != nil {
		return fmt.Errorf("while %s stands by: %w", target.name, err)
	}

	begin := time.Now()
	if err := w.deletePod(ctx, source.name); err != nil {
		return err
	}

	moved := func(ctx context.Context) error {
		return w.checkConnectivity(ctx, connectivityCheck{"here", target.name, true}, address)
	}
	if err := poll(ctx, 20*time.Second, target.name+" has the address", moved); err != nil {
		return err
	}

	w.Detail("%s after %s was deleted, %s has %s and %s", time.Since(begin).Round(time.Millisecond),
		source.name, target.name, was[0].MAC, address)
	return w.endResourcePods(ctx, "here", target.name)
}

// launcher returns a pod of the virtual machine, which requests its MAC address.
func launcher(name, node string) resourcePod {
	return resourcePod{
		name: name, node: node, resources: map[string]int{poolPlain: 1}, machineUID: "machine",
		networks: []selection{{Name: "blue-given", MAC: "02:00:00:00:00:51"}},
	}
}
