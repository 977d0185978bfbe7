// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// gpuBesideVF starts a pod that claims a GPU of another driver and a VF below the same PCIe root.
func (w *World) gpuBesideVF(ctx context.Context) error {
	if _, err := w.Cluster.Run(ctx, "load",
		filepath.Join(w.Bin, "images", "gpudriver.tar")); err != nil {
		return err
	}

	manifest := filepath.Join(w.Source, "test/e2e/manifests/gpu.yaml")
	if _, err := w.Cluster.Kubectl(ctx, "apply", "-f", manifest); err != nil {
		return err
	}
	if err := w.gpusPublished(ctx); err != nil {
		return err
	}

	pod := podSpec{name: "training", node: "node1", template: "gpu-and-vf"}.pod()
	if err := w.client.Create(ctx, pod); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "training"); err != nil {
		return err
	}
	if err := w.client.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
		return err
	}

	var c resourceapi.ResourceClaim
	key := types.NamespacedName{
		Namespace: pod.Namespace, Name: *pod.Status.ResourceClaimStatuses[0].ResourceClaimName,
	}
	if err := w.client.Get(ctx, key, &c); err != nil {
		return err
	}

	results := c.Status.Allocation.Devices.Results
	if len(results) != 2 || results[0].Device != "gpu-1" {
		return fmt.Errorf("the claim has %+v, want the GPU at the SmartNIC's PCIe root, and a VF",
			results)
	}
	if len(c.Status.Devices) != 1 || c.Status.Devices[0].NetworkData == nil {
		return fmt.Errorf("the claim's devices are %+v, want the VF with its interface",
			c.Status.Devices)
	}

	w.Detail("training has %s of %s and VF %s, with interface %s, below pci0000:3a",
		results[0].Device, results[0].Driver, results[1].Device,
		c.Status.Devices[0].NetworkData.InterfaceName)

	return w.endGPUs(ctx, pod.Name, manifest)
}

// endGPUs deletes the pod, then its driver and its devices, and waits for the baseline.
func (w *World) endGPUs(ctx context.Context, pod, manifest string) error {
	// Without the driver, the kubelet could not unprepare the claim.
	if err := w.deletePod(ctx, pod); err != nil {
		return err
	}
	if _, err := w.Cluster.Kubectl(ctx, "delete", "-f", manifest, "--timeout=60s"); err != nil {
		return err
	}

	// The kubelet would delete them too, but only some time after the driver has gone.
	_, err := w.Cluster.Kubectl(ctx, "delete", "resourceslices", "--field-selector",
		"spec.driver=gpu.example.com", "--ignore-not-found")
	if err != nil {
		return err
	}

	return w.waitForBaseline(ctx)
}

// gpusPublished waits until every node publishes its GPUs.
func (w *World) gpusPublished(ctx context.Context) error {
	return poll(ctx, 60*time.Second, "the nodes offer GPUs", func(ctx context.Context) error {
		var slices resourceapi.ResourceSliceList
		if err := w.client.List(ctx, &slices); err != nil {
			return err
		}

		nodes := 0
		for _, s := range slices.Items {
			if s.Spec.Driver == "gpu.example.com" && len(s.Spec.Devices) == 2 {
				nodes++
			}
		}

		if nodes != len(w.cluster.Nodes) {
			return fmt.Errorf("%d of %d do", nodes, len(w.cluster.Nodes))
		}

		return nil
	})
}
