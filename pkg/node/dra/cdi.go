package dra

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// CDI writes the files by which the runtime learns what a container gets of a Function: environment and device nodes.
type CDI struct {
	dir   *cdi.Dir
	mutex sync.Mutex // held while a file is made up and written
}

// content is what a container gets of a Function.
type content struct {
	attachment journal.Attachment
	devnode.Set
	// claims are the attachments of all claims of the pod, this one among them.
	claims []journal.Attachment
}

// NewCDI keeps the files in dir, which the runtime reads: /var/run/cdi.
func NewCDI(dir string) (*CDI, error) {
	opened, err := cdi.Open(dir)
	if err != nil {
		return nil, err
	}
	return &CDI{dir: opened}, nil
}

// Write replaces the claim's file. A Function is a CDI device of its own.
func (c *CDI) Write(uid types.UID, contents []content) error {
	var devices []specs.Device
	for _, one := range contents {
		devices = append(devices, specs.Device{
			Name: cdiDeviceName(one.attachment),
			ContainerEdits: specs.ContainerEdits{
				Env: environment(sameRequest(contents, one)), DeviceNodes: cdi.Nodes(one.Nodes), Mounts: one.mounts(),
			},
		})
	}
	if err := c.dir.Write(cdiFile(uid), claim.CDIKind, devices); err != nil {
		return fmt.Errorf("claim %s: %w", uid, err)
	}
	return nil
}

// environment tells what the Functions of a request are, what their interfaces are called, and which of the device nodes
// are their own. A container gets all of a request's Functions, so each variable has the values of all, in the order of
// the Functions, with commas in between; each of the request's CDI devices sets the same.
func environment(request []content) []string {
	suffix := request[0].suffix()
	variables := []struct {
		name  string
		value func(content) string
	}{
		{"XPU_FUNCTION_", func(c content) string { return c.attachment.Function.String() }},
		{"XPU_INTERFACE_", func(c content) string { return cmp.Or(c.attachment.Observed.Name, c.attachment.Interface.Name) }},
		{"XPU_VFIO_", func(c content) string { return c.Info["vfio"]["dev-mount"] }},
		{"XPU_UIO_", func(c content) string { return c.Info["uio"]["mount"] }},
		{"XPU_RDMA_", func(c content) string { return c.Info["rdma"]["rdma_dev"] }},
		{"XPU_VDPA_", func(c content) string { return c.Info["vdpa"]["mount"] }},
	}
	var out []string
	for _, v := range variables {
		var values []string
		for _, c := range request {
			if value := v.value(c); value != "" {
				values = append(values, value)
			}
		}
		if len(values) > 0 {
			out = append(out, v.name+suffix+"="+strings.Join(values, ","))
		}
	}
	return out
}

// suffix is the request's name, with that of the claim in the pod before it where another claim of the pod has a request
// of the same name.
func (c content) suffix() string {
	own := c.attachment.Claim
	suffix := environmentName(own.Request)
	if slices.ContainsFunc(c.claims, func(a journal.Attachment) bool {
		return a.Claim.UID != "" && a.Claim.UID != own.UID && environmentName(a.Claim.Request) == suffix
	}) {
		return environmentName(cmp.Or(own.PodClaim, own.Name)) + "_" + suffix
	}
	return suffix
}

// sameRequest are the contents of the same request.
func sameRequest(contents []content, as content) []content {
	return slices.DeleteFunc(slices.Clone(contents), func(c content) bool {
		return c.attachment.Claim.Request != as.attachment.Claim.Request
	})
}

// namespaceDir is where a container has its network namespace as a file, by the name of the device.
const namespaceDir = "/run/" + v1alpha1.GroupName + "/netns"

// mounts has the runtime mount the network namespace that the Function is attached to. That is nothing that a container
// needs: it keeps one of another sandbox from starting without the Function. A pod may get a new sandbox while the agent is
// away, and the runtime then asks nobody; but the file of the old namespace is gone, and the mount fails.
func (c content) mounts() []*specs.Mount {
	return []*specs.Mount{{
		HostPath: c.attachment.Place.NetNS, ContainerPath: namespaceDir + "/" + c.attachment.Claim.Device,
		Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"},
	}}
}

// Has says whether the claim has a file.
func (c *CDI) Has(uid types.UID) bool { return c.dir.Has(cdiFile(uid)) }

// Remove deletes the claim's file, if there is one.
func (c *CDI) Remove(uid types.UID) error {
	if err := c.dir.Remove(cdiFile(uid)); err != nil {
		return fmt.Errorf("claim %s: %w", uid, err)
	}
	return nil
}

func cdiFile(uid types.UID) string { return v1alpha1.GroupName + "-" + string(uid) + ".yaml" }

func cdiDeviceName(a journal.Attachment) string {
	return claim.CDIDeviceName(a.Claim.UID, a.Claim.Device)
}

func cdiDeviceID(a journal.Attachment) string {
	return claim.CDIKind + "=" + cdiDeviceName(a)
}

// environmentName turns a request's name, a DNS label with perhaps a subrequest behind a slash, into part of the name
// of an environment variable: "blue/vf" is "BLUE_VF".
func environmentName(request string) string {
	return strings.ToUpper(strings.NewReplacer("-", "_", "/", "_", ".", "_").Replace(request))
}
