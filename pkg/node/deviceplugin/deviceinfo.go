// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceinfo"
	"github.com/opiproject/xpu-device-plugin/pkg/node/keep"
)

// minAge is the least age of a device-info file that is removed, because the kubelet assigns a
// Function to a pod only after the Allocate.
const minAge = 10 * time.Minute

// DeviceInfo has a device-info file for each Function that a pod has, in which Multus looks up a
// device ID. The kubelet asks only once for a Function of a pod, but Multus looks again whenever the
// pod gets another sandbox. So the files have copies, from which they come back when their directory
// was emptied, by hand or by a reboot. The methods are safe for concurrent use.
type DeviceInfo struct {
	dir  string
	kept *keep.Copies
}

// NewDeviceInfo returns the files in dir, "/var/run/k8s.cni.cncf.io/devinfo/dp", with their copies in
// a directory that survives reboots. Neither need exist.
func NewDeviceInfo(dir, copies string) *DeviceInfo {
	return &DeviceInfo{dir: dir, kept: keep.NewCopies(dir, copies)}
}

// Restore writes files again that were removed from the directory, and returns their names.
func (d *DeviceInfo) Restore() ([]string, error) { return d.kept.Restore() }

// write atomically replaces a Function's file. It writes no file for a Function that the
// specification cannot describe.
func (d *DeviceInfo) write(resource string, c content) error {
	text, err := describe(c)
	if text == nil || err != nil {
		return err
	}

	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		return err
	}
	path := filepath.Join(d.dir, deviceInfoName(resource, c.function.ID))
	return d.kept.WriteFile(path, text, 0o644)
}

// describe returns the content of a Function's file, or nil.
func describe(c content) ([]byte, error) {
	_, asVDPA := c.Info["vdpa"]
	info := deviceinfo.Of(c.function, asVDPA)
	if info == nil {
		return nil, nil
	}

	if info.PCI != nil {
		info.PCI.VhostNet = c.Info["vhost"]["net-mount"]
		if _, ok := c.Info["rdma"]; ok {
			info.PCI.RDMA = strings.Join(c.function.RDMADevices, ",")
		}
	}

	return json.Marshal(info)
}

// refresh replaces the files of Functions that are described otherwise now: the number of a vDPA
// device may be another one after a reboot. A file without a copy may be another device plugin's. It
// is taken over only if the resource is this project's, or if gave says that a pod has the Function
// from this agent by the resource.
func (d *DeviceInfo) refresh(
	resource string, contents []content, gave func(function.ID) bool,
) error {
	var errs []error
	for _, c := range contents {
		name := deviceInfoName(resource, c.function.ID)
		before, unread := os.ReadFile(filepath.Join(d.dir, name))
		hasCopy, err := d.kept.Has(name)
		if err != nil { // whose file it is is not known
			errs = append(errs, err)
			continue
		}

		isOurs := hasCopy || unread == nil && (hasOwnPrefix(name) || gave(c.function.ID))
		if !isOurs {
			continue
		}

		text, err := describe(c)
		if hasCopy && err == nil && unread == nil && string(before) == string(text) {
			continue
		}
		errs = append(errs, err, d.write(resource, c))
	}

	return errors.Join(errs...)
}

// names returns the names of the files that there are or that have a copy, finished or not.
func (d *DeviceInfo) names() ([]string, error) {
	paths, err := d.kept.Glob(filepath.Join(d.dir, "*"+deviceInfoSuffix+"*"))
	if err != nil {
		return nil, fmt.Errorf("device-info files: %w", err)
	}
	for i, path := range paths {
		paths[i] = filepath.Base(path)
	}
	return paths, nil
}

// prune removes this plugin's files, except those that are needed and those that are younger than
// minAge. A file is this plugin's if it has a copy, or if its name says so by one of the resources.
// served are the resources that are offered now.
func (d *DeviceInfo) prune(resources, served []string, needed map[string]bool) error {
	names, err := d.names()
	if err != nil {
		return err
	}

	var errs []error
	for _, name := range names {
		if !isOwnFile(name, served) {
			// Another device plugin may serve the resource now.
			if err := d.kept.ForgetReplaced(name); err != nil {
				errs = append(errs, err)
				continue
			}
		}

		hasCopy, err := d.kept.Has(name)
		if err != nil {
			errs = append(errs, err)
			continue
		}

		isOurs := hasCopy || isOwnFile(name, resources)
		if needed[name] || !isOurs || time.Since(d.kept.Changed(name)) < minAge {
			continue
		}
		if err := d.kept.Remove(filepath.Join(d.dir, name)); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}

// isOwnFile reports whether a file, finished or not, belongs to this plugin by its name: it has the
// project's own prefix, or one of the resources followed by an address. The address is checked
// because another plugin's resource may have a longer name that begins with one of these resources.
func isOwnFile(name string, resources []string) bool {
	name, rest, isInfo := strings.Cut(strings.TrimPrefix(name, "."), deviceInfoSuffix)
	if !isInfo || rest != "" && !strings.HasSuffix(rest, ".tmp") {
		return false
	}
	if hasOwnPrefix(name) {
		return true
	}

	return slices.ContainsFunc(resources, func(resource string) bool {
		id, ok := strings.CutPrefix(name, deviceInfoPrefix(resource))
		_, err := pci.Parse(id)
		return ok && err == nil
	})
}

// hasOwnPrefix reports whether a file is of a resource with the project's own prefix, which no other
// device plugin has.
func hasOwnPrefix(name string) bool { return strings.HasPrefix(name, v1alpha1.GroupName+"-") }

const deviceInfoSuffix = "-device.json"

// deviceInfoName returns the file name that readers expect.
func deviceInfoName(resource string, id function.ID) string {
	return deviceInfoPrefix(resource) + strings.ReplaceAll(id.String(), "/", "-") + deviceInfoSuffix
}

func deviceInfoPrefix(resource string) string {
	return strings.ReplaceAll(resource, "/", "-") + "-"
}
