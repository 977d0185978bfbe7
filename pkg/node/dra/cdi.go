// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// namespaceDir is the directory in a container at which the runtime mounts the network namespace of
// a Function. The mount keeps containers of a later sandbox from starting without the Function
// while the agent does not run, because the file of the old namespace is gone then.
const namespaceDir = "/run/" + v1alpha1.GroupName + "/netns"

// cdiFile returns the name of the claim's file.
func cdiFile(uid types.UID) string { return v1alpha1.GroupName + "-" + string(uid) + ".yaml" }

// CDIFiles has a CDI file for each claim, from which the container runtime learns what the
// containers of the claim get. All fields must be set.
type CDIFiles struct {
	Dir         *cdi.Dir
	Journal     *journal.Journal
	DeviceNodes *devnode.Finder
	// Function returns the current state of a Function of this node.
	Function func(function.ID) (f function.Function, exists bool)
	// DevicePool returns the spec of a DevicePool that selects this node.
	DevicePool func(name string) (spec v1alpha1.DevicePoolSpec, exists bool)
	Log        logr.Logger

	// writing is held while the content of a file is determined and written.
	writing sync.Mutex
}

// Expose lists the attached Functions in the CDI file of the attachment's claim. The runtime
// refuses to create a container whose CDI devices are not listed. If the file cannot be written for
// an attachment that is not attached, the file is removed.
func (c *CDIFiles) Expose(a journal.Attachment) error {
	err := c.write(a)
	if err == nil || a.State == journal.Attached {
		return err
	}
	c.Log.Error(err, "Containers of the claim cannot start until it is attached again",
		"claim", klog.KRef(a.Claim.Namespace, a.Claim.Name))
	return c.remove(a.Claim.UID)
}

// Recover updates the CDI files from the journal, because the last agent may have ended before it
// wrote one, or a file may be broken. It logs files that cannot be written, and continues.
func (c *CDIFiles) Recover(all []journal.Attachment) {
	for _, a := range all {
		file := cdiFile(a.Claim.UID)
		isUsable := a.State == journal.Attached && c.Dir.Adopt(file) && c.Dir.Has(file)
		if isUsable || a.State != journal.Attached && a.State != journal.Lost {
			continue
		}
		if err := c.write(a); err != nil {
			c.Log.Error(err, "Containers of the claim cannot start", "claim",
				klog.KRef(a.Claim.Namespace, a.Claim.Name))
		}
	}
}

// content is what a container gets of a Function.
type content struct {
	attachment journal.Attachment
	devnode.Set
}

// write writes the file of the attachment's claim, with a CDI device for each attached Function.
// current replaces the record of its Function in the journal, which may be older. write removes
// a file without devices, and does nothing for a Function without a claim.
func (c *CDIFiles) write(current journal.Attachment) error {
	uid := current.Claim.UID
	if uid == "" {
		return nil
	}

	c.writing.Lock()
	defer c.writing.Unlock()

	var contents []content
	for _, a := range c.Journal.ByClaim(uid) {
		if a.Function == current.Function {
			a = current
		}
		if a.State != journal.Attached {
			continue
		}

		set, err := c.deviceNodes(a)
		if err != nil {
			return fmt.Errorf("CDI file of claim %s/%s: Function %s: %w", a.Claim.Namespace,
				a.Claim.Name, a.Function, err)
		}

		contents = append(contents, content{a, set})
	}

	var devices []specs.Device
	for _, of := range contents {
		devices = append(devices, specs.Device{
			Name: claim.CDIDeviceName(uid, of.attachment.Function.DeviceName()),
			ContainerEdits: specs.ContainerEdits{
				Env: environment(c.suffix(of.attachment),
					of.attachment.Claim.Request, contents),
				DeviceNodes: of.Nodes,
				Mounts: []*specs.Mount{{
					HostPath: of.attachment.Place.NetNS, ContainerPath: namespaceDir + "/" +
						of.attachment.Function.DeviceName(),
					Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"},
				}},
			},
		})
	}

	if err := c.Dir.Write(cdiFile(uid), claim.CDIKind, devices); err != nil {
		return fmt.Errorf("claim %s: %w", uid, err)
	}

	return nil
}

// remove removes the file of a claim.
func (c *CDIFiles) remove(claim types.UID) error { return c.Dir.Remove(cdiFile(claim)) }

// deviceNodes returns what a container gets of a Function that is set up for it.
func (c *CDIFiles) deviceNodes(a journal.Attachment) (devnode.Set, error) {
	function, known := c.Function(a.Function)
	if !known {
		return devnode.Set{}, errGone
	}
	if a.Setup != nil && a.Setup.Driver != "" && !function.HasDriver(a.Setup.Driver) {
		return devnode.Set{}, fmt.Errorf("has driver %s, not %s, which its claim wants",
			function.Driver, a.Setup.Driver)
	}

	return c.DeviceNodes.Of(function, devnode.Wish{Options: c.promised(a, function)})
}

// promised returns what the pool promised for the Function. The pool of today says it of records of
// older agents only, because the pool may have been changed or deleted.
func (c *CDIFiles) promised(a journal.Attachment, f function.Function) pool.Options {
	if a.Devices != nil {
		return pool.Options(*a.Devices)
	}
	id, err := claim.ParsePoolID(a.Claim.Pool)
	if err != nil {
		return pool.Options{}
	}
	spec, _ := c.DevicePool(id.DevicePool)
	return pool.Pool{Name: id.DevicePool, Spec: spec}.Options(f)
}

// environment returns variables with the Functions of a request, their interfaces and their device
// nodes. A container gets all Functions of a request, so each of the request's CDI devices sets the
// same variables, with comma-separated values.
func environment(suffix, request string, contents []content) []string {
	variables := []struct {
		name  string
		value func(content) string
	}{
		{"XPU_FUNCTION_", func(c content) string { return c.attachment.Function.String() }},
		{"XPU_INTERFACE_", func(c content) string {
			return cmp.Or(c.attachment.Observed.Carrier(),
				c.attachment.Interface.Name)
		}},
		{"XPU_VFIO_", func(c content) string { return c.Info["vfio"]["dev-mount"] }},
		{"XPU_IOMMUFD_", func(c content) string { return c.Info["vfio"]["iommufd-dev-mount"] }},
		{"XPU_UIO_", func(c content) string { return c.Info["uio"]["mount"] }},
		{"XPU_RDMA_", func(c content) string { return c.Info["rdma"]["rdma_dev"] }},
		{"XPU_VDPA_", func(c content) string { return c.Info["vdpa"]["mount"] }},
	}

	var out []string
	for _, v := range variables {
		var values []string
		for _, c := range contents {
			if value := v.value(c); value != "" && c.attachment.Claim.Request == request {
				values = append(values, value)
			}
		}

		if len(values) > 0 {
			out = append(out, v.name+suffix+"="+strings.Join(values, ","))
		}
	}

	return out
}

// suffix returns the end of variables' names: the name of the request. If another claim of the pod
// has a request of the same name, the name of the claim in the pod comes first.
func (c *CDIFiles) suffix(a journal.Attachment) string {
	suffix := environmentName(a.Claim.Request)
	if a.Pod.UID != "" &&
		slices.ContainsFunc(c.Journal.ByPod(a.Pod.UID), func(other journal.Attachment) bool {
			return other.Claim.UID != "" && other.Claim.UID != a.Claim.UID &&
				environmentName(other.Claim.Request) == suffix
		}) {
		return environmentName(cmp.Or(a.Claim.PodClaim, a.Claim.Name)) + "_" + suffix
	}

	return suffix
}

// environmentName returns a request's name for use in the name of an environment variable:
// "BLUE_VF" for "blue/vf".
func environmentName(request string) string {
	return strings.ToUpper(strings.NewReplacer("-", "_", "/", "_", ".", "_").Replace(request))
}
