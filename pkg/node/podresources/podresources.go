// Package podresources asks the kubelet which pods have which Functions. The kubelet is the only one who knows: it
// gives extended resources to containers by itself, and takes them back without a word.
package podresources

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// maxMessage bounds the kubelet's answer, in bytes. A container takes some hundred, and a node has a few hundred pods.
const maxMessage = 16 << 20

// Assignment is a Function's place in a pod.
type Assignment struct {
	// Resource is the extended resource by which the pod has the Function, ours or that of another device plugin which
	// names devices by PCI address. It is "" for a ResourceClaim of this project's driver, and the driver's name for one
	// of another driver.
	Resource string
	// Namespace and Pod name the pod, and Container the first of its containers that has the Function. Of what only the
	// kubelet's checkpoint has, Namespace and Pod are empty.
	Namespace, Pod, Container string
}

// Self names the agent's own pod; it is empty where the agent does not run in one.
type Self struct{ Namespace, Name string }

// Client asks the kubelet. Its methods may be called by several goroutines at once.
type Client struct {
	self       Self
	socket     string
	checkpoint string
}

// NewClient makes a client for the kubelet with this directory, "/var/lib/kubelet". The kubelet need not be there yet,
// and may go and come. An answer without the pod that self names is not taken for one: a kubelet that was started again
// lists static pods only, until it has heard of the API server.
func NewClient(kubeletDir string, self Self) *Client {
	return &Client{
		self: self, socket: filepath.Join(kubeletDir, "pod-resources", "kubelet.sock"),
		checkpoint: filepath.Join(kubeletDir, checkpointFile),
	}
}

// Assigned returns what pods have now, by [function.ID.String]: what the kubelet lists, and what its checkpoint has
// besides. The list never has init containers; the checkpoint may have a pod that is gone, until the kubelet writes it
// again. So what is not there nobody has; what is there somebody may have. A Function that two resources were given for,
// which is one too many, is there by the one that sorts first.
func (c *Client) Assigned(ctx context.Context) (map[string]Assignment, error) {
	listed, err := c.listed(ctx)
	if err != nil {
		return nil, err
	}
	assigned, err := readCheckpoint(c.checkpoint)
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

// Claimed are the Functions that a pod has by ResourceClaims of this project's driver.
func (c *Client) Claimed(ctx context.Context, namespace, pod string) ([]function.ID, error) {
	listed, err := c.listed(ctx)
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

// listed returns what the kubelet lists, also where one Function is given several times.
func (c *Client) listed(ctx context.Context) (map[function.ID][]Assignment, error) {
	pods, err := c.list(ctx)
	if err != nil {
		return nil, fmt.Errorf("kubelet at %s: list of pods' devices: %w", c.socket, err)
	}
	isSelf := func(p *podresourcesapi.PodResources) bool {
		return p.GetNamespace() == c.self.Namespace && p.GetName() == c.self.Name
	}
	if c.self.Name != "" && !slices.ContainsFunc(pods, isSelf) {
		return nil, fmt.Errorf("kubelet at %s: list of pods' devices: lacks this agent's own pod %s/%s: "+
			"the kubelet has not heard yet which pods there are", c.socket, c.self.Namespace, c.self.Name)
	}
	return functions(pods), nil
}

// list asks over a connection of its own: one that is kept would not be tried again at once after the kubelet was started
// again, and one to a kubelet that is away fails at once.
func (c *Client) list(ctx context.Context) ([]*podresourcesapi.PodResources, error) {
	connection, err := grpc.NewClient("unix:"+c.socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	response, err := podresourcesapi.NewPodResourcesListerClient(connection).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	return response.GetPodResources(), err
}

// functions finds the Functions among the devices of pods. Devices whose IDs are no Function's are somebody else's.
// Containers of a pod may share a Function: it is there once for each pod and resource.
func functions(pods []*podresourcesapi.PodResources) map[function.ID][]Assignment {
	found := map[function.ID][]Assignment{}
	for _, pod := range pods {
		for _, container := range pod.GetContainers() {
			add := func(id function.ID, resource string) {
				a := Assignment{resource, pod.GetNamespace(), pod.GetName(), container.GetName()}
				if !slices.ContainsFunc(found[id], a.samePod) {
					found[id] = append(found[id], a)
				}
			}
			for _, devices := range container.GetDevices() {
				for _, text := range devices.GetDeviceIds() {
					if id, err := function.ParseID(text); err == nil {
						add(id, devices.GetResourceName())
					}
				}
			}
			for _, claim := range container.GetDynamicResources() {
				for _, device := range claim.GetClaimResources() {
					if id, err := function.ParseDeviceName(device.GetDeviceName()); err == nil {
						resource := device.GetDriverName()
						if resource == v1alpha1.GroupName {
							resource = ""
						}
						add(id, resource)
					}
				}
			}
		}
	}
	return found
}

// samePod says whether the same pod has the Function by the same resource.
func (a Assignment) samePod(b Assignment) bool {
	return a.Resource == b.Resource && a.Namespace == b.Namespace && a.Pod == b.Pod
}

// String is "pod default/web (container nginx)".
func (a Assignment) String() string {
	pod := "a pod"
	if a.Pod != "" {
		pod = "pod " + a.Namespace + "/" + a.Pod
	}
	return fmt.Sprintf("%s (container %s)", pod, cmp.Or(a.Container, "unknown"))
}
