// SPDX-License-Identifier: Apache-2.0

package kubelettest

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Pods serves a settable list of pods with their devices. Its methods may be called concurrently.
type Pods struct {
	podresourcesapi.UnimplementedPodResourcesListerServer

	server *grpc.Server

	mutex sync.Mutex
	pods  []*podresourcesapi.PodResources
}

// ServePods serves the pod resources API at the socket of the kubelet with this directory, until
// Stop. It replaces a socket that was left there.
func ServePods(kubeletDir string) (*Pods, error) {
	path := filepath.Join(kubeletDir, "pod-resources", "kubelet.sock")
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, err
	}
	if err := os.RemoveAll(path); err != nil {
		return nil, err
	}

	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}

	p := &Pods{server: grpc.NewServer()}
	podresourcesapi.RegisterPodResourcesListerServer(p.server, p)
	go func() { _ = p.server.Serve(listener) }()

	return p, nil
}

// Stop stops the server.
func (p *Pods) Stop() { p.server.Stop() }

// Set replaces all pods.
func (p *Pods) Set(pods ...*podresourcesapi.PodResources) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.pods = pods
}

// List implements the kubelet's API.
func (p *Pods) List(
	context.Context, *podresourcesapi.ListPodResourcesRequest,
) (*podresourcesapi.ListPodResourcesResponse, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return &podresourcesapi.ListPodResourcesResponse{PodResources: p.pods}, nil
}

// Pod returns a pod in the namespace default whose one container, "main", has these devices of a
// resource.
func Pod(name, resource string, ids ...string) *podresourcesapi.PodResources {
	return pod(name, &podresourcesapi.ContainerResources{
		Devices: []*podresourcesapi.ContainerDevices{{ResourceName: resource, DeviceIds: ids}},
	})
}

// ClaimPod returns the same as Pod, with devices of a ResourceClaim that a DRA driver serves.
func ClaimPod(name, driver string, devices ...string) *podresourcesapi.PodResources {
	claim := &podresourcesapi.DynamicResource{ClaimName: name, ClaimNamespace: "default"}
	for _, device := range devices {
		claim.ClaimResources = append(claim.ClaimResources,
			&podresourcesapi.ClaimResource{
				DriverName: driver, PoolName: "node1", DeviceName: device,
			})
	}

	return pod(name,
		&podresourcesapi.ContainerResources{
			DynamicResources: []*podresourcesapi.DynamicResource{claim},
		})
}

func pod(name string, container *podresourcesapi.ContainerResources) *podresourcesapi.PodResources {
	container.Name = "main"
	return &podresourcesapi.PodResources{
		Namespace: "default", Name: name,
		Containers: []*podresourcesapi.ContainerResources{container},
	}
}
