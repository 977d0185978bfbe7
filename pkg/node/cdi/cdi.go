// SPDX-License-Identifier: Apache-2.0

// Package cdi writes files of the Container Device Interface (CDI), by which a container runtime
// learns what to add to a container for a device.
package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Dir is a directory that the runtime reads: "/var/run/cdi". The methods are safe for concurrent
// use.
type Dir struct {
	path  string
	cache *cdi.Cache
	// found are the files that the directory contained when it was opened, by name.
	found map[string]*cdi.Spec

	mutex sync.Mutex
	// written has the files that [Dir.Restore] writes again, by name.
	written map[string]*specs.Spec
}

// Open opens the directory, which need not exist. It removes unfinished files of an agent that was
// killed. A directory that cannot be read is an error: the library takes it for an empty one, and
// what it has would be replaced.
func Open(path string) (*Dir, error) {
	if _, err := os.ReadDir(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("CDI directory: %w", err)
	}

	cache, err := cdi.NewCache(cdi.WithSpecDirs(path), cdi.WithAutoRefresh(false))
	if err := errors.Join(err, removeUnfinished(path)); err != nil {
		return nil, fmt.Errorf("CDI directory %s: %w", path, err)
	}

	found := map[string]*cdi.Spec{}
	for _, vendor := range cache.ListVendors() {
		for _, spec := range cache.GetVendorSpecs(vendor) {
			found[filepath.Base(spec.GetPath())] = spec
		}
	}
	return &Dir{path: path, cache: cache, found: found, written: map[string]*specs.Spec{}}, nil
}

// removeUnfinished removes the directories in which [Dir.Write] was writing.
func removeUnfinished(path string) error {
	unfinished, err := filepath.Glob(staging(path, v1alpha1.GroupName+"-*"))
	if err != nil {
		return err
	}

	for _, dir := range unfinished {
		if err := os.RemoveAll(dir); err != nil { // succeeds if it is gone already
			return err
		}
	}

	return nil
}

// staging returns the directory in which a file is written before it is moved to its place.
// Runtimes ignore directories (scanSpecDirs in the library's spec-dirs.go). The library's own
// temporary files have the same name pattern in all programs. After a crash it would be unknown
// which program left such a file.
func staging(path, file string) string { return filepath.Join(path, "."+file+".tmp") }

// Files returns the devices of a kind, "vendor/class", by file name. It returns what the directory
// contained when it was opened.
func (d *Dir) Files(kind string) map[string][]specs.Device {
	vendor, class := parser.ParseQualifier(kind)
	files := map[string][]specs.Device{}
	for file, spec := range d.found {
		if spec.GetVendor() == vendor && spec.GetClass() == class {
			files[file] = spec.Devices
		}
	}
	return files
}

// Has reports whether a file of this name exists.
func (d *Dir) Has(file string) bool {
	_, err := os.Stat(filepath.Join(d.path, file))
	return err == nil
}

// Write creates or replaces a file with these devices. Without devices it removes the file.
//
// The name must begin with the project's API group and a dash, by which [Open] recognizes
// unfinished files. It must have an extension such as ".json", because the library takes everything
// after the last dot for the extension.
func (d *Dir) Write(file, kind string, devices []specs.Device) error {
	if len(devices) == 0 {
		return d.Remove(file)
	}

	d.mutex.Lock()
	defer d.mutex.Unlock()

	spec := &specs.Spec{Kind: kind, Devices: devices}
	var err error
	// The lowest possible version, so that old runtimes can read the file.
	if spec.Version, err = specs.MinimumRequiredVersion(spec); err == nil {
		err = d.place(spec, file)
	}
	if err != nil {
		return fmt.Errorf("CDI file %s: %w", file, err)
	}

	d.written[file] = spec
	return nil
}

// Adopt counts a file that the directory contained when it was opened as written by this Dir. It
// returns false for a file that was not there, or that no runtime can use.
func (d *Dir) Adopt(file string) (adopted bool) {
	d.mutex.Lock()
	defer d.mutex.Unlock()

	if spec := d.found[file]; spec != nil && d.written[file] == nil {
		d.written[file] = spec.Spec
	}
	return d.written[file] != nil
}

// Restore writes the files again that this Dir has written or adopted, that it has not removed, and
// that are missing. It returns their names.
func (d *Dir) Restore() (restored []string, err error) {
	d.mutex.Lock()
	defer d.mutex.Unlock()

	var errs []error
	for _, file := range slices.Sorted(maps.Keys(d.written)) {
		if d.Has(file) {
			continue
		}
		if err := d.place(d.written[file], file); err != nil {
			errs = append(errs, fmt.Errorf("restore CDI file %s: %w", file, err))
			continue
		}
		restored = append(restored, file)
	}

	return restored, errors.Join(errs...)
}

// place writes a file in its staging directory, and then moves it to the directory of the runtime.
func (d *Dir) place(spec *specs.Spec, file string) (err error) {
	dir := staging(d.path, file)
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		return err
	}

	if err := cache.WriteSpec(spec, file); err != nil {
		return err
	}

	return os.Rename(filepath.Join(dir, file), filepath.Join(d.path, file))
}

// Remove deletes a file. It succeeds if there is no such file.
func (d *Dir) Remove(file string) error {
	d.mutex.Lock()
	defer d.mutex.Unlock()

	delete(d.written, file)
	if err := d.cache.RemoveSpec(file); err != nil {
		return fmt.Errorf("CDI file %s: %w", file, err)
	}
	return nil
}
