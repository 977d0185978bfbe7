// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/e2e/story"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// TestQuickstart runs scripts/quickstart on a cluster as it comes, up and down, and between them the
// commands of the tutorial.
func TestQuickstart(t *testing.T) {
	world := newWorld(t)
	needs.Built(t, filepath.Join(world.Bin, "images", "quickstart.tar"), "quickstart-images")
	world.Cluster.Name = "quickstart"
	_, err := world.Cluster.Run(t.Context(), "up", "--nodes", "2")
	must.Succeed(t, err)
	t.Cleanup(func() {
		_, err := world.Cluster.Run(context.Background(), "down")
		must.Succeed(t, err)
	})

	cluster, err := world.Cluster.Inspect(t.Context())
	must.Succeed(t, err)
	objects, files := objectsOf(t, world.Cluster), filesOf(t, cluster)

	out := quickstart(t, world, "up", "--built")
	for _, want := range []string{
		"not for nodes that matter", "blue-1 to blue-2: 10.10.0.", "because that is in another network",
		"It works.",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q", want)
		}
	}

	quickstart(t, world, "up", "--built") // again, which changes nothing

	must.Succeed(t, world.Attach(t.Context()))
	k := &kept{World: world}
	k.follow(t, "docs/tutorial/quickstart.md", k.workplace(t))

	quickstart(t, world, "down")
	if left := without(objectsOf(t, world.Cluster), objects); len(left) > 0 {
		t.Errorf("in the cluster are left %q", left)
	}
	if left := without(filesOf(t, cluster), files); len(left) > 0 {
		t.Errorf("on the nodes are left %q", left)
	}
	if out := quickstart(t, world, "down"); !strings.Contains(out, "nothing of the quickstart") {
		t.Errorf("a second time it says %s", out)
	}
}

// quickstart runs the script and returns what it prints.
func quickstart(t *testing.T, world *story.World, args ...string) string {
	t.Helper()
	args = append(args, "--provider=devcluster", "--name=quickstart", "--yes")
	cmd := exec.CommandContext(t.Context(), filepath.Join(world.Source, "scripts/quickstart"), args...)
	cmd.Env = append(os.Environ(),
		"PATH="+filepath.Join(world.Bin, "kubernetes")+":"+os.Getenv("PATH"))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	t.Logf("scripts/quickstart %s\n%s", strings.Join(args, " "), out.String())
	must.Succeed(t, err)
	return out.String()
}

// without returns what is in a list and was not in another.
func without(now, before []string) []string {
	return slices.DeleteFunc(slices.Clone(now), func(one string) bool {
		return slices.Contains(before, one)
	})
}

// objectsOf lists what the quickstart could leave in the cluster.
func objectsOf(t *testing.T, cluster story.Devcluster) []string {
	t.Helper()
	out, err := cluster.Kubectl(t.Context(), "get", "--all-namespaces", "--output=name",
		"namespaces,crds,clusterroles,clusterrolebindings,deviceclasses,resourceslices,"+
			"validatingadmissionpolicies,validatingadmissionpolicybindings,priorityclasses,"+
			"pods,daemonsets,deployments,services,roles,rolebindings")
	must.Succeed(t, err)
	return strings.Split(strings.TrimSpace(out), "\n")
}

// filesOf lists the places of the nodes where the quickstart puts files, and their links. What the
// CNI plugin of the cluster makes for the first pod is not in it.
func filesOf(t *testing.T, cluster story.Cluster) (all []string) {
	t.Helper()
	for _, node := range cluster.Nodes {
		for _, dir := range []string{
			"opt/cni/bin", "var/lib", "var/lib/kubelet/plugins", "var/run/cdi", "etc", "sys/class/net",
		} {
			entries, err := os.ReadDir(filepath.Join(node.Root, dir))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
			for _, entry := range entries {
				path := filepath.Join(dir, entry.Name())
				if path != "var/lib/cni" && path != "sys/class/net/cni0" {
					all = append(all, node.Name+": "+path)
				}
			}
		}
	}
	return all
}
