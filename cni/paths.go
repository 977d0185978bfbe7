// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
)

// maxPathsFile limits the file of [ReadPaths], in bytes. It has two paths.
const maxPathsFile = 16 << 10

// Paths says where a node's agent is. It belongs to the node, and not to a network configuration,
// because a network configuration comes from a tenant, and the shim may write everywhere.
type Paths struct {
	// Socket is where the agent listens; absolute.
	Socket string `json:"socket,omitempty"`
	// SpoolDir is where requests are left for an agent that does not run; absolute.
	SpoolDir string `json:"spoolDir,omitempty"`
}

// DefaultPaths returns the paths of an agent without flags.
func DefaultPaths() Paths {
	return Paths{Socket: wire.DefaultSocket, SpoolDir: wire.DefaultSpoolDir}
}

// PathsFile returns the name of the file for [ReadPaths] that belongs to a shim's binary.
func PathsFile(binary string) string { return binary + ".json" }

// ReadPaths reads the node's paths from a file with a JSON object. Missing paths, and a missing
// file, mean the defaults. The file must belong to the user of the shim's process, and must not be
// writable for other users.
func ReadPaths(file string) (Paths, error) {
	content, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return DefaultPaths(), nil
	}
	if err != nil {
		return Paths{}, err
	}
	defer content.Close()

	info, err := content.Stat()
	if err != nil {
		return Paths{}, err
	}

	owner, known := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.Mode().IsRegular():
		return Paths{}, fmt.Errorf("%s: must be a regular file", file)
	case !known || int(owner.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0:
		return Paths{}, fmt.Errorf("%s: must belong to root, and must not be writable for others",
			file)
	}

	text, err := io.ReadAll(io.LimitReader(content, maxPathsFile+1))
	if err != nil {
		return Paths{}, err
	}

	paths, err := parsePaths(text)
	if err != nil {
		return Paths{}, fmt.Errorf("%s: %w", file, err)
	}

	return paths, nil
}

// parsePaths parses the content of the file.
func parsePaths(text []byte) (Paths, error) {
	if len(text) > maxPathsFile {
		return Paths{}, fmt.Errorf("has more than %d bytes", maxPathsFile)
	}

	var p Paths
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&p); err != nil {
		return Paths{}, err
	}

	p.Socket = cmp.Or(p.Socket, wire.DefaultSocket)
	p.SpoolDir = cmp.Or(p.SpoolDir, wire.DefaultSpoolDir)
	for field, path := range map[string]string{"socket": p.Socket, "spoolDir": p.SpoolDir} {
		if !filepath.IsAbs(path) {
			return Paths{}, fmt.Errorf("%s: %q must be an absolute path", field, path)
		}
	}

	return p, nil
}
