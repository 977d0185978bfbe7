// SPDX-License-Identifier: Apache-2.0

package artifact

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// progressEvery is how often a long build reports its progress.
const progressEvery = 10 * time.Second

func (c Cache) goVersion(ctx context.Context) (string, error) {
	output, err := c.goCommand(ctx, c.Dir, "env", "GOVERSION").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOVERSION: %w", err)
	}
	return strings.TrimSpace(string(output)), nil
}

// goCommand runs the machine's go command with the same flags for all builds, because flags are
// part of the key of the build cache.
func (c Cache) goCommand(ctx context.Context, dir string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	if exists(dir) {
		cmd.Dir = dir
	}
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off",
		"GOFLAGS=-trimpath -buildvcs=false")
	return cmd
}

func (c Cache) kubernetes(goVersion string) (artifact, string, error) {
	module, err := c.kubernetesModule()
	if err != nil {
		return artifact{}, "", err
	}
	inputs, err := c.inputs(module.sum, "cmd/kubernetes/main.go")
	if err != nil {
		return artifact{}, "", err
	}
	inputs = append([]string{module.mod, module.goMod}, inputs...)

	version, err := moduleVersion(inputs[1], "k8s.io/kubernetes")
	if err != nil {
		return artifact{}, "", err
	}

	name := "kubernetes " + version
	return artifact{
		name:   name,
		dir:    "kubernetes",
		inputs: append(inputs, goVersion),
		make: func(ctx context.Context, target string) error {
			return c.makeKubernetes(ctx, name, version, target, module)
		},
	}, version, nil
}

func (c Cache) makeKubernetes(
	ctx context.Context, name, version, target string, module kubernetesModule,
) error {
	source, err := os.MkdirTemp("", "devcluster-kubernetes-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(source)

	if err := errors.Join(c.extractModule(source, module.mod, module.sum),
		c.extract(source, "cmd/kubernetes/main.go")); err != nil {
		return err
	}
	if err := c.complete(ctx, source, module); err != nil {
		return err
	}

	flags, err := versionFlags(version)
	if err != nil {
		return err
	}

	output := filepath.Join(target, "kubernetes")
	if err := c.compile(ctx, source, name, "./cmd/kubernetes", "-ldflags", flags,
		"-o", output); err != nil {
		return err
	}

	for _, component := range components {
		if err := os.Symlink("kubernetes", filepath.Join(target, component)); err != nil {
			return err
		}
	}

	return nil
}

// KubernetesVersions returns the older versions of Kubernetes, such as "1.36".
func (c Cache) KubernetesVersions() []string { return c.versionsIn("kubernetes") }

// versionsIn returns the names of the modules in a directory of the sources.
func (c Cache) versionsIn(dir string) (versions []string) {
	files, err := fs.Glob(c.Sources, dir+"/*.mod")
	if err != nil {
		panic(err) // the pattern is a constant
	}
	for _, file := range files {
		versions = append(versions, strings.TrimSuffix(path.Base(file), ".mod"))
	}
	return versions
}

// compile builds packages of the module in source, and reports its progress.
func (c Cache) compile(ctx context.Context, source, name, packages string, flags ...string) error {
	fmt.Fprintf(c.Log, "%s: fetching modules\n", name)
	var failed bytes.Buffer
	list := c.goCommand(ctx, source, "list", "-deps", packages)
	list.Stderr = &failed
	all, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list: %w\n%s", err, lastLines(failed.Bytes()))
	}

	build := c.goCommand(ctx, source,
		slices.Concat([]string{"build", "-v"}, flags, []string{packages})...)
	if err := c.watchBuild(build, name, bytes.Count(all, []byte("\n"))); err != nil {
		return fmt.Errorf("go build: %w", err)
	}

	return nil
}

// versionFlags returns the linker flags that set Kubernetes' version. Without them the version is
// v0.0.0-master+$Format:%H$, which clients cannot parse.
func versionFlags(version string) (string, error) {
	numbers := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(numbers) != 3 {
		return "", fmt.Errorf("version %q of k8s.io/kubernetes: want vMAJOR.MINOR.PATCH", version)
	}
	const pkg = "k8s.io/component-base/version."
	return fmt.Sprintf("-s -w -X %sgitVersion=%s -X %sgitMajor=%s -X %sgitMinor=%s",
		pkg, version, pkg, numbers[0], pkg, numbers[1]), nil
}

// watchBuild runs `go build -v`, which writes the name of every compiled package to standard error,
// and turns them into progress lines.
func (c Cache) watchBuild(build *exec.Cmd, name string, total int) error {
	stderr, err := build.StderrPipe()
	if err != nil {
		return err
	}

	start := time.Now()
	if err := build.Start(); err != nil {
		return err
	}

	var compiled atomic.Int64
	done := make(chan struct{})
	go func() {
		ticker := time.NewTicker(progressEvery)
		defer ticker.Stop()

		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				fmt.Fprintf(c.Log, "%s: compiling, %d of at most %d packages, %s\n",
					name, compiled.Load(), total, time.Since(start).Round(time.Second))
			}
		}
	}()

	failed := countPackages(stderr, &compiled)
	close(done)
	if err := build.Wait(); err != nil {
		return fmt.Errorf("%w\n%s", err, lastLines(failed))
	}

	return nil
}

// countPackages counts the lines that are import paths and returns the others, which are downloads
// and errors.
func countPackages(r io.Reader, compiled *atomic.Int64) []byte {
	var others bytes.Buffer
	scanner := bufio.NewScanner(r)
	scanner.Buffer(nil, 1<<20)

	for scanner.Scan() {
		line := scanner.Text()
		if strings.ContainsAny(line, " \t#:") || line == "" {
			others.WriteString(line + "\n")
			continue
		}
		compiled.Add(1)
	}

	return others.Bytes()
}

// lastLines returns the end of a long output, where the go command reports errors.
func lastLines(output []byte) []byte {
	const keep = 20
	lines := bytes.Split(bytes.TrimSpace(output), []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-keep):], []byte("\n"))
}
