// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
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
	// resolves reports whether there is a version. It returns an error if the proxy said neither.
	resolves func(ctx context.Context, module, version string) (bool, error)
}

// goProxy asks the Go command in a directory of a module.
func goProxy(dir string) proxy {
	command := func(ctx context.Context, args ...string) ([]byte, error) {
		list := exec.CommandContext(ctx, "go", append([]string{"list", "-m"}, args...)...)
		list.Dir = dir
		var stderr bytes.Buffer
		list.Stderr = &stderr
		output, err := list.Output()
		if err != nil {
			err = fmt.Errorf("go list: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
		}
		return output, err
	}
	return proxy{
		list: func(ctx context.Context, module string) ([]string, error) {
			output, err := command(ctx, "-versions", module)
			if err != nil {
				return nil, fmt.Errorf("versions of %s: %w", module, err)
			}
			return strings.Fields(string(output)), nil
		},
		resolves: func(ctx context.Context, module, version string) (bool, error) {
			_, err := command(ctx, module+"@"+version)
			if err != nil && saysThereIsNone(err.Error()) {
				return false, nil
			}
			return err == nil, err
		},
	}
}

// saysThereIsNone reports whether the Go command failed because a proxy or a repository answered that
// there is no such version. The statuses are those of the GOPROXY protocol, "go help goproxy". Proxies
// that let only some versions through say that a version is not available.
func saysThereIsNone(stderr string) bool {
	return slices.ContainsFunc([]string{
		": 404 Not Found", ": 410 Gone", "unknown revision", "version is not available",
	}, func(answer string) bool { return strings.Contains(stderr, answer) })
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
		first, last, err := p.ends(ctx, minor, patches[minor])
		if err != nil {
			return nil, err
		}
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
func (p proxy) ends(ctx context.Context, minor, listed int) (first, last int, err error) {
	first, last = -1, -1
	for patch, missed := 0, 0; missed < misses || patch <= listed; patch++ {
		if first >= 0 && patch < listed {
			continue // between the ends
		}
		version := fmt.Sprintf("v1.%d.%d", minor, patch)
		exists, err := p.resolves(ctx, kubernetesModule, version)
		if err != nil {
			return 0, 0, fmt.Errorf("whether there is Kubernetes %s: %w", version, err)
		}
		if !exists {
			missed++
			continue
		}
		missed, last = 0, patch
		if first < 0 {
			first = patch
		}
	}
	return first, last, nil
}
