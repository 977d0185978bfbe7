// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/pem"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestClusterOfPod: without a kubeconfig, a pod asks its own cluster, as kubectl does. Commands that
// go on without a cluster must not do so there.
func TestClusterOfPod(t *testing.T) {
	server := httptest.NewTLSServer(&newerCluster{})
	t.Cleanup(server.Close)
	host, port, err := net.SplitHostPort(server.Listener.Addr().String())
	must.Succeed(t, err)
	t.Setenv("HOME", t.TempDir())
	t.Setenv("KUBECONFIG", "")
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	files := &scheduleOptions{cluster: &clusterFlags{}, files: []string{"pod.yaml"}}
	if files.readsCluster(&snapshot.Snapshot{}) {
		t.Error("there is a cluster outside of a pod, without a kubeconfig")
	}

	t.Setenv("KUBERNETES_SERVICE_HOST", host)
	t.Setenv("KUBERNETES_SERVICE_PORT", port)
	said := make(chan string)
	go func() {
		defer close(said)
		runtime.LockOSThread() // the mount ends with the thread
		if err := mountServiceAccount(map[string][]byte{
			"token": []byte("secret"), "ca.crt": ca, "namespace": []byte("red"),
		}); err != nil {
			t.Error(err)
			return
		}
		if !files.readsCluster(&snapshot.Snapshot{}) {
			t.Error("files are a cluster of their own in a pod")
		}
		out, _, _ := run("", "version") // fails, as the server has no programs
		said <- out
	}()
	if out := <-said; !strings.Contains(out, "v1.99.1") {
		t.Errorf("xpuctl version in a pod:\n%s", out)
	}
}

// mountServiceAccount gives this thread the files of a ServiceAccount where a pod has them.
func mountServiceAccount(files map[string][]byte) error {
	const dir = "/var/run/secrets/kubernetes.io/serviceaccount"
	err := unix.Unshare(unix.CLONE_NEWNS)
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err == nil {
		err = unix.Mount("tmpfs", "/var/run", "tmpfs", 0, "")
	}
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	for name, content := range files {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), content, 0o600)
		}
	}
	return err
}
