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

// checkpointFile is where the kubelet keeps which devices it allocated to which containers, below its directory
// (kubeletDeviceManagerCheckpoint in pkg/kubelet/cm/devicemanager/manager.go). It is replaced whole.
const checkpointFile = "device-plugins/kubelet_internal_checkpoint"

// maxCheckpoint bounds the file, in bytes. An entry takes some hundred, and what the device plugin answered.
const maxCheckpoint = 64 << 20

// readCheckpoint returns what containers of pods have, init containers among them, by [function.ID.String]. A kubelet
// that never allocated a device has no checkpoint.
func readCheckpoint(path string) (map[string]Assignment, error) {
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
	return parseCheckpoint(text)
}

func parseCheckpoint(text []byte) (map[string]Assignment, error) {
	// The part of the file that tells who has what (pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go).
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
	kept := map[string]Assignment{}
	for _, entry := range checkpoint.Data.PodDeviceEntries {
		for _, ids := range entry.DeviceIDs {
			for _, text := range ids {
				if id, err := function.ParseID(text); err == nil {
					kept[id.String()] = Assignment{Resource: entry.ResourceName, Container: entry.ContainerName}
				}
			}
		}
	}
	return kept, nil
}
