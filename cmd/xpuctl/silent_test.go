// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// silentServer listens like an API server, and answers nothing. asked has a value for each piece of
// a request.
func silentServer(t *testing.T) (host string, asked <-chan struct{}) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	t.Cleanup(func() { listener.Close() })

	pieces := make(chan struct{})
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer connection.Close()
				for piece := make([]byte, 4096); ; {
					if _, err := connection.Read(piece); err != nil {
						return
					}
					select {
					case pieces <- struct{}{}:
					case <-t.Context().Done():
						return
					}
				}
			}()
		}
	}()
	return "http://" + listener.Addr().String(), pieces
}

// ended returns the error of xpuctl, or fails the test if xpuctl goes on for too long. interrupt
// ends its context each time that it asks the API server.
func ended(t *testing.T, asked <-chan struct{}, interrupt bool, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	var out bytes.Buffer
	done := make(chan error, 1)
	go func() {
		c := command("xpuctl")
		c.SetArgs(args)
		done <- execute(ctx, c, strings.NewReader(""), &out, &out)
	}()

	patience := time.After(20 * time.Second)
	for {
		select {
		case <-asked:
			if interrupt {
				cancel()
			}
		case err := <-done:
			return out.String(), err
		case <-patience:
			t.Fatalf("%s goes on", strings.Join(args, " "))
		}
	}
}

// TestSilentServer: an interrupt ends each command while the API server does not answer, and leaves
// no file behind.
func TestSilentServer(t *testing.T) {
	host, asked := silentServer(t)
	file := kubeconfig(t, &rest.Config{Host: host})
	t.Chdir(t.TempDir())

	for _, line := range []string{
		"status", "status --wait", "explain pod web", "schedule", "schedule --kubernetes 1.37", "test",
		"test --cleanup", "version", "pools", "ports", "dead-letters", "release node1 0000:3b:02.1",
		"release xpu/a", "cordon xpu a", "uninstall", "uninstall --dry-run", "bundle", "dashboard",
		"discover --node node1",
	} {
		args := append(strings.Split(line, " "), "--kubeconfig", file)
		if _, err := ended(t, asked, true, args...); err == nil && line != "dashboard" {
			t.Errorf("%s: no error", line)
		}
	}

	left, err := os.ReadDir(".")
	must.Succeed(t, err)
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestSilentServerTimeout: commands that have a time end when it is over.
func TestSilentServerTimeout(t *testing.T) {
	host, asked := silentServer(t)
	file := kubeconfig(t, &rest.Config{Host: host})

	_, err := ended(t, asked, false, "status", "--wait", "--timeout=10ms", "--kubeconfig", file)
	if err == nil || !strings.Contains(err.Error(), "deadline exceeded") {
		t.Errorf("status: %v", err)
	}

	out, err := ended(t, asked, false, "__complete", "explain", "pod", "--kubeconfig", file, "")
	if err != nil || strings.HasPrefix(out, "Error") {
		t.Errorf("completion: %v, %s", err, out)
	}
}
