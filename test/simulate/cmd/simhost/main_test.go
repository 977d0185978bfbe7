// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	vnetns "github.com/vishvananda/netns"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// simhost runs the command until stop is called, which returns its error.
func simhost(t *testing.T, args ...string) (r ready, stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	reader, writer := io.Pipe()
	cmd := command()
	cmd.SetArgs(args)
	cmd.SetOut(writer)
	ended := make(chan error, 1)
	go func() {
		err := cmd.ExecuteContext(ctx)
		writer.CloseWithError(err)
		ended <- err
	}()

	stop = func() error {
		cancel()
		return <-ended
	}

	line, err := bufio.NewReader(reader).ReadBytes('\n')
	if err != nil {
		t.Fatalf("simhost is not ready: %v", errors.Join(err, stop()))
	}
	if err := json.Unmarshal(line, &r); err != nil {
		t.Fatalf("%s: %v", line, errors.Join(err, stop()))
	}

	return r, stop
}

func TestSimhost(t *testing.T) {
	host := netns.New(t)
	for name, file := range map[string]string{
		"namespace of its own": "", "namespace it makes": "run/xpu",
	} {
		t.Run(name, func(t *testing.T) {
			root, xpu := t.TempDir(), ""
			if file != "" {
				xpu = filepath.Join(root, file)
			}

			r, stop := simhost(t, "--root", root, "--host-netns", host.Path(), "--xpu-netns",
				xpu, "--cards", "2", "--pfs", "1", "--vfs", "1")
			if xpu != "" && r.XPUNetNS != xpu {
				t.Errorf("xPU's namespace is %s, want %s", r.XPUNetNS, xpu)
			}

			if ns, err := vnetns.GetFromPath(r.XPUNetNS); err != nil {
				t.Errorf("%s: %v", r.XPUNetNS, err)
			} else {
				_ = ns.Close()
			}

			if len(r.Functions) != 4 {
				t.Errorf("%d functions, want 4", len(r.Functions))
			}

			for _, f := range r.Functions {
				if _, err := host.Handle().LinkByName(f.Netdev); err != nil {
					t.Errorf("%s: %v", f.Netdev, err)
				}
				if _, err := os.Stat(filepath.Join(r.SysRoot, "bus/pci/devices", f.Address,
					"net", f.Netdev)); err != nil {
					t.Error(err)
				}
			}

			if err := stop(); err != nil {
				t.Fatal(err)
			}
			if links, err := host.Handle().LinkList(); err != nil || len(links) != 1 {
				t.Errorf("%d links stay on the host, %v", len(links)-1, err)
			}

			if xpu == "" {
				if _, err := os.Lstat(root); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("the empty root stays: %v", err)
				}
			}

			for _, path := range []string{r.SysRoot, filepath.Join(root, "run/xpu")} {
				if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s stays: %v", path, err)
				}
			}
		})
	}
}

func TestNamespaceOfOthersStays(t *testing.T) {
	host, xpu := netns.New(t), netns.New(t)
	_, stop := simhost(t, "--root", t.TempDir(), "--host-netns", host.Path(), "--xpu-netns",
		xpu.Path(), "--pfs", "1", "--vfs", "0")
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	ns, err := vnetns.GetFromPath(xpu.Path())
	if err != nil {
		t.Fatal(err)
	}

	_ = ns.Close()
}

func TestRefused(t *testing.T) {
	for want, args := range map[string][]string{
		`"root" not set`:     {},
		"uplink-bridge":      {"--root", t.TempDir(), "--uplink-netns", "/x"},
		"/nowhere":           {"--root", t.TempDir(), "--host-netns", "/nowhere"},
		"9 PFs: must be 1-8": {"--root", t.TempDir(), "--pfs", "9"},
		"--uplink-address": {
			"--root", t.TempDir(), "--uplink-netns", "/x", "--uplink-bridge", "b",
			"--uplink-address", "1",
		},
		`unknown command "sometimes"`: {"sometimes"},
	} {
		cmd := command()
		cmd.SetArgs(args)
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		if err := cmd.ExecuteContext(t.Context()); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with %q", args, err, want)
		}
	}
}
