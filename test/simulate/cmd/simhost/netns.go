// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	vnetns "github.com/vishvananda/netns"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// xpuNS is the xPU's network namespace.
type xpuNS struct {
	path  string
	close func() error
}

// openXPU returns the namespace at the path. If nothing is there, it creates a namespace and binds
// it to the path. If path is "", it creates a namespace without a file. close removes what was
// created.
func openXPU(path string) (xpuNS, error) {
	if path == "" {
		return newUnnamedNamespace()
	}

	ns, err := vnetns.GetFromPath(path)
	if err == nil {
		return xpuNS{path, func() error { return nil }}, ns.Close()
	}
	if !errors.Is(err, os.ErrNotExist) {
		return xpuNS{}, fmt.Errorf("%s: %w", path, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return xpuNS{}, err
	}

	made, err := netns.Make(path)
	if err != nil {
		return xpuNS{}, err
	}

	return xpuNS{path, made.Close}, nil
}

// newUnnamedNamespace creates a namespace that ends with this process.
func newUnnamedNamespace() (_ xpuNS, err error) {
	dir, err := os.MkdirTemp("", "simhost")
	if err != nil {
		return xpuNS{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	made, err := netns.Make(filepath.Join(dir, "xpu"))
	if err != nil {
		return xpuNS{}, err
	}
	if err := made.Unmount(); err != nil {
		return xpuNS{}, errors.Join(err, made.Close())
	}

	return xpuNS{fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), made.Fd()), made.Close}, nil
}
