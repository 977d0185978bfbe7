// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

const (
	// The kubelet does not report the end of pods, so files are swept at this interval.
	sweepEvery = 5 * time.Minute
	// askTimeout limits a question to the kubelet.
	askTimeout = 10 * time.Second
	// minAge is the least age of a device-info file that is removed, because the kubelet assigns a
	// Function to a pod only after the Allocate.
	minAge = 10 * time.Minute
)

// sweepRegularly sweeps until ctx ends.
func (m *Manager) sweepRegularly(ctx context.Context) {
	_ = wait.PollUntilContextCancel(ctx, sweepEvery,
		false, func(ctx context.Context) (done bool, err error) {
			m.sweep(ctx)
			return false, nil
		})
}

// sweep asks the kubelet what pods have, and removes the files of Functions that no pod has.
func (m *Manager) sweep(ctx context.Context) {
	if m.Assigned == nil || m.relay.Forwards() {
		return
	}

	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()

	assigned, err := m.Assigned(ctx)
	if err != nil {
		m.Log.Error(err, "Cannot tell which files nobody needs any more, keeping all", "retry",
			sweepEvery.String())
		return
	}

	m.mutex.Lock()
	defer m.mutex.Unlock()

	infoFiles, cdiDevices := map[string]bool{}, map[string]bool{} // the names that are needed
	for text, a := range assigned {
		if id, err := function.ParseID(text); err == nil {
			infoFiles[deviceInfoName(a.Resource, id)] = true
			cdiDevices[cdiDeviceName(a.Resource, id)] = true
		}
	}

	for resource, s := range m.servers {
		for _, f := range s.offer.Load().functions {
			cdiDevices[cdiDeviceName(resource, f.ID)] = true
		}
	}

	if err := removeDeviceInfo(m.DeviceInfoDir, m.resources.UnsortedList(), infoFiles); err != nil {
		m.Log.Error(err, "Some device-info files that nobody needs any more remain")
	}
	if m.CDI == nil {
		return
	}
	if err := m.CDI.prune(cdiDevices); err != nil {
		m.Log.Error(err, "Some CDI devices that nobody needs any more remain")
	}
}

// removeDeviceInfo removes this plugin's device-info files, except those that are needed and those
// that are younger than minAge.
func removeDeviceInfo(dir string, resources []string, needed map[string]bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("device-info files: %w", err)
	}

	var errs []error
	for _, entry := range entries {
		if needed[entry.Name()] || !isOwnFile(entry.Name(), resources) {
			continue
		}

		info, err := entry.Info()
		if err != nil || time.Since(info.ModTime()) < minAge {
			continue // it is gone, or new
		}
		// no error if it is gone already
		errs = append(errs, os.RemoveAll(filepath.Join(dir, entry.Name())))
	}

	return errors.Join(errs...)
}

// isOwnFile reports whether a file, finished or not, belongs to this plugin: it has the project's
// own prefix, or one of the resources followed by an address. The address is checked because
// another plugin's resource may have a longer name that begins with one of these resources.
func isOwnFile(name string, resources []string) bool {
	name, isInfo := strings.CutSuffix(strings.TrimPrefix(name, "."), deviceInfoSuffix)
	if !isInfo {
		return false
	}
	if strings.HasPrefix(name, v1alpha1.GroupName+"-") {
		return true
	}

	return slices.ContainsFunc(resources, func(resource string) bool {
		id, ok := strings.CutPrefix(name, deviceInfoPrefix(resource))
		_, err := pci.Parse(id)
		return ok && err == nil
	})
}
