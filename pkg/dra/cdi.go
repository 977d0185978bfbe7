package dra

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
)

const cdiClass = "function"

// CDI writes the files by which the runtime learns what a container gets of a Function: its environment.
type CDI struct {
	cache *cdi.Cache
}

// NewCDI keeps the files in dir, which the runtime reads: /var/run/cdi.
func NewCDI(dir string) (*CDI, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, fmt.Errorf("CDI directory %s: %w", dir, err)
	}
	return &CDI{cache: cache}, nil
}

// Write replaces the claim's file. A Function is a CDI device of its own, named after claim and Function, so that a
// runtime that caches never takes one claim's for another's.
func (c *CDI) Write(claim types.UID, attachments []journal.Attachment) error {
	spec := &specs.Spec{Version: specs.CurrentVersion, Kind: v1alpha1.GroupName + "/" + cdiClass}
	for _, a := range attachments {
		suffix := environmentName(a.Claim.Request)
		spec.Devices = append(spec.Devices, specs.Device{
			Name: cdiDeviceName(a),
			ContainerEdits: specs.ContainerEdits{Env: []string{
				"XPU_FUNCTION_" + suffix + "=" + a.Function.String(),
				"XPU_INTERFACE_" + suffix + "=" + a.Interface.Name,
			}},
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

// Remove deletes the claim's file, if there is one.
func (c *CDI) Remove(claim types.UID) error {
	if err := c.cache.RemoveSpec(cdiFile(claim)); err != nil {
		return fmt.Errorf("CDI file of claim %s: %w", claim, err)
	}
	return nil
}

func cdiFile(claim types.UID) string { return v1alpha1.GroupName + "-" + string(claim) }

func cdiDeviceName(a journal.Attachment) string { return string(a.Claim.UID) + "-" + a.Claim.Device }

func cdiDeviceID(a journal.Attachment) string {
	return parser.QualifiedName(v1alpha1.GroupName, cdiClass, cdiDeviceName(a))
}

// environmentName turns a request's name, a DNS label with perhaps a subrequest behind a slash, into part of the name
// of an environment variable: "blue/vf" is "BLUE_VF".
func environmentName(request string) string {
	return strings.ToUpper(strings.NewReplacer("-", "_", "/", "_", ".", "_").Replace(request))
}
