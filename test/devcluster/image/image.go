// Package image packs static binaries into container images of one layer, by Containerfiles, without a registry or a
// daemon.
package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// File is one file of an image.
type File struct {
	Source string // path on this machine
	Target string // absolute path in the image
}

// Spec describes an image for the architecture this program was built for.
type Spec struct {
	Name       string   // full reference with registry and tag, for example devcluster.local/pause:1
	Entrypoint []string // at least the program
	User       string   // UID, UID:GID or empty for root
	Files      []File   // keep their permission bits, belong to root
}

// Write makes the image and writes it to file in the format of docker save, which ctr, docker and podman
// import. Equal input gives an equal file: nothing of the time or of this machine goes in.
func Write(file string, spec Spec) error {
	tag, err := name.NewTag(spec.Name, name.StrictValidation)
	if err != nil {
		return fmt.Errorf("image name: want REGISTRY/NAME:TAG, for example devcluster.local/pause:1: %w", err)
	}
	if len(spec.Entrypoint) == 0 || len(spec.Files) == 0 {
		return fmt.Errorf("image %s: an entrypoint and at least one file are needed", spec.Name)
	}
	contents, err := layer(spec.Files)
	if err != nil {
		return fmt.Errorf("image %s: %w", spec.Name, err)
	}
	img, err := assemble(spec, contents)
	if err != nil {
		return fmt.Errorf("image %s: %w", spec.Name, err)
	}
	if err := tarball.WriteToFile(file, tag, img); err != nil {
		return fmt.Errorf("image %s: %w", spec.Name, err)
	}
	return nil
}

func assemble(spec Spec, contents []byte) (v1.Image, error) {
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(contents)), nil
	})
	if err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = v1.Config{
		Entrypoint: spec.Entrypoint,
		User:       spec.User,
		WorkingDir: "/",
		Env:        []string{"PATH=/usr/local/bin:/usr/bin:/bin:/"},
	}
	return mutate.ConfigFile(img, config)
}

// layer is the tar of the files and of every directory they need. The empty mount points are those that a
// runtime would have to create in the image otherwise.
func layer(files []File) ([]byte, error) {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for _, dir := range directories(files) {
		mode := int64(0o755)
		if dir == "tmp" {
			mode = 0o1777
		}
		if err := w.WriteHeader(&tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: mode}); err != nil {
			return nil, err
		}
	}
	for _, f := range files {
		if err := addFile(w, f); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buffer.Bytes(), nil
}

func directories(files []File) []string {
	dirs := []string{"dev", "etc", "proc", "sys", "tmp"}
	for _, f := range files {
		for dir := path.Dir(strings.TrimPrefix(f.Target, "/")); dir != "."; dir = path.Dir(dir) {
			dirs = append(dirs, dir)
		}
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

func addFile(w *tar.Writer, f File) error {
	in, err := os.Open(f.Source)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", f.Source)
	}
	header := &tar.Header{Name: strings.TrimPrefix(f.Target, "/"), Mode: int64(info.Mode().Perm()), Size: info.Size()}
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	_, err = io.Copy(w, in)
	return err
}
