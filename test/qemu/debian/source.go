// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"archive/tar"
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
	"strings"
)

// Extract returns a directory with the files of a folder of an archive (.tar.xz) that the packages
// have, without the folder's own folders. It makes the directory if it is missing. Several processes
// may call Extract at once. The packages must include xz-utils.
func (r Root) Extract(ctx context.Context, archive, folder string) (string, error) {
	dir := filepath.Join(string(r), "extracted", folder)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}

	temporary, err := os.MkdirTemp(string(r), "extract-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temporary)

	if err := r.extract(ctx, archive, folder, temporary); err != nil {
		return "", fmt.Errorf("extract %s of %s: %w", folder, r.Path(archive), err)
	}
	// another process may have made the directory first
	if err := os.Rename(temporary, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}

	return dir, nil
}

func (r Root) extract(ctx context.Context, archive, folder, to string) error {
	ctx, cancel := context.WithCancel(ctx)
	args := r.Command("/usr/bin/xz", "--decompress", "--stdout", r.Path(archive))
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	var said bytes.Buffer
	cmd.Stderr = &said
	content, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		return err
	}

	files, err := copyFolder(content, folder, to)
	cancel() // xz is not needed for what follows the folder
	ended := cmd.Wait()

	if err == nil && files == 0 {
		err = errors.New("the archive has no such folder")
	}
	if err != nil && said.Len() > 0 {
		err = fmt.Errorf("%w; xz: %w: %s", err, ended, bytes.TrimSpace(said.Bytes()))
	}
	return err
}

// copyFolder writes the files of a folder of a tar archive, and returns how many there are. It stops
// at the first entry after the folder.
func copyFolder(archive io.Reader, folder, to string) (files int, err error) {
	for entries := tar.NewReader(archive); ; {
		entry, err := entries.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return files, err
		}

		if !strings.HasPrefix(entry.Name, folder+"/") && files > 0 {
			return files, nil
		}
		if path.Dir(entry.Name) != folder || entry.Typeflag != tar.TypeReg {
			continue
		}

		content, err := io.ReadAll(entries)
		if err != nil {
			return files, err
		}
		file := filepath.Join(to, path.Base(entry.Name))
		if err := os.WriteFile(file, content, 0o644); err != nil {
			return files, err
		}
		files++
	}
}
