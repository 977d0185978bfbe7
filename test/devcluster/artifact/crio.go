// SPDX-License-Identifier: Apache-2.0

package artifact

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

const crioModule = "github.com/cri-o/cri-o"

// crioTags omit features that need C libraries which a machine may lack.
const crioTags = "containers_image_openpgp exclude_graphdriver_btrfs " +
	"exclude_graphdriver_devicemapper"

// crioFiles must exist and run after a successful build of CRI-O.
var crioFiles = [...]string{"usr/bin/crio", "usr/bin/skopeo", "usr/bin/conmon", "usr/sbin/runc"}

// crio adds the programs of crio.mod to another runtime: CRI-O, and skopeo, which loads images into
// its storage. conmon, which supervises a container, is Debian's. pinns, which pins a pod's
// namespaces, is compiled from the C source in CRI-O's module.
func (c Cache) crio(other artifact, goVersion, codename string) (artifact, error) {
	restrict, err := c.inputs("cmd/restrict/main.go")
	if err != nil {
		return artifact{}, err
	}

	build := func(ctx context.Context, name, _, target string) error {
		if err := c.unpack(ctx, target, codename, []string{codename},
			[]string{"conmon"}); err != nil {
			return err
		}
		if err := c.buildCRIO(ctx, name, filepath.Join(target, "usr/bin")); err != nil {
			return err
		}
		if err := c.buildCommand(ctx, "restrict",
			filepath.Join(target, "usr/bin/restrict")); err != nil {
			return err
		}

		return c.checkRuntime(ctx, target, crioFiles[:])
	}

	return c.onTopOf(other, "crio", crioModule, build, append(restrict, goVersion, crioTags)...)
}

// buildCRIO builds the tools of crio.mod, and pinns.
func (c Cache) buildCRIO(ctx context.Context, name, target string) error {
	return c.inModule("crio", func(source string) error {
		if err := c.compile(ctx, source, name, "tool", "-tags", crioTags, "-ldflags", "-s -w",
			"-o", target+string(filepath.Separator)); err != nil {
			return err
		}

		module, err := c.goCommand(ctx, source, "list", "-m", "-f", "{{.Dir}}", crioModule).Output()
		if err != nil {
			return fmt.Errorf("go list -m %s: %w", crioModule, err)
		}
		return buildPinns(ctx, strings.TrimSpace(string(module)), filepath.Join(target, "pinns"))
	})
}

func buildPinns(ctx context.Context, module, binary string) error {
	files, err := filepath.Glob(filepath.Join(module, "pinns/src/*.c"))
	if err != nil {
		return err
	}

	args := slices.Concat([]string{"-std=c99", "-Os", "-o", binary}, files)
	output, err := exec.CommandContext(ctx, cmp.Or(os.Getenv("CC"), "gcc"),
		args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("compile pinns: %w: %s", err, lastLines(output))
	}

	return nil
}
