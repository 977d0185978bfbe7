// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// waitForBaseline waits until everything is as before all pods. The ResourceSlices may have been
// written meanwhile.
func (w *World) waitForBaseline(ctx context.Context) error {
	// A Function that was refused stays tainted for a minute.
	return poll(ctx, 90*time.Second, "everything is as it was", func(ctx context.Context) error {
		now, err := w.snapshot(ctx)
		if err != nil {
			return err
		}

		now.SliceVersions = w.baseline.SliceVersions
		if difference := w.baseline.Diff(now); difference != "" {
			return fmt.Errorf("differs (- before, + now):\n%s", difference)
		}
		return nil
	})
}

// removePod deletes a pod with its claims and waits until both are gone.
func (w *World) removePod(ctx context.Context, name string) error {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	if err := w.client.Delete(ctx, pod); err != nil {
		return err
	}
	if _, err := w.Cluster.Kubectl(ctx, "delete", "resourceclaim", name+"-nic-0",
		"--wait=false"); err != nil {
		return err
	}

	return poll(ctx, goneTime, "pod "+name+" is gone", func(ctx context.Context) error {
		err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: name}, pod)
		if !apierrors.IsNotFound(err) {
			return errors.Join(errors.New("it is still there"), err)
		}
		return nil
	})
}

// stopProcess ends a process that the story started.
func (w *World) stopProcess(ctx context.Context, name string, signal syscall.Signal) error {
	i := slices.IndexFunc(w.processes, func(p process) bool { return p.Name == name })
	if i < 0 {
		return fmt.Errorf("%s does not run", name)
	}
	if err := syscall.Kill(w.processes[i].PID, signal); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}

	_ = w.running[i].Wait()
	w.processes, w.running = slices.Delete(w.processes, i, i+1), slices.Delete(w.running, i, i+1)

	return nil
}

// rebootCard simulates a reboot of the card: it stops the OPI agent, removes what the agent
// created, and starts it again.
func (w *World) rebootCard(ctx context.Context, x *xpu) error {
	name := "opi-bridge-" + x.node.Name
	if err := w.stopProcess(ctx, name, syscall.SIGKILL); err != nil {
		return err
	}
	if err := errors.Join(x.removeBridges(),
		os.Remove(filepath.Join(w.dir, name+".db"))); err != nil {
		return err
	}
	return w.startBridge(ctx, x)
}

// killAgent kills a node's xpu-agent. The kubelet would restart it with growing delays, so the pod
// is deleted too, and the DaemonSet creates another.
func (w *World) killAgent(ctx context.Context, node string) error {
	pids, err := w.agentsOf(node)
	if err != nil {
		return err
	}

	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}

	_, err = w.Cluster.Kubectl(ctx, "-n", namespace, "delete", "pod", "--wait=false",
		"--grace-period=0", "--force",
		"-l", "app.kubernetes.io/name=xpu-agent", "--field-selector", "spec.nodeName="+node)
	return err
}

// agentsOf returns the processes of a node's agent: those named xpu-agent in the node's network
// namespace.
func (w *World) agentsOf(node string) ([]int, error) {
	i := slices.IndexFunc(w.cluster.Nodes, func(n Node) bool { return n.Name == node })
	want, err := os.Readlink(w.cluster.Nodes[i].NetNS)
	if err != nil {
		return nil, err
	}

	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}

	var pids []int
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}

		command, _ := os.ReadFile(filepath.Join("/proc", entry.Name(), "comm"))
		netNS, _ := os.Readlink(filepath.Join("/proc", entry.Name(), "ns/net"))
		if strings.TrimSpace(string(command)) == "xpu-agent" && netNS == want {
			pids = append(pids, pid)
		}
	}

	return pids, nil
}

// removeBridges removes what an OPI agent created for its networks.
func (x *xpu) removeBridges() error {
	links, err := x.links.LinkList()
	if err != nil {
		return err
	}

	var errs []error
	for _, l := range links {
		if kind := l.Type(); kind == "bridge" || kind == "vxlan" {
			errs = append(errs, x.links.LinkDel(l))
		}
	}

	return errors.Join(errs...)
}

// Diagnose collects what a person would check first.
func (w *World) Diagnose(ctx context.Context) string {
	var out strings.Builder
	for _, args := range [][]string{
		{"get", "pods,resourceclaims,xpuports,xpunetworks,xpus,devicepools", "-A", "-o", "wide"},
		{"get", "events", "-n", "default", "--sort-by=.lastTimestamp"},
		{"-n", namespace, "logs", "-l", "app.kubernetes.io/name=xpu-agent", "--tail=60",
			"--prefix"},
		{"-n", namespace, "logs", "-l", "app.kubernetes.io/name=xpu-controller", "--tail=60"},
	} {
		text, err := w.Cluster.Kubectl(ctx, args...)
		fmt.Fprintf(&out, "$ kubectl %s\n%s\n", strings.Join(args, " "), text)
		if err != nil {
			fmt.Fprintln(&out, err)
		}
	}

	return out.String()
}
