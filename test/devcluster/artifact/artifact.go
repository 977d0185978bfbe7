// SPDX-License-Identifier: Apache-2.0

// Package artifact builds the programs of a development cluster and caches them: the Kubernetes
// binary, the container runtime, the CNI plugins and the pause image. Every artifact is a directory
// named after a hash of its inputs, so an existing directory is always complete and correct.
package artifact

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// PauseImage is the image of pod sandboxes, and a small workload for tests (see cmd/pause).
const PauseImage = "devcluster.local/pause:1"

// components are the names under which the Kubernetes binary can be called.
var components = [...]string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler",
	"kubelet", "kube-proxy", "kubectl"}

// Set lists the paths of the artifacts. All paths are absolute.
type Set struct {
	KubernetesVersion string // for example v1.37.1
	Kubernetes        string // directory with one file per component
	// root of unpacked packages: usr/bin/containerd or usr/bin/crio, usr/sbin/runc, usr/lib/cni,
	// ...
	Runtime    string
	CRIO       bool   // whether the runtime is CRI-O
	Plugins    string // directory of CNI plugins that take precedence over Runtime's
	PauseImage string // image file
}

// Versions returns the versions of Kubernetes and of the container runtime, as the runtime itself says
// it: "Kubernetes v1.37.1, containerd 1.7.24~ds1". Names are those of a Node's status.
func (s Set) Versions(ctx context.Context) (string, error) {
	name, program := "containerd", "containerd"
	if s.CRIO {
		name, program = "cri-o", "crio"
	}

	output, err := exec.CommandContext(ctx, filepath.Join(s.Runtime, "usr/bin", program),
		"--version").Output()
	if err != nil {
		return "", fmt.Errorf("version of %s: %w", name, err)
	}
	// "containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6", "crio version 1.34.0"
	fields := strings.Fields(string(output))
	if len(fields) < 3 {
		return "", fmt.Errorf("version of %s: it says %q", name, output)
	}

	return fmt.Sprintf("Kubernetes %s, %s %s", s.KubernetesVersion, name, fields[2]), nil
}

// Cache builds artifacts below Dir.
type Cache struct {
	Dir     string // absolute
	Sources fs.FS  // of package devcluster
	Log     io.Writer

	// Kubernetes is an older version than go.mod's, such as "1.36"; one of
	// [Cache.KubernetesVersions].
	Kubernetes string
	// Runtime is "containerd-2" or "cri-o", built from Go modules, instead of Debian's containerd
	// 1.7.
	Runtime string
	// Multus is an older version than plugins.mod's, such as "4.2"; one of [Cache.MultusVersions].
	Multus string
}

// ErrMissing is returned if artifacts have not been built.
var ErrMissing = errors.New("not built yet: run devcluster build")

// artifact is a directory in the cache.
type artifact struct {
	name   string   // for people
	dir    string   // in the cache, without the hash
	inputs []string // everything the content depends on
	make   func(ctx context.Context, target string) error
}

// Find returns the artifacts if all are built, and otherwise an error that wraps ErrMissing. It
// takes milliseconds.
func (c Cache) Find(ctx context.Context) (Set, error) {
	set, artifacts, err := c.plan(ctx)
	if err != nil {
		return Set{}, err
	}

	for _, a := range artifacts {
		if !exists(c.path(a)) {
			return Set{}, fmt.Errorf("%s: %w", a.name, ErrMissing)
		}
	}

	return set, nil
}

// Build builds missing artifacts and returns all. Concurrent builds wait for each other.
func (c Cache) Build(ctx context.Context) (Set, error) {
	set, artifacts, err := c.plan(ctx)
	if err != nil {
		return Set{}, err
	}

	for _, a := range artifacts {
		if err := c.build(ctx, a); err != nil {
			return Set{}, fmt.Errorf("%s: %w", a.name, err)
		}
	}

	return set, nil
}

func (c Cache) plan(ctx context.Context) (Set, []artifact, error) {
	goVersion, err := c.goVersion(ctx)
	if err != nil {
		return Set{}, nil, err
	}

	kubernetes, version, err := c.kubernetes(goVersion)
	if err != nil {
		return Set{}, nil, err
	}

	runtime, err := c.runtime(goVersion)
	if err != nil {
		return Set{}, nil, err
	}

	plugins, err := c.plugins(goVersion)
	if err != nil {
		return Set{}, nil, err
	}

	pause, err := c.pause(goVersion)
	if err != nil {
		return Set{}, nil, err
	}

	set := Set{
		KubernetesVersion: version,
		Kubernetes:        c.path(kubernetes),
		Runtime:           c.path(runtime),
		CRIO:              c.Runtime == "cri-o",
		Plugins:           c.path(plugins),
		PauseImage:        filepath.Join(c.path(pause), "pause.tar"),
	}

	return set, []artifact{kubernetes, runtime, plugins, pause}, nil
}

func (c Cache) path(a artifact) string {
	hash := sha256.New()
	for _, input := range a.inputs {
		fmt.Fprintf(hash, "%d:%s", len(input), input)
	}
	return filepath.Join(c.Dir, a.dir, hex.EncodeToString(hash.Sum(nil))[:16])
}

// build builds an artifact in a temporary directory and renames it into place, so that a directory
// with the final name is always complete.
func (c Cache) build(ctx context.Context, a artifact) error {
	target := c.path(a)
	if exists(target) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}

	unlock, err := lock(filepath.Join(c.Dir, a.dir, "lock"))
	if err != nil {
		return err
	}
	defer unlock()

	if exists(target) {
		return nil
	}

	start := time.Now()
	temporary := target + ".part"
	if err := errors.Join(os.RemoveAll(temporary), os.Mkdir(temporary, 0o755)); err != nil {
		return err
	}
	defer os.RemoveAll(temporary)

	if err := a.make(ctx, temporary); err != nil {
		return err
	}
	if err := os.Rename(temporary, target); err != nil {
		return err
	}

	fmt.Fprintf(c.Log, "%s: built in %s\n", a.name, time.Since(start).Round(100*time.Millisecond))
	return nil
}

// Link creates a symbolic link for each component in dir, which other programs can use as a
// directory of binaries (envtest: KUBEBUILDER_ASSETS).
func (s Set) Link(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}

	for _, name := range components {
		// Renaming makes concurrent calls safe.
		next := filepath.Join(dir, fmt.Sprintf(".%s-%d", name, os.Getpid()))
		if err := os.Symlink(filepath.Join(s.Kubernetes, name), next); err != nil {
			return err
		}
		if err := os.Rename(next, filepath.Join(dir, name)); err != nil {
			return errors.Join(err, os.Remove(next))
		}
	}

	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// lock waits for an exclusive lock that ends with the process.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}

	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}

	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}

	return func() { f.Close() }, nil
}

// extract copies the named files of the sources into dir.
func (c Cache) extract(dir string, names ...string) error {
	for _, name := range names {
		content, err := fs.ReadFile(c.Sources, name)
		if err != nil {
			return err
		}

		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// inputs reads the named files of the sources.
func (c Cache) inputs(names ...string) ([]string, error) {
	var contents []string
	for _, name := range names {
		content, err := fs.ReadFile(c.Sources, name)
		if err != nil {
			return nil, err
		}
		contents = append(contents, name, string(content))
	}

	return contents, nil
}

// moduleVersion returns the version of a module that a go.mod requires.
func moduleVersion(goMod, module string) (string, error) {
	for line := range strings.Lines(goMod) {
		fields := strings.Fields(line)
		if len(fields) > 0 && fields[0] == "require" {
			fields = fields[1:]
		}
		if len(fields) >= 2 && fields[0] == module && strings.HasPrefix(fields[1], "v") {
			return fields[1], nil
		}
	}
	return "", fmt.Errorf("go.mod: no requirement of %s", module)
}
