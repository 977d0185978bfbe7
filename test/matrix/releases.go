// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
)

// kubernetesModule is the module of Kubernetes' programs.
const kubernetesModule = "k8s.io/kubernetes"

// misses is how many patch releases in a row must not resolve until none after them is asked for. The
// module proxy lists some releases only, and resolves others.
const misses = 3

// stable matches a release of Kubernetes 1 that is no pre-release.
var stable = regexp.MustCompile(`^v1\.([0-9]+)\.([0-9]+)$`)

// A proxy knows which versions of a module there are.
type proxy struct {
	// list returns versions, and need not return all.
	list func(ctx context.Context, module string) ([]string, error)
	// resolves reports whether there is a version.
	resolves func(ctx context.Context, module, version string) bool
}

// goProxy asks the Go command in a directory of a module.
func goProxy(dir string) proxy {
	command := func(ctx context.Context, args ...string) ([]byte, error) {
		list := exec.CommandContext(ctx, "go", append([]string{"list", "-m"}, args...)...)
		list.Dir = dir
		return list.Output()
	}
	return proxy{
		list: func(ctx context.Context, module string) ([]string, error) {
			output, err := command(ctx, "-versions", module)
			if err != nil {
				return nil, fmt.Errorf("versions of %s: %w", module, err)
			}
			return strings.Fields(string(output)), nil
		},
		resolves: func(ctx context.Context, module, version string) bool {
			_, err := command(ctx, module+"@"+version)
			return err == nil
		},
	}
}

// releases returns the oldest and the newest patch release of each minor release of Kubernetes that
// resolve, from the oldest supported minor release on, in ascending order: "1.34.0". Pre-releases
// are no releases.
func (p proxy) releases(ctx context.Context) ([]string, error) {
	listed, err := p.list(ctx, kubernetesModule)
	if err != nil {
		return nil, err
	}

	oldest, err := strconv.Atoi(strings.TrimPrefix(schedule.OldestKubernetes, "1."))
	if err != nil {
		return nil, err
	}
	patches := map[int]int{} // the newest that is listed, by minor release
	newest := oldest
	for _, v := range listed {
		if match := stable.FindStringSubmatch(v); match != nil {
			minor, _ := strconv.Atoi(match[1])
			patch, _ := strconv.Atoi(match[2])
			patches[minor], newest = max(patches[minor], patch), max(newest, minor)
		}
	}

	var all []string
	for minor := oldest; ; minor++ {
		first, last := p.ends(ctx, minor, patches[minor])
		if last < 0 && minor > newest {
			return all, nil
		}
		if last >= 0 {
			all = append(all, fmt.Sprintf("1.%d.%d", minor, first), fmt.Sprintf("1.%d.%d", minor, last))
		}
		all = slices.Compact(all)
	}
}

// ends returns the oldest and the newest patch release of a minor release that resolve, or -1.
// listed is one that may resolve, or 0.
func (p proxy) ends(ctx context.Context, minor, listed int) (first, last int) {
	first, last = -1, -1
	for patch, missed := 0, 0; missed < misses || patch <= listed; patch++ {
		if first >= 0 && patch < listed {
			continue // between the ends
		}
		if !p.resolves(ctx, kubernetesModule, fmt.Sprintf("v1.%d.%d", minor, patch)) {
			missed++
			continue
		}
		missed, last = 0, patch
		if first < 0 {
			first = patch
		}
	}
	return first, last
}
