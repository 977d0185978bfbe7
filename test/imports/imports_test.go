// SPDX-License-Identifier: Apache-2.0

// Package imports keeps the direction of the imports: what a program must not link, and which stage
// of a Function's life knows which.
package imports

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/opiproject/xpu-device-plugin/"

// forbidden are what packages must not link, not even by way of others. A name that ends in "/..."
// is for all below it.
var forbidden = []struct {
	packages string
	not      []string
	why      string
}{
	{
		"cmd/xpu-controller",
		[]string{netlink, netns, module + "pkg/kernel/...", module + "pkg/node/..."},
		"it runs without privileges, and has no machine to look at",
	},
	{
		"cmd/xpu-cni",
		[]string{netlink, "google.golang.org/grpc/...", "k8s.io/client-go/...", module +
			"pkg/node/...", module + "pkg/opi/..."},
		"it is a shim: a runtime starts it for every pod",
	},
	{"pkg/function/...", []string{"k8s.io/...", netlink, netns, module + "api/..."},
		"it is the leaf that all others stand on"},
	{"pkg/kernel/...",
		[]string{module + "api/...", module + "pkg/node/...", "k8s.io/client-go/..."},
		"the kernel knows no cluster"},
	{"pkg/kernel/devlink", []string{module + "pkg/kernel/netdev"},
		"a card's ports are not a pod's netdev"},
	{
		"pkg/opi/...",
		[]string{module + "api/v1alpha1", module + "pkg/node/...", module + "pkg/controller/..."},
		"it speaks with OPI agents for whoever asks",
	},
	{
		"pkg/bridge/...",
		[]string{module + "api/v1alpha1", module + "pkg/node/...", module + "pkg/controller/..."},
		"it runs on the xPU",
	},
	{
		"pkg/conformance/...",
		[]string{netlink, netns, "k8s.io/client-go/...", module + "pkg/opi/...",
			module + "pkg/bridge/...", module + "pkg/node/...", module + "pkg/controller/..."},
		"it tests the contract of agents, not what our client forgives them, on any machine",
	},
	{"pkg/bridge/access", []string{netlink, netns}, "it knows clients and rules only"},
	{"pkg/controller/...", []string{module + "pkg/bridge/..."},
		"an OPI agent is reached by gRPC only"},
}

const (
	netlink = "github.com/vishvananda/netlink/..."
	netns   = "github.com/vishvananda/netns/..."
)

// stages are the packages of pkg/node in the order of a Function's life, and last the agent that
// puts them together. Each may import those before it.
var stages = []string{
	"inventory", "inventory/witness", "card", "podresources", // discover
	"pool", "pool/sriovdp", "pool/source",
	"journal",
	"sriov", "health",
	"lifecycle", "setup",
	"upgrade",
	"keep", "devnode", "deviceinfo", "cdi", "deviceplugin", "devicemodel", "dra", // publish and allocate
	"provisioning",
	"nri", "cniserver", // attach
	"traffic",
	"hooks", // after release
	"kubeapi", "admin",
	"agent",
}

// bridgeStages are the packages of pkg/bridge. Each may import those before it.
var bridgeStages = []string{
	"sourcefilter", "representor", "plane", "inventory", "refusal", "access", "service",
}

// controllerStages are the packages of pkg/controller. Each may import those before it, and
// pkg/controller itself puts them together.
var controllerStages = []string{
	"model", "reconciling", "addresses", "sessions", "networks", "nodes", "pools", "xpus", "ports",
	"gangs", "claims", "webhook",
}

// pkg is a package as go list tells it.
type pkg struct {
	ImportPath    string
	Imports, Deps []string
}

// list returns the packages that the patterns mean, as they are built for an operating system; ""
// is this one.
func list(t *testing.T, goos string, patterns ...string) map[string]pkg {
	t.Helper()
	// What go list reads is not known to the cache of test results. What the test itself looks at
	// is.
	err := filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") {
			_, err = os.Stat(path)
		}
		return err
	})

	if err != nil {
		t.Fatal(err)
	}

	command := exec.CommandContext(t.Context(), "go",
		append([]string{"list", "-json=ImportPath,Imports,Deps"}, patterns...)...)
	if goos != "" {
		command.Env = append(os.Environ(), "GOOS="+goos)
	}

	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}

	found := map[string]pkg{}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return found
		} else if err != nil {
			t.Fatal(err)
		}
		found[p.ImportPath] = p
	}
}

// matches says whether a pattern of go list means the package.
func matches(pattern, path string) bool {
	above, all := strings.CutSuffix(pattern, "/...")
	return path == above || all && strings.HasPrefix(path, above+"/")
}

func TestForbidden(t *testing.T) {
	all := list(t, "", module+"...")
	for _, rule := range forbidden {
		none := true
		for path, p := range all {
			if !matches(module+rule.packages, path) {
				continue
			}

			none = false
			for _, dep := range p.Deps {
				if slices.ContainsFunc(rule.not, func(not string) bool {
					return matches(not, dep)
				}) {
					t.Errorf("%s links %s, and must not: %s", path, dep, rule.why)
				}
			}
		}

		if none {
			t.Errorf("there is no package %s, of which the table says what it may not import",
				rule.packages)
		}
	}
}

// TestAnyMachine: xpuctl is for any person's machine, so that what only Linux has is built for
// Linux only.
func TestAnyMachine(t *testing.T) {
	for _, goos := range []string{"darwin", "windows"} {
		for path, p := range list(t, goos, module+"cmd/xpuctl") {
			for _, dep := range p.Deps {
				for _, not := range []string{
					netlink, netns, module + "pkg/kernel/...", module + "pkg/node/inventory",
				} {
					if matches(not, dep) {
						t.Errorf("%s links %s for %s", path, dep, goos)
					}
				}
			}
		}
	}
}

func TestStages(t *testing.T) {
	all := list(t, "", module+"...")
	checkStages(t, all, "pkg/node/", stages)
	checkStages(t, all, "pkg/bridge/", bridgeStages)
	checkStages(t, all, "pkg/controller/", controllerStages)
}

// checkStages checks that no package in a directory imports a later stage.
func checkStages(t *testing.T, all map[string]pkg, dir string, stages []string) {
	t.Helper()
	for path, p := range all {
		name, isStage := strings.CutPrefix(path, module+dir)
		if !isStage || strings.HasSuffix(name, "test") {
			continue
		}

		place := slices.Index(stages, name)
		if place < 0 {
			t.Errorf("the table of stages lacks %s%s", dir, name)
		}

		for _, imported := range p.Imports {
			other, isStage := strings.CutPrefix(imported, module+dir)
			if isStage && slices.Index(stages, other) >= place {
				t.Errorf("%[1]s%[2]s imports %[1]s%[3]s, a later stage", dir, name, other)
			}
		}
	}
}
