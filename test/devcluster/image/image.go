// SPDX-License-Identifier: Apache-2.0

// Package image packs static binaries into container images of one layer, according to
// Containerfiles, without a registry or a daemon, and writes their bills of materials.
package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// File is a file of an image.
type File struct {
	Source string // path on this machine
	Target string // absolute path in the image
}

// Spec describes an image for one architecture of Linux.
type Spec struct {
	Arch       string            // in Go's notation: amd64, arm64
	Entrypoint []string          // program and arguments
	User       string            // UID or UID:GID; empty for root
	Labels     map[string]string // empty for none
	// owned by root; mode 0755 if executable for their owner, otherwise 0644
	Files []File
}

// build builds the image. The same input gives the same image, because the time, the umask and the
// machine do not influence it.
func (s Spec) build(created time.Time) (v1.Image, error) {
	if len(s.Entrypoint) == 0 || len(s.Files) == 0 {
		return nil, fmt.Errorf("an entrypoint and at least one file are needed")
	}

	contents, err := layer(s.Files, created)
	if err != nil {
		return nil, err
	}

	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(contents)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}

	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1),
		types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, l)
	if err != nil {
		return nil, err
	}

	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}

	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", s.Arch
	config.Created = v1.Time{Time: created.UTC()}
	config.Config = v1.Config{
		Entrypoint: s.Entrypoint,
		User:       s.User,
		Labels:     s.Labels,
		WorkingDir: "/",
		Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	}

	return mutate.ConfigFile(img, config)
}

// layer returns a tar of the files and their parent directories. It includes empty mount points,
// which a runtime would otherwise have to create in the image.
func layer(files []File, created time.Time) ([]byte, error) {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for _, dir := range directories(files) {
		mode := int64(0o755)
		if dir == "tmp" {
			mode = 0o1777
		}
		if err := w.WriteHeader(&tar.Header{
			Name: dir + "/", Typeflag: tar.TypeDir, Mode: mode, ModTime: created,
		}); err != nil {
			return nil, err
		}
	}

	for _, f := range files {
		if err := addFile(w, f, created); err != nil {
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

func addFile(w *tar.Writer, f File, created time.Time) error {
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

	mode := int64(0o644)
	if info.Mode()&0o100 != 0 {
		mode = 0o755
	}

	header := &tar.Header{
		Name: strings.TrimPrefix(f.Target, "/"), Mode: mode, Size: info.Size(), ModTime: created,
	}
	if err := w.WriteHeader(header); err != nil {
		return err
	}

	_, err = io.Copy(w, in)
	return err
}
