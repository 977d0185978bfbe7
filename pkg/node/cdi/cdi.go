// Package cdi writes files of the Container Device Interface, which tell a runtime what a container gets of a device.
package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Dir is a directory that the runtime reads, "/var/run/cdi". Only one goroutine at a time may write a file.
type Dir struct {
	path  string
	cache *cdi.Cache
}

// Open opens the directory, which need not exist. It removes the unfinished files of an agent that was killed.
func Open(path string) (*Dir, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(path), cdi.WithAutoRefresh(false))
	if err := errors.Join(err, removeUnfinished(path)); err != nil {
		return nil, fmt.Errorf("CDI directory %s: %w", path, err)
	}
	return &Dir{path: path, cache: cache}, nil
}

// removeUnfinished removes the library's temporary files that have a kind of this project. Other programs use the same
// names in the same directory.
func removeUnfinished(path string) error {
	files, err := filepath.Glob(filepath.Join(path, "spec.*.tmp"))
	if err != nil {
		return err
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(content, []byte(v1alpha1.GroupName+"/")) {
			continue
		}
		if err := os.RemoveAll(file); err != nil { // no error if it is gone already
			return err
		}
	}
	return nil
}

// Files returns the devices of a kind, "vendor/class", by file name, as of the opening of the directory.
func (d *Dir) Files(kind string) map[string][]specs.Device {
	vendor, class := parser.ParseQualifier(kind)
	files := map[string][]specs.Device{}
	for _, spec := range d.cache.GetVendorSpecs(vendor) {
		if spec.GetClass() == class {
			files[filepath.Base(spec.GetPath())] = spec.Devices
		}
	}
	return files
}

// Has says whether there is a file of this name.
func (d *Dir) Has(file string) bool {
	_, err := os.Stat(filepath.Join(d.path, file))
	return err == nil
}

// Write replaces a file by one with these devices. Without devices it removes the file. The name must have an ending such
// as ".json": the library takes what follows the last dot for one.
func (d *Dir) Write(file, kind string, devices []specs.Device) error {
	if len(devices) == 0 {
		return d.Remove(file)
	}
	spec := &specs.Spec{Kind: kind, Devices: devices}
	var err error
	if spec.Version, err = specs.MinimumRequiredVersion(spec); err == nil { // the oldest, for old runtimes
		err = d.cache.WriteSpec(spec, file)
	}
	if err != nil {
		return fmt.Errorf("CDI file %s: %w", file, err)
	}
	return nil
}

// Remove deletes a file, if there is one.
func (d *Dir) Remove(file string) error {
	if err := d.cache.RemoveSpec(file); err != nil {
		return fmt.Errorf("CDI file %s: %w", file, err)
	}
	return nil
}
