// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// gangPods are the pods of two gangs. A pod of gang stuck asks for a network that does not exist.
var gangPods = []struct{ gang, name, node, template string }{
	{"stuck", "stuck-0", "node1", "blue-careful"},
	{"stuck", "stuck-1", "node2", "nowhere"},
	{"train", "train-0", "node1", "two-rails"},
	{"train", "train-1", "node2", "two-rails"},
}

// runGangs shows a gang whose pods are bound together, and one that cannot be whole.
func (w *World) runGangs(ctx context.Context) error {
	kinds, err := w.Cluster.Kubectl(ctx, "api-resources", "--api-group=scheduling.k8s.io",
		"--output=name")
	if err != nil {
		return err
	}
	if !strings.Contains(kinds, "podgroups.") {
		w.Detail("this Kubernetes has no PodGroups")
		return nil
	}

	manifest := filepath.Join(w.Source, "test/e2e/manifests/gang.yaml")
	if _, err := w.Cluster.Kubectl(ctx, "apply", "-f", manifest); err != nil {
		return err
	}
	if err := w.bindGangs(ctx); err != nil {
		return err
	}

	names := []string{"delete", "pods", "--wait=false"}
	for _, p := range gangPods {
		names = append(names, p.name)
	}
	if _, err := w.Cluster.Kubectl(ctx, names...); err != nil {
		return err
	}
	if _, err := w.Cluster.Kubectl(ctx, "delete", "-f", manifest, "--timeout=60s"); err != nil {
		return err
	}
	return w.waitForBaseline(ctx)
}

// bindGangs creates the pods of the gangs, and waits until one gang runs and the other says what it
// lacks.
func (w *World) bindGangs(ctx context.Context) error {
	watching, stop := context.WithTimeout(ctx, 90*time.Second)
	defer stop()
	watcher, err := newWatcher(watching, w.client, "default")
	if err != nil {
		return err
	}
	defer watcher.stop()

	begin := time.Now()
	for _, p := range gangPods {
		pod := podSpec{name: p.name, node: p.node, template: p.template}.pod()
		pod.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To(p.gang)}
		if err := w.client.Create(ctx, pod); err != nil {
			return err
		}
	}

	together := []string{"train-0", "train-1"}
	if err := watcher.wait(watching, "Ready", together,
		func(_ corev1.Pod, _ bool, life Life) bool { return !life.Ready.IsZero() }); err != nil {
		return errors.Join(err, w.explain(ctx, together[0]))
	}
	for _, name := range together {
		life := *watcher.lives[name]
		w.Detail("gang train: %s has 2 VFs, bound %s, Ready %s", name,
			life.Bound.Sub(begin).Round(time.Millisecond),
			life.Ready.Sub(begin).Round(time.Millisecond))
	}

	for name, want := range map[string]string{
		"stuck-0": "waits for 1 of 2 claims of gang stuck", "stuck-1": "XPUNetwork nowhere does not exist",
	} {
		if err := w.explainsGang(ctx, name, want); err != nil {
			return err
		}
		if life := *watcher.lives[name]; !life.Bound.IsZero() {
			return fmt.Errorf("pod %s is bound, but its gang is not whole", name)
		}
	}
	return nil
}

// explainsGang waits until "xpuctl explain" says about a pod of a gang what it waits for.
func (w *World) explainsGang(ctx context.Context, pod, want string) error {
	var out string
	err := poll(ctx, 30*time.Second, "xpuctl explain says what "+pod+" waits for",
		func(ctx context.Context) error {
			// It ends with an error for a pod that waits.
			out, _ = w.xpuctl(ctx, "explain", "pod", pod, "--namespace=default")
			if !strings.Contains(out, want) {
				return errors.New("it says\n" + out)
			}
			return nil
		})
	if err != nil {
		return err
	}
	first, _, _ := strings.Cut(out, "\n")
	w.Detail("gang stuck: %s", first)
	return nil
}
