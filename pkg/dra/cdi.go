package dra

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
)

const cdiClass = "function"

// CDI writes the files by which the runtime learns what a container gets of a Function: environment and device nodes.
type CDI struct {
	dir   string
	cache *cdi.Cache
}

// content is what a container gets of a Function.
type content struct {
	attachment journal.Attachment
	devnode.Set
}

// NewCDI keeps the files in dir, which the runtime reads: /var/run/cdi.
func NewCDI(dir string) (*CDI, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, fmt.Errorf("CDI directory %s: %w", dir, err)
	}
	return &CDI{dir: dir, cache: cache}, nil
}

// Write replaces the claim's file. A Function is a CDI device of its own, named after claim and Function, so that a
// runtime that caches never takes one claim's for another's.
func (c *CDI) Write(claim types.UID, contents []content) error {
	spec := &specs.Spec{Version: specs.CurrentVersion, Kind: v1alpha1.GroupName + "/" + cdiClass}
	for _, one := range contents {
		spec.Devices = append(spec.Devices, specs.Device{
			Name:           cdiDeviceName(one.attachment),
			ContainerEdits: specs.ContainerEdits{Env: one.environment(), DeviceNodes: one.nodes()},
		})
	}
	minimum, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return fmt.Errorf("CDI file of claim %s: %w", claim, err)
	}
	spec.Version = minimum
	if err := c.cache.WriteSpec(spec, cdiFile(claim)); err != nil {
		return fmt.Errorf("CDI file of claim %s: %w", claim, err)
	}
	return nil
}

// environment tells which Function it is, what its interface is called, and which of the device nodes is its own.
func (c content) environment() []string {
	suffix := environmentName(c.attachment.Claim.Request)
	out := []string{
		"XPU_FUNCTION_" + suffix + "=" + c.attachment.Function.String(),
		"XPU_INTERFACE_" + suffix + "=" + c.attachment.Interface.Name,
	}
	for _, v := range []struct{ variable, subject, name string }{
		{"XPU_VFIO_", "vfio", "dev-mount"}, {"XPU_UIO_", "uio", "mount"}, {"XPU_RDMA_", "rdma", "rdma_dev"},
		{"XPU_VDPA_", "vdpa", "mount"},
	} {
		if value := c.Info[v.subject][v.name]; value != "" {
			out = append(out, v.variable+suffix+"="+value)
		}
	}
	return out
}

func (c content) nodes() []*specs.DeviceNode {
	var nodes []*specs.DeviceNode
	for _, n := range c.Nodes {
		nodes = append(nodes, &specs.DeviceNode{Path: n.Container, HostPath: n.Host, Permissions: n.Permissions})
	}
	return nodes
}

// Has says whether the claim has a file.
func (c *CDI) Has(claim types.UID) bool {
	_, err := os.Stat(filepath.Join(c.dir, cdiFile(claim)))
	return err == nil
}

// Remove deletes the claim's file, if there is one.
func (c *CDI) Remove(claim types.UID) error {
	if err := c.cache.RemoveSpec(cdiFile(claim)); err != nil {
		return fmt.Errorf("CDI file of claim %s: %w", claim, err)
	}
	return nil
}

// cdiFile has its ending, as the library would choose one.
func cdiFile(claim types.UID) string { return v1alpha1.GroupName + "-" + string(claim) + ".yaml" }

func cdiDeviceName(a journal.Attachment) string { return string(a.Claim.UID) + "-" + a.Claim.Device }

func cdiDeviceID(a journal.Attachment) string {
	return parser.QualifiedName(v1alpha1.GroupName, cdiClass, cdiDeviceName(a))
}

// environmentName turns a request's name, a DNS label with perhaps a subrequest behind a slash, into part of the name
// of an environment variable: "blue/vf" is "BLUE_VF".
func environmentName(request string) string {
	return strings.ToUpper(strings.NewReplacer("-", "_", "/", "_", ".", "_").Replace(request))
}
