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
	"regexp"
	"strings"
)

// patchRelease matches a patch release of Kubernetes, and its minor release.
var patchRelease = regexp.MustCompile(`^(1\.[0-9]+)\.[0-9]+$`)

// A kubernetesModule is the module of which the programs of Kubernetes are built.
type kubernetesModule struct {
	mod, sum string // names of its files in the sources
	goMod    string // content of its go.mod
	// incomplete says that the sums of some modules are missing, because the release is not the one
	// of the sources.
	incomplete bool
}

// kubernetesModule returns the module of the version that the cluster is to have. Patch releases
// that have no module in the sources are built of the module of their minor release, with the
// versions of Kubernetes' own modules replaced. The Go command verifies them by the checksum
// database.
func (c Cache) kubernetesModule() (kubernetesModule, error) {
	if c.Kubernetes == "" {
		return c.readModule("go")
	}
	if m, err := c.readModule(path.Join("kubernetes", c.Kubernetes)); !errors.Is(err, fs.ErrNotExist) {
		return m, err
	}

	if match := patchRelease.FindStringSubmatch(c.Kubernetes); match != nil {
		for _, name := range []string{path.Join("kubernetes", match[1]), "go"} {
			m, err := c.readModule(name)
			if err != nil {
				continue // there is no such module
			}
			if is, err := m.of(c.Kubernetes); is || err != nil {
				return m, err
			}
		}
	}

	return kubernetesModule{}, fmt.Errorf("Kubernetes %s cannot be built: want one of %s, a patch "+
		"release of these or of go.mod's, or none for that of go.mod", c.Kubernetes,
		strings.Join(c.KubernetesVersions(), ", "))
}

func (c Cache) readModule(name string) (kubernetesModule, error) {
	goMod, err := fs.ReadFile(c.Sources, name+".mod")
	return kubernetesModule{mod: name + ".mod", sum: name + ".sum", goMod: string(goMod)}, err
}

// of changes the module to a patch release. It reports false if the module is of another minor
// release.
func (m *kubernetesModule) of(release string) (bool, error) {
	have, err := moduleVersion(m.goMod, "k8s.io/kubernetes")
	if err != nil {
		return false, err
	}
	match := patchRelease.FindStringSubmatch(strings.TrimPrefix(have, "v"))
	if match == nil || !strings.HasPrefix(release, match[1]+".") {
		return false, nil
	}

	m.incomplete = have != "v"+release
	lines := strings.SplitAfter(m.goMod, "\n")
	for i, line := range lines {
		if strings.Contains(line, "k8s.io/") {
			lines[i] = replaceVersion(replaceVersion(line, have, "v"+release),
				strings.Replace(have, "v1.", "v0.", 1), "v0."+strings.TrimPrefix(release, "1."))
		}
	}
	m.goMod = strings.Join(lines, "")

	return true, nil
}

// replaceVersion replaces a version at the end of a field: v1.34.5 is not a part of v1.34.50.
func replaceVersion(line, version, with string) string {
	return regexp.MustCompile(regexp.QuoteMeta(version)+`(\s|$)`).ReplaceAllString(line, with+"$1")
}

// complete writes the module into a directory with its files, and adds the sums that are missing.
func (c Cache) complete(ctx context.Context, dir string, m kubernetesModule) error {
	if !m.incomplete {
		return nil
	}
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte(m.goMod), 0o644); err != nil {
		return err
	}
	list := c.goCommand(ctx, dir, "list", "-mod=mod", "-deps", "./cmd/kubernetes")
	if output, err := list.CombinedOutput(); err != nil {
		return fmt.Errorf("go list: %w\n%s", err, lastLines(output))
	}
	return nil
}
