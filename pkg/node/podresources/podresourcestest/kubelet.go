// Package podresourcestest has a kubelet that says which pods have which devices, over a real socket.
package podresourcestest

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Kubelet answers with what was set. Its methods may be called by several goroutines at once.
type Kubelet struct {
	podresourcesapi.UnimplementedPodResourcesListerServer

	server *grpc.Server

	mutex sync.Mutex
	pods  []*podresourcesapi.PodResources
}

// Start serves at the socket of the kubelet with this directory, until Stop. A socket that is left there is replaced.
func Start(kubeletDir string) (*Kubelet, error) {
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
	k := &Kubelet{server: grpc.NewServer()}
	podresourcesapi.RegisterPodResourcesListerServer(k.server, k)
	go func() { _ = k.server.Serve(listener) }()
	return k, nil
}

// Stop ends the kubelet.
func (k *Kubelet) Stop() { k.server.Stop() }

// Set replaces all pods.
func (k *Kubelet) Set(pods ...*podresourcesapi.PodResources) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.pods = pods
}

// List implements the kubelet's API.
func (k *Kubelet) List(
	context.Context, *podresourcesapi.ListPodResourcesRequest,
) (*podresourcesapi.ListPodResourcesResponse, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return &podresourcesapi.ListPodResourcesResponse{PodResources: k.pods}, nil
}

// Pod is a pod in the namespace default whose one container, "main", has these devices of a resource.
func Pod(name, resource string, ids ...string) *podresourcesapi.PodResources {
	return pod(name, &podresourcesapi.ContainerResources{
		Devices: []*podresourcesapi.ContainerDevices{{ResourceName: resource, DeviceIds: ids}},
	})
}

// ClaimPod is a pod as Pod, with devices of a ResourceClaim that a DRA driver serves.
func ClaimPod(name, driver string, devices ...string) *podresourcesapi.PodResources {
	claim := &podresourcesapi.DynamicResource{ClaimName: name, ClaimNamespace: "default"}
	for _, device := range devices {
		claim.ClaimResources = append(claim.ClaimResources,
			&podresourcesapi.ClaimResource{DriverName: driver, PoolName: "node1", DeviceName: device})
	}
	return pod(name, &podresourcesapi.ContainerResources{DynamicResources: []*podresourcesapi.DynamicResource{claim}})
}

func pod(name string, container *podresourcesapi.ContainerResources) *podresourcesapi.PodResources {
	container.Name = "main"
	return &podresourcesapi.PodResources{
		Namespace: "default", Name: name, Containers: []*podresourcesapi.ContainerResources{container},
	}
}
