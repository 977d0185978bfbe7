// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"time"
)

// measureControllerMemory measures the memory of an idle controller in a cluster with some ports.
func measureControllerMemory(ctx context.Context, b *bench) (out []Measurement, err error) {
	c, err := b.startCluster(ctx)
	if err != nil {
		return nil, err
	}

	metrics, err := freeAddress()
	if err != nil {
		return nil, err
	}

	probes, err := freeAddress()
	if err != nil {
		return nil, err
	}

	m := Measurement{
		What: "controller, memory (RSS) idle", Unit: Bytes, Goal: lessThan(60e6),
	}
	for range b.runs(3) {
		resident, err := b.controllerOnce(ctx, c, metrics, probes)
		if err != nil {
			return nil, err
		}
		m.Samples = append(m.Samples, resident)
	}

	return []Measurement{m}, nil
}

func (b *bench) controllerOnce(
	ctx context.Context, c *cluster, metrics, probes string,
) (resident float64, err error) {
	p, err := b.start(b.dir, "xpu-controller", "--kubeconfig="+c.controllerKubeconfig,
		"--namespace="+namespace,
		"--metrics-bind-address="+metrics, "--health-probe-bind-address="+probes)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, p.end()) }()

	if err := p.await(ctx, "is ready", func(ctx context.Context) error {
		return ready(ctx, probes)
	}); err != nil {
		return 0, err
	}

	if err := sleep(ctx, 5*time.Second); err != nil {
		return 0, err
	}

	return p.resident()
}
