// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// measureFailover measures how long no controller works after the leader was killed or stopped.
func measureFailover(ctx context.Context, b *bench) (out []Measurement, err error) {
	c, err := b.startCluster(ctx)
	if err != nil {
		return nil, err
	}

	for _, end := range []struct {
		what   string
		signal syscall.Signal
		goal   Goal
	}{
		{"leader killed, until another works", syscall.SIGKILL, atMost(15)},
		{"leader asked to end, until another works", syscall.SIGTERM, Goal{}},
	} {
		m := Measurement{What: end.what, Unit: Seconds, Goal: end.goal}
		for range b.runs(3) {
			took, err := b.failOver(ctx, c, end.signal)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", end.what, err)
			}
			m.Samples = append(m.Samples, took.Seconds())
		}

		out = append(out, m)
	}

	return out, nil
}

// failOver runs two controllers and ends the leader. The other works when a new DevicePool has its
// condition.
func (b *bench) failOver(
	ctx context.Context, c *cluster, signal syscall.Signal,
) (took time.Duration, err error) {
	leader, err := b.startReplica(ctx, c)
	if err != nil {
		return 0, err
	}

	ended := false
	defer func() {
		if !ended {
			err = errors.Join(err, leader.end())
		}
	}()

	if err := c.works(ctx, leader); err != nil {
		return 0, err
	}

	other, err := b.startReplica(ctx, c)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, other.end()) }()

	begin := time.Now()
	if err := leader.cmd.Process.Signal(signal); err != nil {
		return 0, err
	}

	<-leader.ended
	ended = true
	if err := c.works(ctx, other); err != nil {
		return 0, err
	}

	return time.Since(begin), nil
}

// startReplica starts a controller that works only as the leader, and waits until its caches are
// filled.
func (b *bench) startReplica(ctx context.Context, c *cluster) (*process, error) {
	probes, err := freeAddress()
	if err != nil {
		return nil, err
	}

	p, err := b.start(b.dir, "xpu-controller", "--kubeconfig="+c.controllerKubeconfig,
		"--namespace="+namespace, "--leader-elect",
		"--metrics-bind-address=0", "--health-probe-bind-address="+probes)
	if err != nil {
		return nil, err
	}

	if err := p.await(ctx, "is ready", func(ctx context.Context) error {
		return ready(ctx, probes)
	}); err != nil {
		return nil, errors.Join(err, p.end())
	}

	return p, nil
}

// ready returns nil if a controller's caches are filled.
func ready(ctx context.Context, address string) error {
	_, err := fetch(ctx, "http://"+address+"/readyz")
	return err
}

// works waits until the controller reports for a new DevicePool that no node has Functions of it.
func (c *cluster) works(ctx context.Context, controller *process) error {
	pool := &v1alpha1.DevicePool{
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"ffff"}}},
		},
	}

	pool.Name = "of-no-node"
	if err := c.client.Create(ctx, pool); err != nil {
		return err
	}

	err := controller.await(ctx, "leads", func(ctx context.Context) error {
		if err := c.client.Get(ctx, client.ObjectKeyFromObject(pool), pool); err != nil {
			return err
		}
		if meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionReady) == nil {
			return errors.New("a DevicePool has no condition")
		}
		return nil
	})

	return errors.Join(err, c.remove(ctx, pool))
}
