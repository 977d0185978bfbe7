// SPDX-License-Identifier: Apache-2.0

// Command gpudriver is a DRA driver of GPUs that do not exist. It is an example of a driver that
// does not know xpu-device-plugin. Its devices are allocated together with VFs by an attribute that
// both drivers publish, resource.kubernetes.io/pcieRoot.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
)

// driverName is the name of the example driver.
const driverName = "gpu.example.com"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	var node string
	var gpus []string
	c := &cobra.Command{
		Use:          "gpudriver --gpu NAME=PCIEROOT...",
		Short:        "Offer GPUs that do not exist, as an example of a DRA driver",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(c *cobra.Command, _ []string) error {
			return run(c.Context(), node, gpus)
		},
	}

	c.Flags().StringVar(&node, "node-name", os.Getenv("NODE_NAME"),
		"name of this node's Node object (environment: NODE_NAME)")
	c.Flags().StringArrayVar(&gpus, "gpu",
		nil, "GPU to offer, and its PCIe root: gpu-0=pci0000:3a; can be given several times")
	if err := c.ExecuteContext(ctx); err != nil {
		os.Exit(1)
	}
}

// run publishes the GPUs until ctx ends.
func run(ctx context.Context, node string, gpus []string) error {
	devices, err := devicesOf(gpus)
	if err != nil {
		return err
	}

	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}

	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}

	data := filepath.Join(kubeletplugin.KubeletPluginsDir, driverName)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return err
	}

	helper, err := kubeletplugin.Start(ctx, driver{}, kubeletplugin.DriverName(driverName),
		kubeletplugin.NodeName(node),
		kubeletplugin.KubeClient(client), kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.HealthService(false))
	if err != nil {
		return err
	}
	defer helper.Stop()

	resources := resourceslice.DriverResources{
		Pools: map[string]resourceslice.Pool{
			node: {Slices: []resourceslice.Slice{{Devices: devices}}},
		},
	}

	if err := helper.PublishResources(ctx, resources); err != nil {
		return err
	}

	<-ctx.Done()
	return nil
}

// devicesOf returns a device for each NAME=PCIEROOT.
func devicesOf(gpus []string) ([]resourceapi.Device, error) {
	var devices []resourceapi.Device
	for _, text := range gpus {
		name, root, ok := strings.Cut(text, "=")
		if !ok || !strings.HasPrefix(root, "pci") {
			return nil, fmt.Errorf("--gpu %q: must be a name and its PCIe root, such as "+
				"gpu-0=pci0000:3a", text)
		}

		devices = append(devices,
			resourceapi.Device{Name: name,
				Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
					deviceattribute.StandardDeviceAttributePCIeRoot: {StringValue: &root},
				}})
	}

	if len(devices) == 0 {
		return nil, errors.New("--gpu: must be given at least once")
	}

	slices.SortFunc(devices, func(a, b resourceapi.Device) int {
		return strings.Compare(a.Name, b.Name)
	})

	return devices, nil
}

// driver does nothing for a pod, because there are no GPUs.
type driver struct{}

func (driver) PrepareResourceClaims(
	_ context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, c := range claims {
		var r kubeletplugin.PrepareResult
		for _, result := range c.Status.Allocation.Devices.Results {
			if result.Driver == driverName { // other results belong to other drivers
				r.Devices = append(r.Devices, kubeletplugin.Device{
					Requests: []string{result.Request}, PoolName: result.Pool,
					DeviceName: result.Device,
				})
			}
		}

		results[c.UID] = r
	}

	return results, nil
}

func (driver) UnprepareResourceClaims(
	_ context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, c := range claims {
		results[c.UID] = nil
	}
	return results, nil
}

func (driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

func (driver) HandleError(ctx context.Context, err error, message string) {
	klog.FromContext(ctx).Error(err, message)
}
