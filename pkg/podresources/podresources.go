// Package podresources asks the kubelet which pods have which Functions. The kubelet is the only one who knows: it
// gives extended resources to containers by itself, and takes them back without a word.
package podresources

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
)

// maxMessage bounds the kubelet's answer, in bytes. A container takes some hundred, and a node has a few hundred pods.
const maxMessage = 16 << 20

// reconnect is how long a kubelet that does not answer is waited for.
const reconnect = time.Second

// Assignment is a Function's place in a pod.
type Assignment struct {
	// Resource is the extended resource by which the pod has the Function, ours or that of another device plugin which
	// names devices by PCI address. It is "" for a ResourceClaim of this project's driver, and the driver's name for one
	// of another driver.
	Resource string
	// Namespace and Pod name the pod, and Container the first of its containers that has the Function.
	Namespace, Pod, Container string
}

// Client asks the kubelet. Its methods may be called by several goroutines at once.
type Client struct {
	socket     string
	connection *grpc.ClientConn
	lister     podresourcesapi.PodResourcesListerClient
}

// NewClient makes a client for the kubelet with this directory, "/var/lib/kubelet". The kubelet need not be there yet,
// and may go and come.
func NewClient(kubeletDir string) (*Client, error) {
	socket := filepath.Join(kubeletDir, "pod-resources", "kubelet.sock")
	connection, err := grpc.NewClient("passthrough:///"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}))
	if err != nil {
		return nil, fmt.Errorf("kubelet at %s: %w", socket, err)
	}
	lister := podresourcesapi.NewPodResourcesListerClient(connection)
	return &Client{socket: socket, connection: connection, lister: lister}, nil
}

// Close ends the client.
func (c *Client) Close() error { return c.connection.Close() }

// Assigned returns what pods have now, by [inventory.ID.String]. A Function that two resources were given for, which is
// one too many, is there by the one that sorts first.
func (c *Client) Assigned(ctx context.Context) (map[string]Assignment, error) {
	all, err := c.all(ctx)
	if err != nil {
		return nil, err
	}
	assigned := make(map[string]Assignment, len(all))
	for id, assignments := range all {
		first := assignments[0]
		for _, other := range assignments[1:] {
			if other.Resource < first.Resource {
				first = other
			}
		}
		assigned[id.String()] = first
	}
	return assigned, nil
}

// all returns what pods have, also where one Function is given several times.
func (c *Client) all(ctx context.Context) (map[inventory.ID][]Assignment, error) {
	response, err := c.lister.List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	if status.Code(err) == codes.Unavailable && c.listens(ctx) {
		// It was started again since the connection was tried last.
		c.connection.ResetConnectBackoff()
		ctx, cancel := context.WithTimeout(ctx, reconnect)
		defer cancel()
		response, err = c.lister.List(ctx, &podresourcesapi.ListPodResourcesRequest{}, grpc.WaitForReady(true))
	}
	if err != nil {
		return nil, fmt.Errorf("kubelet at %s: list of pods' devices: %w", c.socket, err)
	}
	return functions(response), nil
}

// listens says whether the kubelet is there. One that is not must not hold up pods.
func (c *Client) listens(ctx context.Context) bool {
	connection, err := (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
	if err != nil {
		return false
	}
	connection.Close()
	return true
}

// functions finds the Functions among the devices of pods. Devices whose IDs are no Function's are somebody else's.
func functions(response *podresourcesapi.ListPodResourcesResponse) map[inventory.ID][]Assignment {
	found := map[inventory.ID][]Assignment{}
	for _, pod := range response.GetPodResources() {
		for _, container := range pod.GetContainers() {
			assignment := Assignment{Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName()}
			for _, devices := range container.GetDevices() {
				assignment.Resource = devices.GetResourceName()
				for _, text := range devices.GetDeviceIds() {
					if id, err := inventory.ParseID(text); err == nil {
						found[id] = add(found[id], assignment)
					}
				}
			}
			for _, claim := range container.GetDynamicResources() {
				for _, device := range claim.GetClaimResources() {
					assignment.Resource = device.GetDriverName()
					if assignment.Resource == v1alpha1.GroupName {
						assignment.Resource = ""
					}
					if id, err := inventory.ParseDeviceName(device.GetDeviceName()); err == nil {
						found[id] = add(found[id], assignment)
					}
				}
			}
		}
	}
	return found
}

// add has an assignment once for each pod and resource: containers of a pod may share.
func add(assignments []Assignment, a Assignment) []Assignment {
	for _, other := range assignments {
		if other.Resource == a.Resource && other.Namespace == a.Namespace && other.Pod == a.Pod {
			return assignments
		}
	}
	return append(assignments, a)
}

// String is "pod default/web (container nginx)".
func (a Assignment) String() string {
	return fmt.Sprintf("pod %s/%s (container %s)", a.Namespace, a.Pod, cmp.Or(a.Container, "unknown"))
}
