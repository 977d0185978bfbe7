// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/e2e/story"
)

// lifePods is how many pods run, one after the other, to count the writes for one pod.
const lifePods = 4

// prepareSteps is how many steps of the story's first act start cluster, cards and product, and
// declare pools and networks.
const prepareSteps = 4

// newKinds is how often the garbage collector looks for new kinds (pkg/controller/garbagecollector
// in Kubernetes). Until then it deletes no XPUPorts, so that the controller must.
const newKinds = 30 * time.Second

// lifePod is a pod with one Function of a pool that provisions on Prepare, the default.
const lifePod = `
apiVersion: v1
kind: Pod
metadata: {name: life-%d}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: nic, resourceClaimTemplateName: blue}]
  containers:
  - {name: c, image: "devcluster.local/pause:1", imagePullPolicy: Never, args: [serve], resources: {claims: [{name: nic}]}}
`

// product reports whether the project made a write. It excludes leader election: the controller's
// Lease, and the events about it in the project's own namespace.
func product(w write) bool {
	election := w.ObjectRef.Namespace == namespace &&
		(w.ObjectRef.Resource == "leases" || w.ObjectRef.Resource == "events")
	return strings.HasPrefix(w.User.Username, "system:serviceaccount:"+namespace+":xpu-") &&
		!election
}

// others reports whether another component made a write for a pod with a claim, whatever its
// driver.
func others(w write) bool {
	return !product(w) && slices.Contains([]string{"pods", "resourceclaims"}, w.ObjectRef.Resource)
}

// measureWrites lets a few pods live on a real cluster and counts what is written for them.
func measureWrites(ctx context.Context, b *bench) (out []Measurement, err error) {
	world := &story.World{
		Cluster: story.Devcluster{
			Program: filepath.Join(b.bin, "devcluster"), Name: fmt.Sprintf("bench-%d", os.Getpid()),
		},
		Source:   b.source,
		Bin:      b.bin,
		StateDir: filepath.Join(b.dir, "story"),
		Detail:   func(string, ...any) {},
	}

	defer func() { err = errors.Join(err, world.End(context.WithoutCancel(ctx))) }()
	for _, step := range world.Acts()[0].Steps[:prepareSteps] {
		if err := step.Run(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", step.Title, err)
		}
	}

	idle := newKinds + settled
	if b.quick {
		idle = 2 * time.Second
	}
	if err := sleep(ctx, idle); err != nil {
		return nil, err
	}

	manifest := filepath.Join(b.dir, "life.yaml")
	// Parts of the life, each with a time for what is written in the background.
	var writes [4][]write
	for i, part := range []func(context.Context) error{
		func(ctx context.Context) error { return startPods(ctx, world.Cluster, manifest) },
		func(ctx context.Context) error { return sleep(ctx, idle) },
		func(ctx context.Context) error { return restartProduct(ctx, world.Cluster) },
		func(ctx context.Context) error {
			_, err := world.Cluster.Kubectl(ctx, "delete", "-f", manifest)
			return err
		},
	} {
		if writes[i], err = writesDuring(ctx, world.Cluster, part); err != nil {
			return nil, err
		}
	}

	life := slices.Concat(writes[0], writes[3])
	return []Measurement{
		{
			What: "one pod's life, writes to the API", Unit: PerPod, Goal: atMost(4),
			Samples:          []float64{count(life, product) / lifePods},
			Reference:        "by the rest of Kubernetes",
			ReferenceSamples: []float64{count(life, others) / lifePods},
			Details:          kinds(life, product),
		},
		{What: fmt.Sprintf("%d pods idle for %s, writes", lifePods, idle), Unit: Count,
			Goal:    atMost(0),
			Samples: []float64{count(writes[1], product)}, Details: kinds(writes[1], product)},
		{What: fmt.Sprintf("restart under %d pods, writes", lifePods), Unit: Count, Goal: atMost(0),
			Samples: []float64{count(writes[2], product)}, Details: kinds(writes[2], product)},
	}, nil
}

// startPods makes the pods and waits until all are ready.
func startPods(ctx context.Context, c story.Devcluster, manifest string) error {
	var pods strings.Builder
	for n := range lifePods {
		fmt.Fprintf(&pods, "---"+lifePod, n)
	}

	if err := os.WriteFile(manifest, []byte(pods.String()), 0o600); err != nil {
		return err
	}

	for _, args := range [][]string{
		{"apply", "-f", manifest},
		{"wait", "--for=condition=Ready", "--timeout=60s", "-f", manifest},
	} {
		if _, err := c.Kubectl(ctx, args...); err != nil {
			return err
		}
	}

	return nil
}

// settled is how long after a part of the story nothing is written for it any more.
const settled = 3 * time.Second

func writesDuring(
	ctx context.Context, c story.Devcluster, part func(context.Context) error,
) ([]write, error) {
	begin := time.Now()
	if err := part(ctx); err != nil {
		return nil, err
	}
	if err := sleep(ctx, settled); err != nil {
		return nil, err
	}

	cluster, err := c.Inspect(ctx)
	if err != nil {
		return nil, err
	}

	return writesSince(filepath.Join(cluster.Logs, "audit.log"), begin, func(write) bool {
		return true
	})
}

// restartProduct replaces the pods of agents and controller and waits until the new ones are ready.
func restartProduct(ctx context.Context, c story.Devcluster) error {
	for _, args := range [][]string{
		{"delete", "pods", "--all"},
		{"rollout", "status", "daemonset/xpu-agent", "--timeout=60s"},
		{"rollout", "status", "deployment/xpu-controller", "--timeout=60s"},
	} {
		if _, err := c.Kubectl(ctx, append([]string{"-n", namespace}, args...)...); err != nil {
			return err
		}
	}
	return nil
}

func count(writes []write, which func(write) bool) (n float64) {
	for _, w := range writes {
		if which(w) {
			n++
		}
	}
	return n
}

// kinds says what the writes were, most frequent first: "8 patch xpuports/status".
func kinds(writes []write, which func(write) bool) (out []string) {
	counts := map[string]int{}
	for _, w := range writes {
		if which(w) {
			counts[w.String()+" by "+w.User.Username[strings.LastIndexByte(w.User.Username, ':')+
				1:]]++
		}
	}

	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return strings.Compare(a, b)
	})

	for _, name := range names {
		out = append(out, fmt.Sprintf("%d %s", counts[name], name))
	}

	return out
}
