// SPDX-License-Identifier: Apache-2.0

package initramfs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// Modules adds kernel modules with their dependencies, unchanged (compressed). It returns them in
// the order in which to load them. It leaves out modules that are built into the kernel. dir is a
// kernel's directory of modules, after depmod(8).
func (a *Archive) Modules(dir string, names ...string) ([]plan.Module, error) {
	built, err := lines(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}

	dependencies, err := lines(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, err
	}

	// the module's own file, then its dependencies, each before its own dependencies
	files := map[string][]string{}
	for _, line := range dependencies {
		file, needed, _ := strings.Cut(line, ":")
		files[module(file)] = append([]string{file}, strings.Fields(needed)...)
	}

	for _, file := range built {
		files[module(file)] = nil
	}

	var order []plan.Module
	for _, name := range names {
		found, ok := files[module(name)]
		if !ok {
			return nil, fmt.Errorf("kernel module %s: not in %s", name, dir)
		}

		for _, file := range slices.Backward(found) {
			m := plan.Module{File: filepath.Base(file)}
			if slices.Contains(order, m) {
				continue
			}

			content, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil {
				return nil, fmt.Errorf("kernel module %s: %w", name, err)
			}

			a.File(filepath.Join(plan.Modules, m.File), content, 0o644)
			order = append(order, m)
		}
	}

	return order, nil
}

// module returns the name of a module from the name of its file.
func module(file string) string {
	name, _, _ := strings.Cut(filepath.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

func lines(file string) ([]string, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSpace(string(content)), "\n"), nil
}
