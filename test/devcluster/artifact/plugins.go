// SPDX-License-Identifier: Apache-2.0

package artifact

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// plugins are the CNI plugins that are built from Go modules: Multus, which Debian lacks, and IPAM
// plugins for a newer CNI version than Debian's.
func (c Cache) plugins(goVersion string) (artifact, error) {
	module := "plugins"
	if c.Multus != "" {
		module = path.Join("multus", c.Multus)
	}

	inputs, err := c.inputs(module+".mod", module+".sum")
	if errors.Is(err, fs.ErrNotExist) {
		return artifact{}, fmt.Errorf("Multus %s cannot be built: want one of %s, or none for "+
			"that of plugins.mod", c.Multus, strings.Join(c.MultusVersions(), ", "))
	}
	if err != nil {
		return artifact{}, err
	}

	version, err := moduleVersion(inputs[1], multusModule)
	if err != nil {
		return artifact{}, err
	}

	name := "CNI plugins (Multus " + version + ")"
	return artifact{
		name:   name,
		dir:    "plugins",
		inputs: append(inputs, goVersion),
		make: func(ctx context.Context, target string) error {
			return c.buildTools(ctx, name, module, "-s -w", target)
		},
	}, nil
}

const multusModule = "gopkg.in/k8snetworkplumbingwg/multus-cni.v4"

// MultusVersions returns the older versions of Multus, such as "4.2".
func (c Cache) MultusVersions() []string { return c.versionsIn("multus") }

// buildTools builds every tool of the module with the files MODULE.mod and MODULE.sum, each into a
// separate file in target.
func (c Cache) buildTools(ctx context.Context, name, module, ldflags, target string) error {
	return c.inModule(module, func(source string) error {
		return c.compile(ctx, source, name, "tool", "-ldflags", ldflags,
			"-o", target+string(filepath.Separator))
	})
}

// inModule calls work with a directory that contains the module with the files MODULE.mod and
// MODULE.sum.
func (c Cache) inModule(module string, work func(source string) error) error {
	source, err := os.MkdirTemp("", "devcluster-module-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(source)

	if err := c.extractModule(source, module+".mod", module+".sum"); err != nil {
		return err
	}
	return work(source)
}

// extractModule copies the files of a module into dir, under the names that the go command expects.
func (c Cache) extractModule(dir, mod, sum string) error {
	if err := c.extract(dir, mod, sum); err != nil || mod == "go.mod" {
		return err
	}
	return errors.Join(os.Rename(filepath.Join(dir, mod), filepath.Join(dir, "go.mod")),
		os.Rename(filepath.Join(dir, sum), filepath.Join(dir, "go.sum")))
}
