// SPDX-License-Identifier: Apache-2.0

// Package images tests the container images of make images. It compares them with the images that a
// container engine makes of the same Containerfiles, and with a second build, and runs the images
// of the other architecture.
package images

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

const root = "../.."

var (
	names  = []string{"xpu-agent", "xpu-controller", "opi-bridge", "opi-conformance", "xpuctl"}
	arches = []string{"amd64", "arm64"}
)

// archive returns the file of an image.
func archive(t testing.TB, name string) string {
	t.Helper()
	file, err := filepath.Abs(filepath.Join(root, "bin", "images", name+".tar"))
	must.Succeed(t, err)
	needs.Built(t, file, "images")
	return file
}

// program finds a program on the machine.
func program(t testing.TB, name, debianPackage string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("Debian package %s is not installed: scripts/preflight test installs it",
			debianPackage)
	}
	return path
}

// An engine is buildah, with its own storage of images and containers.
type engine struct {
	t       testing.TB
	program string
	dir     string
}

func newEngine(t testing.TB) *engine {
	t.Helper()
	needs.Root(t, "because buildah mounts containers")

	e := &engine{t: t, program: program(t, "buildah", "buildah"), dir: t.TempDir()}
	t.Cleanup(func() {
		e.run("umount", "--all")
		e.run("rm", "--all")
	})

	return e
}

func (e *engine) run(args ...string) string {
	e.t.Helper()
	all := append([]string{"--root", e.dir + "/storage", "--runroot", e.dir + "/run",
		"--storage-driver", "vfs"}, args...)
	cmd := exec.Command(e.program, all...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		e.t.Fatalf("buildah %s: %v\n%s", strings.Join(args, " "), err, &stderr)
	}

	return strings.TrimSpace(string(out))
}

// A content is an image as a container sees it.
type content struct {
	OS, Arch, User string
	Created        time.Time
	Entrypoint     []string
	Env            []string
	Labels         map[string]string
	Files          map[string]string // mode and size, by path
}

// look makes a container of an image, mounts it, and returns its content and its directory.
func (e *engine) look(image, arch string) (content, string) {
	e.t.Helper()
	container := e.run("from", "--os", "linux", "--arch", arch, image)

	var inspected struct {
		OCIv1 struct {
			Created      time.Time
			OS           string `json:"os"`
			Architecture string `json:"architecture"`
			Config       struct {
				User       string
				Entrypoint []string
				Env        []string
				Labels     map[string]string
			} `json:"config"`
		}
	}

	must.Succeed(e.t,
		json.Unmarshal([]byte(e.run("inspect", "--type", "container", container)), &inspected))
	config := inspected.OCIv1.Config
	delete(config.Labels, "io.buildah.version") // buildah adds its version
	mount := e.run("mount", container)

	return content{
		OS: inspected.OCIv1.OS, Arch: inspected.OCIv1.Architecture,
		Created: inspected.OCIv1.Created,
		User:    config.User, Entrypoint: config.Entrypoint, Env: config.Env, Labels: config.Labels,
		Files: files(e.t, mount),
	}, mount
}

// files returns the files below dir without directories, because container runtimes make missing
// mount points.
func files(t testing.TB, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			found[path] = fmt.Sprintf("%s %d", info.Mode(), info.Size())
		}
		return err
	})

	must.Succeed(t, err)
	return found
}

// TestEngineMakesTheSame checks that an engine reads our archives, and makes the same images of the
// Containerfiles.
func TestEngineMakesTheSame(t *testing.T) {
	e := newEngine(t)
	for _, name := range names {
		archive := archive(t, name)
		for _, arch := range arches {
			ours, _ := e.look("oci-archive:"+archive, arch)
			tag := name + ":" + arch
			e.run("build", "--platform", "linux/"+arch, "--isolation", "chroot", "--tag", tag,
				"--build-arg", "VERSION="+ours.Labels["org.opencontainers.image.version"],
				"--timestamp", strconv.FormatInt(ours.Created.Unix(), 10),
				"--build-arg", "REVISION="+ours.Labels["org.opencontainers.image.revision"],
				"--file", filepath.Join(root, "images", name, "Containerfile"),
				filepath.Join(root, "bin"))

			theirs, _ := e.look("localhost/"+tag, arch)
			if diff := cmp.Diff(theirs, ours); diff != "" {
				t.Errorf("%s for %s: -buildah +make images:\n%s", name, arch, diff)
			}
			if ours.Arch != arch || len(ours.Files) == 0 || len(ours.Labels) < 6 {
				t.Errorf("%s for %s is %+v", name, arch, ours)
			}
		}
	}
}

// TestReproducible checks that a second build of the same source gives the same images, in another
// directory and with another user's settings.
func TestReproducible(t *testing.T) {
	ours, _ := newEngine(t).look("oci-archive:"+archive(t, "xpu-agent"), runtime.GOARCH)
	devcluster, err := filepath.Abs(filepath.Join(root, "bin", "devcluster"))
	must.Succeed(t, err)
	tree := filepath.Join(t.TempDir(), "elsewhere")
	copySource(t, tree)
	info, err := os.Stat(filepath.Join(root, "bin", "linux", "amd64", "xpu-cni"))
	must.Succeed(t, err)

	build := exec.Command("sh", "-c", `umask 077; exec make -C "$0" archives "$@"`,
		tree, "DEVCLUSTER="+devcluster,
		"ARCHES="+strings.Join(arches, " "),
		"REVISION="+ours.Labels["org.opencontainers.image.revision"])

	build.Env = append(os.Environ(), "TZ=Asia/Kathmandu", "LC_ALL=C",
		fmt.Sprintf("SOURCE_DATE_EPOCH=%d", ours.Created.Unix()))
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	if again, err := os.Stat(filepath.Join(tree, "bin", "linux", "amd64", "xpu-cni")); err != nil ||
		os.SameFile(info, again) {
		t.Fatalf("the second build is not one: %v", err)
	}

	for _, name := range names {
		for _, file := range []string{name + ".tar", name + ".cdx.json"} {
			first, err := os.ReadFile(filepath.Join(root, "bin", "images", file))
			must.Succeed(t, err)
			second, err := os.ReadFile(filepath.Join(tree, "bin", "images", file))
			must.Succeed(t, err)
			if !bytes.Equal(first, second) {
				t.Errorf("%s differs between two builds", file)
			}
		}
	}
}

// copySource copies the files of the repository, including changes that are not committed.
func copySource(t testing.TB, to string) {
	t.Helper()
	list := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}

	for _, file := range strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		source, target := filepath.Join(root, file), filepath.Join(to, file)
		must.Succeed(t, os.MkdirAll(filepath.Dir(target), 0o755))
		if link, err := os.Readlink(source); err == nil {
			must.Succeed(t, os.Symlink(link, target))
			continue
		}

		content, err := os.ReadFile(source)
		if os.IsNotExist(err) {
			continue // the file was removed without a commit
		}

		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(target, content, 0o644))
	}
}
