// SPDX-License-Identifier: Apache-2.0

// Package podresources asks the kubelet which pods have which Functions. Only the kubelet knows,
// because it allocates extended resources to containers by itself, and does not report when it
// takes them back.
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

// maxMessage bounds the kubelet's answer, in bytes. A container takes some hundred bytes, and a
// node has a few hundred pods.
const maxMessage = 16 << 20

// idleTimeout is the time after which an unused connection is closed.
const idleTimeout = time.Minute

// Assignment is the pod and resource that a Function was given to.
type Assignment struct {
	// Resource is the extended resource of this device plugin, or of another one that names devices
	// by PCI address. For a ResourceClaim it is the name of the DRA driver, but "" for the driver
	// of this project.
	Resource string
	// Container is the first of the pod's containers that has the Function. Namespace and Pod are
	// empty if only the kubelet's checkpoint has the Function.
	Namespace, Pod, Container string
}

// String returns text such as "pod default/web (container nginx)".
func (a Assignment) String() string {
	pod := "a pod"
	if a.Pod != "" {
		pod = "pod " + a.Namespace + "/" + a.Pod
	}
	return fmt.Sprintf("%s (container %s)", pod, cmp.Or(a.Container, "unknown"))
}

// Self names the agent's own pod. It is empty if the agent does not run in a pod.
type Self struct{ Namespace, Name string }

// Options of a [Client]. HasAdminAccess and Auxiliary may be nil.
type Options struct {
	KubeletDir string // the kubelet's directory, "/var/lib/kubelet"
	// Self names the agent's own pod. A list that lacks it is an error, because a kubelet that was
	// restarted lists only static pods until it has heard from the API server.
	Self Self
	// HasAdminAccess reports whether a claim only observes a Function and does not have it. The
	// kubelet does not report that.
	HasAdminAccess func(namespace, claim string, f function.ID) bool
	// Auxiliary returns the SF that has an auxiliary device of this name now ("mlx5_core.sf.4"),
	// because other device plugins name SFs by it.
	Auxiliary func(name string) (id function.ID, exists bool)
	Log       logr.Logger
}

// Client asks the kubelet, and keeps the last list for callers that cannot wait. Its methods may be
// called concurrently.
type Client struct {
	options Options

	socket, checkpoint string                          // paths
	connection         atomic.Pointer[grpc.ClientConn] // kept, because a new one takes milliseconds

	// the kubelet's list at the last Refresh
	last atomic.Pointer[map[function.ID][]Assignment]
	// held from the request until the answer is stored
	refreshing sync.Mutex
	// whether the kubelet did not answer; guarded by refreshing
	away bool
}

// NewClient returns a client for the kubelet of this node.
func NewClient(options Options) (*Client, error) {
	if options.HasAdminAccess == nil {
		options.HasAdminAccess = func(string, string, function.ID) bool { return false }
	}

	dir := options.KubeletDir
	c := &Client{
		options: options, socket: filepath.Join(dir, "pod-resources", "kubelet.sock"),
		checkpoint: filepath.Join(dir, checkpointFile),
	}

	c.last.Store(&map[function.ID][]Assignment{})
	return c, c.connect(nil)
}

// connect replaces the connection old, unless another goroutine has done so.
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

// Close closes the connection. No other method may be running.
func (c *Client) Close() error { return c.connection.Load().Close() }

// Assigned returns the Functions that pods may have now, by [function.ID.String]. It joins the
// kubelet's list and the kubelet's checkpoint. No pod has a Function that is not in the result. The
// list never has init containers, and the checkpoint may still have a pod that is gone. If several
// resources include a Function, the result has the resource that sorts first.
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

// Refresh asks the kubelet for the list that [Client.InUse] and [Client.Has] read. changed reports
// whether the list has changed. If the kubelet does not answer, the last list is kept.
func (c *Client) Refresh(ctx context.Context) (changed bool, err error) {
	c.refreshing.Lock()
	defer c.refreshing.Unlock()

	listed, err := c.list(ctx)
	if err != nil {
		if !c.away && !errors.Is(ctx.Err(), context.Canceled) {
			c.options.Log.Error(err, "Pods' devices are not known anew, keeping what is known")
			c.away = true
		}
		return false, err
	}

	if c.away {
		c.options.Log.Info("Pods' devices are known again")
	}

	c.away = false
	before := c.last.Swap(&listed)
	return !maps.EqualFunc(*before, listed, slices.Equal[[]Assignment]), nil
}

// InUse returns a message if, by the last list, a pod has the Function by another resource than
// this one, and "" otherwise. The resource "" stands for ResourceClaims of this project's driver.
// InUse does not block.
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

// Has reports whether, by the last list, a pod has the Function by this resource. The resource ""
// stands for ResourceClaims of this project's driver. Has does not block.
func (c *Client) Has(id function.ID, resource string) bool {
	return slices.ContainsFunc((*c.last.Load())[id], func(a Assignment) bool {
		return a.Resource == resource
	})
}

// list asks a second time, with a new connection, if the kubelet does not answer. The kubelet may
// have been restarted, and gRPC would wait before it connects again.
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
		return p.Namespace == c.options.Self.Namespace && p.Name == c.options.Self.Name
	}
	if c.options.Self.Name != "" && !slices.ContainsFunc(response.PodResources, isSelf) {
		return nil, fmt.Errorf("kubelet at %s: list of pods' devices: lacks this agent's own pod "+
			"%s/%s: "+
			"the kubelet has not heard yet which pods there are", c.socket, c.options.Self.Namespace,
			c.options.Self.Name)
	}

	return c.functions(response.PodResources), nil
}

// parse parses the ID that a device plugin uses for a Function.
func (c *Client) parse(text string) (function.ID, error) {
	if c.options.Auxiliary != nil && strings.Contains(text, ".sf.") {
		if id, exists := c.options.Auxiliary(text); exists {
			return id, nil
		}
	}
	return function.ParseID(text)
}

// functions returns the Functions among the devices of pods. There is one assignment for each pod
// and resource, because containers of a pod may share a Function.
func (c *Client) functions(pods []*podresourcesapi.PodResources) map[function.ID][]Assignment {
	found := map[function.ID][]Assignment{}
	for _, pod := range pods {
		for _, container := range pod.Containers {
			for _, one := range append(c.extended(container), c.claimed(container)...) {
				isSame := func(a Assignment) bool {
					return a.Resource == one.resource && a.Namespace == pod.Namespace &&
						a.Pod == pod.Name
				}
				if !slices.ContainsFunc(found[one.id], isSame) {
					found[one.id] = append(found[one.id],
						Assignment{one.resource, pod.Namespace, pod.Name, container.Name})
				}
			}
		}
	}

	return found
}

// given is a Function that a container has by a resource, in the sense of [Assignment].
type given struct {
	id       function.ID
	resource string
}

// extended returns the Functions that a container has by extended resources. The IDs of devices that
// are not Functions cannot be parsed.
func (c *Client) extended(container *podresourcesapi.ContainerResources) (list []given) {
	for _, devices := range container.Devices {
		for _, text := range devices.DeviceIds {
			if id, err := c.parse(text); err == nil {
				list = append(list, given{id, devices.ResourceName})
			}
		}
	}
	return list
}

// claimed returns the Functions that a container has by ResourceClaims. The names of devices that
// are not Functions cannot be parsed.
func (c *Client) claimed(container *podresourcesapi.ContainerResources) (list []given) {
	for _, claim := range container.DynamicResources {
		for _, device := range claim.ClaimResources {
			if device.ShareId != nil {
				continue // a PF; the kubelet does not know which VF the pod has
			}

			// DRANET uses the same device names as this driver, with a prefix.
			id, err := function.ParseDeviceName(strings.TrimPrefix(device.DeviceName, "pci-"))
			isOurs := device.DriverName == v1alpha1.GroupName
			switch {
			case err != nil:
			case !isOurs:
				list = append(list, given{id, device.DriverName})
			case !c.options.HasAdminAccess(claim.ClaimNamespace, claim.ClaimName, id):
				list = append(list, given{id, ""})
			}
		}
	}
	return list
}
