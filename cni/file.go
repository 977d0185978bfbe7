package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
)

// maxNetwork is how much of a network's name is in that of a file, which may have 255 bytes. Networks whose names begin
// alike replace each other's GC, which the runtime repeats.
const maxNetwork = 200

// spool leaves a request for an agent that is away. The name of the file says what the request is about, so that a
// request that is repeated replaces the one before. Neither a container ID nor the name of an interface or of a network
// may have a colon.
func spool(dir string, request wire.Request, network string) (path string, err error) {
	name := string(request.Command) + ":" + request.ContainerID + ":" + request.IfName
	if request.Command == wire.GC {
		name = string(request.Command) + ":" + network[:min(len(network), maxNetwork)]
	}
	request.Version = wire.Version
	data, err := json.Marshal(request)
	if err != nil {
		return "", fmt.Errorf("request %s: %w", request.Command, err)
	}
	if err := errors.Join(makeDir(dir, spoolMode), checkSpool(dir)); err != nil {
		return "", fmt.Errorf("spool directory: %w", err)
	}
	path = filepath.Join(dir, name+".json")
	if err := replace(path, data, 0o600); err != nil {
		return "", fmt.Errorf("spool file: %w", err)
	}
	return path, nil
}

// spoolMode is that of the spool directory.
const spoolMode fs.FileMode = 0o700

// checkSpool refuses a directory that is not private, as that of the agent is: spoolDir is what somebody wrote into a
// network configuration, and the shim may write everywhere.
func checkSpool(dir string) error {
	info, err := os.Lstat(dir)
	switch {
	case err != nil:
		return err
	case !info.IsDir():
		return fmt.Errorf("%s: must be a directory, not a link", dir)
	case info.Mode().Perm() != spoolMode:
		return fmt.Errorf("%s: has mode %04o, must have mode %04o", dir, info.Mode().Perm(), spoolMode)
	}
	return nil
}

// writeDeviceInfo describes the device to the runtime, which reads the file after ADD.
func writeDeviceInfo(path string, info json.RawMessage) error {
	if err := makeDir(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("device information: %w", err)
	}
	if err := replace(path, info, 0o444); err != nil {
		return fmt.Errorf("device information: %w", err)
	}
	return nil
}

// removeDeviceInfo undoes [writeDeviceInfo]. An empty path is that of a runtime that wants no file.
func removeDeviceInfo(path string) error {
	if path == "" {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("device information: %w", err)
	}
	return nil
}

// replace has a file appear whole, with what is in data, even if the machine loses power.
func replace(path string, data []byte, mode fs.FileMode) error {
	file, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name()) // in vain once it is renamed
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

// makeDir makes a directory and its parents, all of which last.
func makeDir(dir string, mode fs.FileMode) error {
	err := os.Mkdir(dir, mode)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeDir(filepath.Dir(dir), 0o755); err != nil {
			return err
		}
		err = os.Mkdir(dir, mode)
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
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
