// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// measurePublish measures the time from the start of the agent's program on a new node until all
// its VFs are in ResourceSlices.
func measurePublish(ctx context.Context, b *bench) (out []Measurement, err error) {
	sizes := []int{64, 256, 1024}
	if b.quick {
		sizes = []int{64}
	}

	c, err := b.startCluster(ctx)
	if err != nil {
		return nil, err
	}

	for _, vfs := range sizes {
		m, err := b.publishMany(ctx, c, vfs)
		if err != nil {
			return nil, fmt.Errorf("%d VFs: %w", vfs, err)
		}
		out = append(out, m)
	}

	return out, nil
}

func (b *bench) publishMany(ctx context.Context, c *cluster, vfs int) (m Measurement, err error) {
	h, err := b.newHost(ctx, vfs)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, h.close()) }()

	m = Measurement{What: fmt.Sprintf("start to %d VFs published", vfs), Unit: Seconds}
	if vfs == 1024 {
		m.Goal = lessThan(0.5)
	}

	for round := range b.runs(7) + b.warmUp() {
		took, published, err := b.publishOnce(ctx, c, h)
		if err != nil {
			return m, err
		}
		if round < b.warmUp() {
			continue // the first run loads the program and the tree into memory
		}

		m.Samples = append(m.Samples, took.Seconds())
		bare, err := c.createBare(ctx, published)
		if err != nil {
			return m, err
		}

		m.Reference = fmt.Sprintf("create the %d slices", len(published))
		m.ReferenceSamples = append(m.ReferenceSamples, bare.Seconds())
	}

	return m, nil
}

// publishOnce runs the agent once.
func (b *bench) publishOnce(
	ctx context.Context, c *cluster, h *host,
) (took time.Duration, published []resourceapi.ResourceSlice, err error) {
	if err := errors.Join(h.clear(), c.reset(ctx)); err != nil {
		return 0, nil, err
	}

	before, err := c.slices(ctx)
	if err != nil {
		return 0, nil, err
	}

	events, err := c.clientset.ResourceV1().ResourceSlices().Watch(ctx,
		metav1.ListOptions{ResourceVersion: before.ResourceVersion})
	if err != nil {
		return 0, nil, err
	}
	defer events.Stop()

	begin := time.Now()
	a, err := b.startAgent(c, h)
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, a.end()) }()

	if err := a.watchSlices(ctx, events, h.vfs); err != nil {
		return 0, nil, err
	}

	took = time.Since(begin)
	// Later events must not remove devices either.
	if err := a.await(ctx, "publishes", a.published(h.vfs)); err != nil {
		return 0, nil, err
	}

	list, err := c.slices(ctx)
	return took, list.Items, err
}

// watchSlices returns when all devices are published. It is an error if their number ever
// decreases.
func (a *agent) watchSlices(ctx context.Context, events watch.Interface, devices int) error {
	seen := map[string]int{}
	total := 0
	for total < devices {
		select {
		case event, open := <-events.ResultChan():
			if !open {
				return errors.New("the watch of ResourceSlices ended")
			}

			slice, ok := event.Object.(*resourceapi.ResourceSlice)
			if !ok {
				return fmt.Errorf("watch of ResourceSlices: %v", event.Object)
			}

			now := len(slice.Spec.Devices)
			if event.Type == watch.Deleted {
				now = 0
			}
			if now == 0 || now < seen[slice.Name] {
				return fmt.Errorf("ResourceSlice %s: %s with %d devices, it had %d", slice.Name,
					event.Type, now, seen[slice.Name])
			}

			total += now - seen[slice.Name]
			seen[slice.Name] = now
		case <-a.ended:
			return a.died()
		case <-time.After(30 * time.Second):
			return fmt.Errorf("%d of %d devices after 30s:\n%s", total, devices, a.lastWords())
		case <-ctx.Done():
			return ctx.Err()
		}
	}

	return nil
}

// createBare creates the same slices for another driver with a bare client, one after the other.
func (c *cluster) createBare(
	ctx context.Context, slices []resourceapi.ResourceSlice,
) (time.Duration, error) {
	if err := c.deleteSlices(ctx); err != nil {
		return 0, err
	}

	client := c.clientset.ResourceV1().ResourceSlices()
	begin := time.Now()

	for _, slice := range slices {
		copied := &resourceapi.ResourceSlice{Spec: slice.Spec}
		copied.GenerateName = slice.GenerateName
		copied.OwnerReferences = slice.OwnerReferences
		if _, err := client.Create(ctx, copied, metav1.CreateOptions{}); err != nil {
			return 0, err
		}
	}

	return time.Since(begin), nil
}

// measureRestart counts the writes of a restarted agent, and of an idle one.
func measureRestart(ctx context.Context, b *bench) (out []Measurement, err error) {
	vfs, idle := 1024, 10*time.Second
	if b.quick {
		vfs, idle = 64, 2*time.Second
	}

	c, err := b.startCluster(ctx)
	if err != nil {
		return nil, err
	}

	h, err := b.newHost(ctx, vfs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.close()) }()

	if _, _, err := b.publishOnce(ctx, c, h); err != nil {
		return nil, err
	}

	restart := Measurement{
		What: fmt.Sprintf("restart with %d VFs, writes", vfs), Unit: Count, Goal: atMost(0),
	}
	quiet := Measurement{
		What: fmt.Sprintf("idle for %s, writes", idle), Unit: Count, Goal: atMost(0),
	}
	memory := Measurement{What: fmt.Sprintf("agent with %d VFs, memory (RSS) idle", vfs),
		Unit: Bytes, Goal: lessThan(50e6)}
	for range b.runs(3) {
		writes, idleWrites, resident, err := b.restartOnce(ctx, c, h, idle)
		if err != nil {
			return nil, err
		}
		restart.Samples = append(restart.Samples, writes)
		quiet.Samples = append(quiet.Samples, idleWrites)
		memory.Samples = append(memory.Samples, resident)
	}

	return []Measurement{restart, quiet, memory}, nil
}

func (b *bench) restartOnce(
	ctx context.Context, c *cluster, h *host, idle time.Duration,
) (writes, idleWrites, resident float64, err error) {
	before, err := c.slices(ctx)
	if err != nil {
		return 0, 0, 0, err
	}

	begin := time.Now()
	a, err := b.startAgent(c, h)
	if err != nil {
		return 0, 0, 0, err
	}
	defer func() { err = errors.Join(err, a.end()) }()

	if err := a.await(ctx, "publishes", a.published(h.vfs)); err != nil {
		return 0, 0, 0, err
	}
	// The agent has published the slices, but the helper that compares them with the cluster's is
	// still running.
	if err := sleep(ctx, 5*time.Second); err != nil {
		return 0, 0, 0, err
	}

	quiet := time.Now()
	if resident, err = a.resident(); err != nil {
		return 0, 0, 0, err
	}
	if err := sleep(ctx, idle); err != nil {
		return 0, 0, 0, err
	}

	all, err := writesSince(c.auditLog(), begin, func(w write) bool {
		return w.User.Username == agentUser
	})
	if err != nil {
		return 0, 0, 0, err
	}

	for _, w := range all {
		if w.RequestReceivedTimestamp.Before(quiet) {
			writes++
		} else {
			idleWrites++
		}
	}

	after, err := c.slices(ctx)
	if err == nil && after.ResourceVersion != before.ResourceVersion && len(all) == 0 {
		err = checkVersions(before.Items, after.Items)
	}

	return writes, idleWrites, resident, err
}

// checkVersions compares the resource versions of the slices as a second check.
func checkVersions(before, after []resourceapi.ResourceSlice) error {
	versions := map[string]string{}
	for _, slice := range before {
		versions[slice.Name] = slice.ResourceVersion
	}

	for _, slice := range after {
		if versions[slice.Name] != slice.ResourceVersion {
			return fmt.Errorf("ResourceSlice %s was written, but the audit log does not tell",
				slice.Name)
		}
	}

	return nil
}
