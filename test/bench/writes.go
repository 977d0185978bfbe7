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

// storyPods is how many pods the story has.
const storyPods = 4

// The steps of the story that matter here; the ones before runPods prepare for it.
const (
	runPods    = 4
	deletePods = 6
	storySteps = 7
)

// product are the users that write for the project. What the controller's election of a leader costs is not counted:
// its Lease, and the events in the project's own namespace by which client-go tells of it.
func product(w write) bool {
	election := w.ObjectRef.Namespace == namespace && (w.ObjectRef.Resource == "leases" || w.ObjectRef.Resource == "events")
	return strings.HasPrefix(w.User.Username, "system:serviceaccount:"+namespace+":xpu-") && !election
}

// others are those that write for a pod with a claim, whatever its driver.
func others(w write) bool {
	return !product(w) && slices.Contains([]string{"pods", "resourceclaims"}, w.ObjectRef.Resource)
}

// measureWrites lives the story of a few pods on a real cluster and counts what is written for it.
func measureWrites(ctx context.Context, b *bench) (out []Measurement, err error) {
	world := &story.World{
		Cluster:  story.Devcluster{Program: filepath.Join(b.bin, "devcluster"), Name: fmt.Sprintf("bench-%d", os.Getpid())},
		Source:   b.source,
		Bin:      b.bin,
		StateDir: filepath.Join(b.dir, "story"),
		Detail:   func(string, ...any) {},
	}
	defer func() { err = errors.Join(err, world.End(context.WithoutCancel(ctx))) }()
	steps := world.Steps()
	if len(steps) != storySteps {
		return nil, fmt.Errorf("the story has %d steps, not the %d that are known here", len(steps), storySteps)
	}
	for _, step := range steps[:runPods] {
		if err := step.Run(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", step.Title, err)
		}
	}
	idle := 10 * time.Second
	if b.quick {
		idle = 2 * time.Second
	}
	// Parts of the story, each with a time for what is written in the background.
	var writes [4][]write
	for i, part := range []func(context.Context) error{
		steps[runPods].Run,
		func(ctx context.Context) error { return sleep(ctx, idle) },
		func(ctx context.Context) error { return restartProduct(ctx, world.Cluster) },
		steps[deletePods].Run,
	} {
		if writes[i], err = writesDuring(ctx, world.Cluster, part); err != nil {
			return nil, err
		}
	}
	life := slices.Concat(writes[0], writes[3])
	return []Measurement{
		{
			What: "one pod's life, writes to the API", Unit: PerPod, Goal: atMost(4),
			Samples:   []float64{count(life, product) / storyPods},
			Reference: "by the rest of Kubernetes", ReferenceSamples: []float64{count(life, others) / storyPods},
			Details: kinds(life, product),
		},
		{What: fmt.Sprintf("%d pods idle for %s, writes", storyPods, idle), Unit: Count, Goal: atMost(0),
			Samples: []float64{count(writes[1], product)}, Details: kinds(writes[1], product)},
		{What: fmt.Sprintf("restart under %d pods, writes", storyPods), Unit: Count, Goal: atMost(0),
			Samples: []float64{count(writes[2], product)}, Details: kinds(writes[2], product)},
	}, nil
}

// settled is how long after a part of the story nothing is written for it any more.
const settled = 3 * time.Second

func writesDuring(ctx context.Context, c story.Devcluster, part func(context.Context) error) ([]write, error) {
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
	return writesSince(filepath.Join(cluster.Logs, "audit.log"), begin, func(write) bool { return true })
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
			counts[w.String()+" by "+w.User.Username[strings.LastIndexByte(w.User.Username, ':')+1:]]++
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
