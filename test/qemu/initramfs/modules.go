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

// Modules adds kernel modules, and those that they need, as they are (compressed). It returns them
// in the order to load them. What is built into the kernel is left out. dir is a kernel's directory
// of modules, after depmod(8).
func (a *Archive) Modules(dir string, names ...string) ([]plan.Module, error) {
	built, err := lines(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}

	dependencies, err := lines(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, err
	}

	// the module's own, then those that it needs, each before what that needs itself
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

// module is the name of a module, from that of its file.
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
