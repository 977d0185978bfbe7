package artifact

import (
	"context"
	"errors"
	"os"
	"path/filepath"
)

// plugins are the CNI plugins that are built from Go modules: Multus, which Debian does not have, and IPAM plugins of a
// newer CNI version than Debian's.
func (c Cache) plugins(goVersion string) (artifact, error) {
	inputs, err := c.inputs("plugins.mod", "plugins.sum")
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
		make:   func(ctx context.Context, target string) error { return c.makePlugins(ctx, name, target) },
	}, nil
}

const multusModule = "gopkg.in/k8snetworkplumbingwg/multus-cni.v4"

// makePlugins builds every tool of the module, each into a file of its own in target.
func (c Cache) makePlugins(ctx context.Context, name, target string) error {
	return c.buildTools(ctx, name, "plugins", "-s -w", target)
}

// buildTools builds every tool of a module whose files are MODULE.mod and MODULE.sum.
func (c Cache) buildTools(ctx context.Context, name, module, ldflags, target string) error {
	source, err := os.MkdirTemp("", "devcluster-tools-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(source)
	if err := c.extractModule(source, module+".mod", module+".sum"); err != nil {
		return err
	}
	return c.compile(ctx, source, name, "tool", "-ldflags", ldflags, "-o", target+string(filepath.Separator))
}

// extractModule copies the files of a module into dir, under the names that the go command looks for.
func (c Cache) extractModule(dir, mod, sum string) error {
	if err := c.extract(dir, mod, sum); err != nil || mod == "go.mod" {
		return err
	}
	return errors.Join(os.Rename(filepath.Join(dir, mod), filepath.Join(dir, "go.mod")), os.Rename(filepath.Join(dir, sum), filepath.Join(dir, "go.sum")))
}
