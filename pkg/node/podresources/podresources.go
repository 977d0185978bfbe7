// SPDX-License-Identifier: Apache-2.0

// Package podresources asks the kubelet which pods have which Functions. Only the kubelet knows: it
// allocates extended resources to containers by itself, and does not report when it takes them
// back.
package podresources

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// maxMessage bounds the kubelet's answer, in bytes. A container takes some hundred, and a node has
// a few hundred pods.
const maxMessage = 16 << 20

// idleTimeout is the time after which a connection that nobody uses is closed.
const idleTimeout = time.Minute

// Assignment is a Function's place in a pod.
type Assignment struct {
	// Resource is the extended resource, of this device plugin or another one that names devices by
	// PCI address. For a ResourceClaim it is the DRA driver's name, but "" for this project's
	// driver.
	Resource string
	// Container is the first of the pod's containers that has the Function. Namespace and Pod are
	// empty for what only the kubelet's checkpoint has.
	Namespace, Pod, Container string
}

// String is "pod default/web (container nginx)".
func (a Assignment) String() string {
	pod := "a pod"
	if a.Pod != "" {
		pod = "pod " + a.Namespace + "/" + a.Pod
	}
	return fmt.Sprintf("%s (container %s)", pod, cmp.Or(a.Container, "unknown"))
}

// Self names the agent's own pod. It is empty if the agent does not run in a pod.
type Self struct{ Namespace, Name string }

// Client asks the kubelet, and keeps its last list for callers that cannot wait. Its methods may be
// called by several goroutines at once.
type Client struct {
	// Auxiliary finds the SF that has an auxiliary device of this name now, by which other device
	// plugins call it ("mlx5_core.sf.4"). It may be nil, and must not be changed once a method was
	// called.
	Auxiliary func(name string) (id function.ID, exists bool)

	self               Self
	sees               Sees
	socket, checkpoint string                          // paths
	connection         atomic.Pointer[grpc.ClientConn] // to make one takes milliseconds of an ADD
	log                logr.Logger

	// the kubelet's list at the last Refresh
	last atomic.Pointer[map[function.ID][]Assignment]
	// held from the question to the store of the answer
	refreshing sync.Mutex
	// the kubelet did not answer; guarded by refreshing
	away bool
}

// Sees says whether a claim only looks at a Function and does not have it (adminAccess), which the
// kubelet does not tell.
type Sees func(namespace, claim string, f function.ID) bool

// NewClient makes a client for the kubelet with this directory, "/var/lib/kubelet". sees may be
// nil. A list without the pod that self names is an error: a kubelet that was restarted lists only
// static pods until it has heard from the API server.
func NewClient(kubeletDir string, self Self, sees Sees, log logr.Logger) (*Client, error) {
	if sees == nil {
		sees = func(string, string, function.ID) bool { return false }
	}

	c := &Client{
		self: self, sees: sees, socket: filepath.Join(kubeletDir, "pod-resources", "kubelet.sock"),
		checkpoint: filepath.Join(kubeletDir, checkpointFile), log: log,
	}

	c.last.Store(&map[function.ID][]Assignment{})
	return c, c.connect(nil)
}

// connect replaces the connection, unless another goroutine has done so.
func (c *Client) connect(old *grpc.ClientConn) error {
	connection, err := grpc.NewClient("unix:"+c.socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithIdleTimeout(idleTimeout))
	if err != nil {
		return fmt.Errorf("kubelet at %s: %w", c.socket, err)
	}
	if !c.connection.CompareAndSwap(old, connection) {
		return connection.Close()
	}
	if old != nil {
		return old.Close()
	}

	return nil
}

// Close ends the connection. It must be called when no other call runs.
func (c *Client) Close() error { return c.connection.Load().Close() }

// Assigned returns the Functions that pods may have now, by [function.ID.String]: those that the
// kubelet lists, and those in its checkpoint. No pod has a Function that is not in the result. The
// list never has init containers, and the checkpoint may still have a pod that is gone. If several
// resources gave away a Function, the result has the resource that sorts first.
func (c *Client) Assigned(ctx context.Context) (map[string]Assignment, error) {
	listed, err := c.list(ctx)
	if err != nil {
		return nil, err
	}

	assigned, err := readCheckpoint(c.checkpoint, c.parse)
	if err != nil {
		return nil, fmt.Errorf("kubelet's checkpoint %s: %w", c.checkpoint, err)
	}

	for id, assignments := range listed {
		assigned[id.String()] = slices.MinFunc(assignments, func(a, b Assignment) int {
			return cmp.Compare(a.Resource, b.Resource)
		})
	}

	return assigned, nil
}

// Claimed returns the Functions that a pod has by ResourceClaims of this project's driver.
func (c *Client) Claimed(ctx context.Context, namespace, pod string) ([]function.ID, error) {
	listed, err := c.list(ctx)
	if err != nil {
		return nil, err
	}

	var claimed []function.ID
	for id, assignments := range listed {
		if slices.ContainsFunc(assignments, func(a Assignment) bool {
			return a.Resource == "" && a.Namespace == namespace && a.Pod == pod
		}) {
			claimed = append(claimed, id)
		}
	}

	return claimed, nil
}

// Refresh asks the kubelet for the list that [Client.InUse] and [Client.Has] read. changed says
// whether it differs from the last one, which is kept if the kubelet does not answer.
func (c *Client) Refresh(ctx context.Context) (changed bool, err error) {
	c.refreshing.Lock()
	defer c.refreshing.Unlock()

	listed, err := c.list(ctx)
	if err != nil {
		if !c.away && !errors.Is(ctx.Err(), context.Canceled) {
			c.log.Error(err, "Pods' devices are not known anew, keeping what is known")
			c.away = true
		}
		return false, err
	}

	if c.away {
		c.log.Info("Pods' devices are known again")
	}

	c.away = false
	before := c.last.Swap(&listed)
	return !maps.EqualFunc(*before, listed, slices.Equal[[]Assignment]), nil
}

// InUse returns a message if, by the last list, a pod has the Function by another resource than
// this. The resource "" stands for ResourceClaims of this project's driver. It does not block.
func (c *Client) InUse(id function.ID, resource string) string {
	for _, a := range (*c.last.Load())[id] {
		if a.Resource != resource {
			by := "resource " + a.Resource
			if a.Resource == "" {
				by = "a ResourceClaim"
			}
			return fmt.Sprintf("%s still has it by %s: it is offered again when that pod is gone",
				a, by)
		}
	}
	return ""
}

// Has says whether, by the last list, a pod has the Function by this resource, "" for
// ResourceClaims of this project's driver. It does not block.
func (c *Client) Has(id function.ID, resource string) bool {
	return slices.ContainsFunc((*c.last.Load())[id], func(a Assignment) bool {
		return a.Resource == resource
	})
}

// list asks once more, with a new connection, if the kubelet does not answer: it may have been
// restarted, and gRPC would wait before it connects again.
func (c *Client) list(ctx context.Context) (map[function.ID][]Assignment, error) {
	ask := func() (*podresourcesapi.ListPodResourcesResponse, error) {
		lister := podresourcesapi.NewPodResourcesListerClient(c.connection.Load())
		return lister.List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	}

	used := c.connection.Load()
	response, err := ask()
	if code := status.Code(err); ctx.Err() == nil &&
		(code == codes.Unavailable || code == codes.Canceled) {
		if err := c.connect(used); err != nil {
			return nil, err
		}
		response, err = ask()
	}

	if err != nil {
		return nil, fmt.Errorf("kubelet at %s: list of pods' devices: %w", c.socket, err)
	}

	isSelf := func(p *podresourcesapi.PodResources) bool {
		return p.Namespace == c.self.Namespace && p.Name == c.self.Name
	}
	if c.self.Name != "" && !slices.ContainsFunc(response.PodResources, isSelf) {
		return nil, fmt.Errorf("kubelet at %s: list of pods' devices: lacks this agent's own pod "+
			"%s/%s: "+
			"the kubelet has not heard yet which pods there are", c.socket, c.self.Namespace,
			c.self.Name)
	}

	return functions(response.PodResources, c.sees, c.parse), nil
}

// parse reads the ID by which a device plugin calls a Function.
func (c *Client) parse(text string) (function.ID, error) {
	if c.Auxiliary != nil && strings.Contains(text, ".sf.") {
		if id, exists := c.Auxiliary(text); exists {
			return id, nil
		}
	}
	return function.ParseID(text)
}

// functions finds the Functions among the devices of pods, whose IDs parse reads, with one
// assignment for each pod and resource: containers of a pod may share a Function.
func functions(
	pods []*podresourcesapi.PodResources, sees Sees, parse func(string) (function.ID, error),
) map[function.ID][]Assignment {
	found := map[function.ID][]Assignment{}
	for _, pod := range pods {
		for _, container := range pod.Containers {
			// The IDs and names of devices that are not Functions cannot be parsed.
			add := func(id function.ID, parseErr error, resource string) {
				isSame := func(a Assignment) bool {
					return a.Resource == resource && a.Namespace == pod.Namespace &&
						a.Pod == pod.Name
				}
				if parseErr == nil && !slices.ContainsFunc(found[id], isSame) {
					found[id] = append(found[id],
						Assignment{resource, pod.Namespace, pod.Name, container.Name})
				}
			}

			for _, devices := range container.Devices {
				for _, text := range devices.DeviceIds {
					id, err := parse(text)
					add(id, err, devices.ResourceName)
				}
			}

			for _, claim := range container.DynamicResources {
				for _, device := range claim.ClaimResources {
					if device.ShareId != nil {
						continue // of a PF; the kubelet does not know which VF the pod has
					}

					// DRANET names devices as this driver does, with a prefix.
					id, err := function.ParseDeviceName(strings.TrimPrefix(device.DeviceName,
						"pci-"))
					if device.DriverName == v1alpha1.GroupName &&
						sees(claim.ClaimNamespace, claim.ClaimName, id) {
						continue
					}

					if device.DriverName == v1alpha1.GroupName {
						add(id, err, "")
					} else {
						add(id, err, device.DriverName)
					}
				}
			}
		}
	}

	return found
}
