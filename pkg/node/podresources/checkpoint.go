// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// checkpointFile is the path, below the kubelet's directory, of its record of devices that it
// allocated to containers (kubeletDeviceManagerCheckpoint in
// pkg/kubelet/cm/devicemanager/manager.go). The kubelet replaces it atomically.
const checkpointFile = "device-plugins/kubelet_internal_checkpoint"

// maxCheckpoint bounds the file, in bytes. An entry has some hundred bytes, plus the device
// plugin's response.
const maxCheckpoint = 64 << 20

// readCheckpoint returns the Functions of containers, including init containers, by
// [function.ID.String]. It returns no Functions if there is no checkpoint, because a kubelet that
// never allocated a device has none.
func readCheckpoint(
	path string, parse func(string) (function.ID, error),
) (map[string]Assignment, error) {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]Assignment{}, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()

	text, err := io.ReadAll(io.LimitReader(file, maxCheckpoint+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxCheckpoint {
		return nil, fmt.Errorf("has more than %d bytes", maxCheckpoint)
	}

	return parseCheckpoint(text, parse)
}

func parseCheckpoint(
	text []byte, parse func(string) (function.ID, error),
) (map[string]Assignment, error) {
	// The other fields of the file are not needed; see
	// pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go.
	var checkpoint struct {
		Data struct {
			PodDeviceEntries []struct {
				ContainerName string
				ResourceName  string
				DeviceIDs     map[string][]string // by NUMA node
			}
		}
	}

	if err := json.Unmarshal(text, &checkpoint); err != nil {
		return nil, err
	}

	assigned := map[string]Assignment{}
	for _, entry := range checkpoint.Data.PodDeviceEntries {
		for _, ids := range entry.DeviceIDs {
			for _, text := range ids {
				if id, err := parse(text); err == nil {
					assigned[id.String()] = Assignment{
						Resource: entry.ResourceName, Container: entry.ContainerName,
					}
				}
			}
		}
	}

	return assigned, nil
}
