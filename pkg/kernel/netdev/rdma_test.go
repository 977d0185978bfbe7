// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/rdma"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// rdmaFake is an RDMA system in mode exclusive with one device. Guest simnic has a real one.
type rdmaFake struct {
	device rdma.Device
	at     uint64 // inode of the namespace that has the device
	// The errors of the next calls, nil for none.
	list, move, rename error
}

func inode(t *testing.T, ns netns.NsHandle) uint64 {
	t.Helper()
	var stat unix.Stat_t
	must.Succeed(t, unix.Fstat(int(ns), &stat))
	return stat.Ino
}

func (s *rdmaFake) List(ns netns.NsHandle) ([]rdma.Device, error) {
	var stat unix.Stat_t
	if err := errors.Join(s.list, unix.Fstat(int(ns), &stat)); err != nil {
		return nil, err
	}
	if stat.Ino != s.at {
		return nil, nil
	}
	return []rdma.Device{s.device}, nil
}

func (s *rdmaFake) Move(_ netns.NsHandle, _ uint32, to netns.NsHandle) error {
	var stat unix.Stat_t
	if err := errors.Join(s.move, unix.Fstat(int(to), &stat)); err != nil {
		return err
	}
	s.at = stat.Ino
	return nil
}

func (s *rdmaFake) Rename(_ netns.NsHandle, _ uint32, name string) error {
	if s.rename == nil {
		s.device.Name = name
	}
	return s.rename
}

func (s *rdmaFake) SetModeration(_ netns.NsHandle, _ uint32, on bool) error {
	s.device.Moderation = &on
	return nil
}

// TestRDMARefused checks what an attachment and a release do when the RDMA system refuses, or does not
// answer: the netdev is on the host all the same.
func TestRDMARefused(t *testing.T) {
	tests := map[string]struct {
		device string // of the pool
		attach func(*rdmaFake)
		used   func(*rdmaFake) // by the pod
		err    string          // of the plan, the attachment or the release
		note   string          // of the release
		blind  bool            // the agent's sysfs shows no devices
	}{
		"all is well": {device: "mlx5_2", used: func(s *rdmaFake) {
			s.device.Name, s.device.Moderation = "mine", new(false)
		}},
		"no such device": {device: "mlx5_9", err: "RDMA device mlx5_9: is not in the host's"},
		"a driver that cannot move it": {
			device: "mlx5_2", attach: func(s *rdmaFake) { s.move = unix.EOPNOTSUPP },
			err: "rdma system set netns shared",
		},
		"not moved back": {
			device: "mlx5_2", used: func(s *rdmaFake) { s.move = unix.EIO },
			err: "is in a network namespace that is not found",
		},
		"not moved back, and no sysfs": {
			device: "mlx5_2", used: func(s *rdmaFake) { s.move = unix.EIO }, blind: true,
			err: "whether they exist",
		},
		"no answer": {
			device: "mlx5_2", used: func(s *rdmaFake) { s.list = unix.EIO },
			err: "input/output error",
		},
		"its name is taken": {
			device: "mlx5_2",
			used:   func(s *rdmaFake) { s.device.Name, s.rename = "mine", unix.EEXIST },
			note:   `RDMA name 7 is "mine", was "mlx5_2": the old value was refused`,
		},
	}

	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			system := &rdmaFake{
				device: rdma.Device{Name: "mlx5_2", Index: 7, Moderation: new(true)},
				at:     inode(t, netns.NsHandle(w.host.Fd())),
			}
			// The folder of the RDMA devices exists, and is empty while they are elsewhere.
			const dir = "bus/pci/devices/0000:3b:02.1"
			sysRoot := t.TempDir()
			if !tt.blind {
				must.Succeed(t, os.MkdirAll(filepath.Join(sysRoot, dir, "infiniband"), 0o755))
			}
			engine, err := netdev.New(netdev.Options{HostNetNS: w.host.Path(), SysRoot: sysRoot})
			must.Succeed(t, err)
			defer engine.Close()
			engine.UseRDMA(system)

			host := device()
			host.RDMA = &netdev.RDMANames{Dir: dir, Names: []string{tt.device}}
			want := function.Interface{Name: "net1"}
			before, place, err := engine.Plan(t.Context(), host, w.pod.Path(), want)
			if err == nil {
				if tt.attach != nil {
					tt.attach(system)
				}
				_, err = engine.Attach(t.Context(), host, before, place, want)
			}
			if err != nil {
				wantError(t, err, tt.err)
				get(t, w.host, hostName)
				return
			}

			if system.at != inode(t, netns.NsHandle(w.pod.Fd())) {
				t.Error("the pod does not have the RDMA device")
			}
			if tt.used != nil {
				tt.used(system)
			}
			restored, err := engine.Restore(t.Context(), device(), before, place)
			get(t, w.host, hostName)
			if err != nil || tt.err != "" {
				wantError(t, err, tt.err)
				return
			}

			isNote := func(note string) bool { return strings.HasPrefix(note, tt.note) }
			if tt.note != "" && slices.ContainsFunc(restored.Notes, isNote) {
				return
			}
			is := system.device
			if len(restored.Notes) > 0 || is.Name != "mlx5_2" || !*is.Moderation {
				t.Errorf("notes %q, device %+v", restored.Notes, is)
			}
		})
	}
}

// wantError checks that an error has a text.
func wantError(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || text == "" || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want one with %q", err, text)
	}
}
