// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
)

// maxNetwork is how many bytes of a network's name are used in the name of a file, which may have
// 255 bytes. Networks whose names are equal up to this length replace each other's GC, which the
// runtime repeats.
const maxNetwork = 200

// spool leaves a request for an agent that does not run. A repeated request has the same file name
// and replaces the earlier one. The parts of the name are separated by colons, which neither a
// container ID nor the name of an interface or of a network can contain.
func (c call) spool(request wire.Request) (path string, err error) {
	name := string(request.Command) + ":" + request.ContainerID + ":" + request.IfName
	if request.Command == wire.GC {
		name = string(request.Command) + ":" + c.config.Name
	}

	data, err := wire.Encode(request)
	if err != nil {
		return "", err
	}

	dir := c.paths.SpoolDir
	if err := errors.Join(makeDir(dir, 0o700), checkSpool(dir)); err != nil {
		return "", fmt.Errorf("spool directory: %w", err)
	}

	path = filepath.Join(dir, name+".json")
	if err := replace(path, data, 0o600); err != nil {
		return "", fmt.Errorf("spool file: %w", err)
	}

	return path, nil
}

// checkSpool refuses a directory that is not private, because the agent's directory is.
func checkSpool(dir string) error {
	info, err := os.Lstat(dir)
	switch {
	case err != nil:
		return err
	case !info.IsDir():
		return fmt.Errorf("%s: must be a directory, not a link", dir)
	case info.Mode().Perm() != 0o700:
		return fmt.Errorf("%s: has mode %04o, must have mode 0700", dir, info.Mode().Perm())
	}

	return nil
}

// writeDeviceInfo writes the description of the device, if there is one, to the file that the
// runtime reads after ADD.
func (c call) writeDeviceInfo(info json.RawMessage) error {
	file := c.config.RuntimeConfig.DeviceInfoFile
	if file == "" || info == nil {
		return nil
	}

	err := makeDir(filepath.Dir(file), 0o755)
	if err == nil {
		err = replace(file, info, 0o444)
	}
	if err != nil {
		return c.networkError(types.ErrIOFailure, "device information: "+err.Error())
	}

	return nil
}

// removeDeviceInfo undoes [call.writeDeviceInfo].
func (c call) removeDeviceInfo(context.Context) error {
	err := os.Remove(c.config.RuntimeConfig.DeviceInfoFile) // "" does not exist either
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return c.networkError(types.ErrIOFailure, "device information: "+err.Error())
	}
	return nil
}

// replace writes a file atomically, so that it is complete even after a loss of power.
func replace(path string, data []byte, mode fs.FileMode) error {
	file, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name()) // fails once the file is renamed

	_, err = file.Write(data)
	err = errors.Join(err, file.Chmod(mode), file.Sync(), file.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(file.Name(), path); err != nil {
		return err
	}

	return syncDir(filepath.Dir(path))
}

// makeDir creates a directory and its missing parents, so that they exist even after a loss of
// power.
func makeDir(dir string, mode fs.FileMode) error {
	err := os.Mkdir(dir, mode)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeDir(filepath.Dir(dir), 0o755); err != nil {
			return err
		}
		err = os.Mkdir(dir, mode)
	}

	switch {
	case errors.Is(err, fs.ErrExist):
		return nil
	case err != nil:
		return err
	}

	return syncDir(filepath.Dir(dir))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
