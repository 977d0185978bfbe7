// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Write creates an index with one image for each Spec, which differ by architecture, and writes it
// to file as an OCI image layout in a tar. ctr, podman, skopeo and docker since version 25 import
// it with the name ref (REGISTRY/NAME:TAG). The same input gives the same file. created is the time
// of the images and their files.
func Write(file, ref string, created time.Time, specs ...Spec) error {
	tag, err := name.NewTag(ref, name.StrictValidation)
	if err != nil {
		return fmt.Errorf("image name: want REGISTRY/NAME:TAG, for example "+
			"devcluster.local/pause:1: %w", err)
	}

	index, err := makeIndex(created, specs)
	if err != nil {
		return fmt.Errorf("image %s: %w", ref, err)
	}
	if err := writeArchive(file, tag, index); err != nil {
		return fmt.Errorf("image %s: %w", ref, err)
	}

	return nil
}

func makeIndex(created time.Time, specs []Spec) (v1.ImageIndex, error) {
	if len(specs) == 0 {
		return nil, errors.New("at least one architecture is needed")
	}

	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, spec := range specs {
		img, err := spec.build(created)
		if err != nil {
			return nil, fmt.Errorf("linux/%s: %w", spec.Arch, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        img,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: spec.Arch}},
		})
	}

	return index, nil
}

func writeArchive(file string, tag name.Tag, index v1.ImageIndex) (err error) {
	dir, err := os.MkdirTemp(filepath.Dir(file), ".image-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	blobs := filepath.Join(dir, "layout")
	path, err := layout.Write(blobs, empty.Index)
	if err != nil {
		return err
	}

	// The first annotation is containerd's. The second is the specification's; most tools expect
	// only the tag there.
	err = path.AppendIndex(index, layout.WithAnnotations(map[string]string{
		nameAnnotation:                      tag.String(), // Name adds index.docker.io to docker.io
		"org.opencontainers.image.ref.name": tag.TagStr(),
	}))
	if err != nil {
		return err
	}

	archive := filepath.Join(dir, "archive")
	if err := pack(archive, blobs); err != nil {
		return err
	}

	return os.Rename(archive, file)
}

// pack writes a tar of the files below dir, sorted and without attributes of the file system.
func pack(file, dir string) (err error) {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()

	w := tar.NewWriter(out)
	root := os.DirFS(dir)
	err = fs.WalkDir(root, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		return packFile(w, root, path)
	})

	if err != nil {
		return err
	}

	return w.Close()
}

func packFile(w *tar.Writer, root fs.FS, path string) error {
	in, err := root.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()

	info, err := in.Stat()
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Name: path, Mode: 0o644, Size: info.Size()}); err != nil {
		return err
	}

	_, err = io.Copy(w, in)
	return err
}

// Name returns the name of the image in an archive made by [Write].
func Name(archive string) (string, error) {
	f, err := os.Open(archive)
	if err != nil {
		return "", err
	}
	defer f.Close()

	for files := tar.NewReader(f); ; {
		header, err := files.Next()
		if err != nil {
			return "", fmt.Errorf("image archive %s: no index.json: %w", archive, err)
		}
		if path.Clean(header.Name) != "index.json" {
			continue
		}

		index, err := v1.ParseIndexManifest(files)
		if err != nil {
			return "", fmt.Errorf("image archive %s: %w", archive, err)
		}

		for _, m := range index.Manifests {
			if name := m.Annotations[nameAnnotation]; name != "" {
				return name, nil
			}
		}

		return "", fmt.Errorf("image archive %s: index.json has no annotation %s", archive,
			nameAnnotation)
	}
}

// nameAnnotation is containerd's annotation for the name of an image in an archive
// (images.AnnotationImageName in its source).
const nameAnnotation = "io.containerd.image.name"
