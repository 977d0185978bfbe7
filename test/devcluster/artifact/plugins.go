package artifact

import (
	"context"
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
	source, err := os.MkdirTemp("", "devcluster-plugins-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(source)
	if err := c.extract(source, "plugins.mod", "plugins.sum"); err != nil {
		return err
	}
	for _, extension := range []string{".mod", ".sum"} {
		if err := os.Rename(filepath.Join(source, "plugins"+extension), filepath.Join(source, "go"+extension)); err != nil {
			return err
		}
	}
	return c.compile(ctx, source, name, "tool", "-ldflags", "-s -w", "-o", target+string(filepath.Separator))
}
