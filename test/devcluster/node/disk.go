// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/component"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/mount"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/network"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

// enter turns the current namespaces, copies of the cluster's, into a node's. dir is the node's
// directory as seen by the cluster.
func enter(dir state.NodeDir, c Config) error {
	if err := mount.Proc(); err != nil {
		return err
	}

	if err := mount.FreshRun(map[string]string{
		string(dir):          string(Own),
		component.Kubernetes: component.Kubernetes,
		component.Runtime:    component.Runtime,
		component.Plugins:    component.Plugins,
		Images:               Images,
	}); err != nil {
		return err
	}

	if err := mountDisk(); err != nil {
		return err
	}
	if err := mount.Sysfs(); err != nil {
		return err
	}
	if err := mount.ShieldSettings(Own.Settings()); err != nil {
		return err
	}
	if err := mount.BootID(Own.Settings(), c.BootID); err != nil {
		return err
	}

	if c.CRIO {
		if err := mount.HideControllers(Own.Settings()); err != nil {
			return err
		}
	}

	if err := unix.Sethostname([]byte(c.Name)); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if err := network.Loopback(); err != nil {
		return err
	}

	// This comes last, because namespaces made from this one must not see the mounts above partly.
	return mount.Shared()
}

// mountDisk creates the node's own directories. /etc and /opt start as copies of the machine's,
// /var/lib and /var/log empty. The rest of the file system is the machine's.
func mountDisk() error {
	disk := Own.Disk()
	for name, target := range map[string]string{"var-lib": "/var/lib", "var-log": "/var/log"} {
		source := filepath.Join(disk, name)
		if err := os.MkdirAll(source, 0o755); err != nil {
			return err
		}
		if err := mount.Bind(source, target); err != nil {
			return err
		}
	}

	if err := mount.Overlay("/etc", filepath.Join(disk, "etc"), "/etc"); err != nil {
		return err
	}
	if err := mount.Overlay("/opt", filepath.Join(disk, "opt"), "/opt"); err != nil {
		return err
	}

	// Of two plugins with the same name, the first is used.
	return mount.Overlay(component.Plugins+":"+component.Runtime+"/usr/lib/cni",
		filepath.Join(disk, "cni"), "/opt/cni/bin")
}

// provision writes the node's configuration once for its disk, so that changes by pods persist. It
// returns false if that was done before.
func provision(c Config) (bool, error) {
	if _, err := os.Stat(Own.Provisioned()); !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}

	// The machine may be a node of a real cluster, whose configuration must not be inherited.
	for _, dir := range []string{"/etc/cni", "/etc/cdi", "/etc/containerd", "/etc/containers",
		"/etc/crio", "/etc/kubernetes"} {
		if err := os.RemoveAll(dir); err != nil {
			return false, err
		}
	}

	files, err := c.Files()
	if err != nil {
		return false, err
	}

	files[component.MachineID] = []byte(c.MachineID + "\n")
	identities := map[string]string{
		"ca.crt":             filepath.Join(component.NodePKI, "ca.crt"),
		"kubelet.crt":        filepath.Join(component.NodePKI, "kubelet.crt"),
		"kubelet.key":        filepath.Join(component.NodePKI, "kubelet.key"),
		"kubelet.kubeconfig": component.KubeletKubeconfig,
	}

	if c.Multus {
		identities["multus.kubeconfig"] = component.MultusKubeconfig
	}

	if c.KubeProxy {
		identities["kube-proxy.kubeconfig"] = component.ProxyKubeconfig
	}

	for name, target := range identities {
		if files[target], err = os.ReadFile(filepath.Join(Own.PKI(), name)); err != nil {
			return false, err
		}
	}

	for path, content := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return false, err
		}
		// A link would lead out of the overlay, or, for machine-id, to another file.
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
		if err := os.WriteFile(path, content, fileMode(path)); err != nil {
			return false, err
		}
	}

	return true, os.MkdirAll("/etc/cdi", 0o755)
}

func fileMode(path string) os.FileMode {
	if path == component.MachineID || path == component.PodNetwork || path == component.Multus {
		return 0o644
	}
	return 0o600
}
