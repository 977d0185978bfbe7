// SPDX-License-Identifier: Apache-2.0

package artifact

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/apt"
)

// containerdSuite is the Debian release whose containerd (1.7.24) is used on older releases,
// because containerd 1.6 has neither NRI nor CDI. Its binary needs glibc 2.34, which Debian 12 and
// later have.
const containerdSuite = "trixie"

// olderDebian lists older Debian releases on which containerdSuite is used.
var olderDebian = [...]string{"bookworm"}

// runtimeFiles must exist and run after a runtime was unpacked.
var runtimeFiles = [...]string{
	"usr/bin/containerd", "usr/bin/containerd-shim-runc-v2", "usr/bin/ctr", "usr/sbin/runc",
}

func (c Cache) runtime(goVersion string) (artifact, error) {
	codename, err := osRelease("/etc/os-release", "VERSION_CODENAME")
	if err != nil {
		return artifact{}, err
	}

	packages := []string{"containerd", "runc", "containernetworking-plugins"}
	suites := []string{codename}
	if slices.Contains(olderDebian[:], codename) {
		suites = append(suites, containerdSuite)
		packages[0] += "/" + containerdSuite
		packages[1] += "/" + codename
		packages[2] += "/" + codename
	}

	debian := artifact{
		name:   "container runtime (" + strings.Join(packages, ", ") + ")",
		dir:    "runtime",
		inputs: slices.Concat(suites, packages),
		make: func(ctx context.Context, target string) error {
			if err := c.unpack(ctx, target, codename, suites, packages); err != nil {
				return err
			}
			return c.checkRuntime(ctx, target, runtimeFiles[:])
		},
	}

	switch c.Runtime {
	case "":
		return debian, nil
	case "containerd-2":
		return c.containerd(debian, goVersion)
	case "cri-o":
		return c.crio(debian, goVersion, codename)
	}

	return artifact{}, fmt.Errorf("container runtime %s cannot be built: want containerd-2 or "+
		"cri-o, or none for Debian's containerd 1.7", c.Runtime)
}

// containerd replaces the containerd of another runtime by the one of containerd.mod.
func (c Cache) containerd(other artifact, goVersion string) (artifact, error) {
	build := func(ctx context.Context, name, version, target string) error {
		flags := fmt.Sprintf("-s -w -X %s/version.Version=%s", containerdModule, version)
		if err := c.buildTools(ctx, name, "containerd", flags,
			filepath.Join(target, "usr/bin")); err != nil {
			return err
		}
		return c.checkRuntime(ctx, target, runtimeFiles[:])
	}
	return c.onTopOf(other, "containerd", containerdModule, build, goVersion)
}

// onTopOf extends another runtime by what build makes of the tools in the module file FILE.mod. The
// version is the version of module there; name is for people.
func (c Cache) onTopOf(
	other artifact, file, module string,
	build func(ctx context.Context, name, version, target string) error, more ...string,
) (artifact, error) {
	inputs, err := c.inputs(file+".mod", file+".sum")
	if err != nil {
		return artifact{}, err
	}

	version, err := moduleVersion(inputs[1], module)
	if err != nil {
		return artifact{}, err
	}

	name := fmt.Sprintf("container runtime (%s %s)", file, version)
	return artifact{
		name:   name,
		dir:    other.dir,
		inputs: slices.Concat(other.inputs, inputs, more),
		make: func(ctx context.Context, target string) error {
			if err := other.make(ctx, target); err != nil {
				return err
			}
			return build(ctx, name, version, target)
		},
	}, nil
}

const containerdModule = "github.com/containerd/containerd/v2"

// unpack downloads Debian packages and unpacks them into target.
func (c Cache) unpack(
	ctx context.Context, target, codename string, suites, packages []string,
) error {
	own, err := apt.MachineSource("/etc/apt", codename)
	if err != nil {
		return err
	}

	var sources []apt.Source
	for _, suite := range suites {
		sources = append(sources, own.In(suite))
	}

	state, err := os.MkdirTemp("", "devcluster-apt-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(state)

	fmt.Fprintf(c.Log, "container runtime: downloading %s\n", strings.Join(packages, ", "))
	return (apt.Archive{Dir: state, Sources: sources}).Unpack(ctx, target, packages...)
}

// checkRuntime runs the unpacked programs, so that a missing shared library is reported by name
// now, not as a pod that does not start.
func (c Cache) checkRuntime(ctx context.Context, root string, files []string) error {
	for _, name := range files {
		flag := "--version"
		if strings.Contains(name, "shim") {
			flag = "-v"
		}

		output, err := exec.CommandContext(ctx, filepath.Join(root, name), flag).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s does not run on this machine: %w: %s", name, err,
				strings.TrimSpace(string(output)))
		}

		first, _, _ := strings.Cut(string(output), "\n")
		fmt.Fprintf(c.Log, "container runtime: %s\n", first)
	}
	return nil
}

// osRelease returns a field of an os-release(5) file.
func osRelease(file, field string) (string, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}

	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), field+"="); ok {
			return strings.Trim(value, `"'`), nil
		}
	}

	return "", fmt.Errorf("%s: no %s", file, field)
}
