// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// largestAnnotations is the maximum size of an object's annotations in bytes
// (TotalAnnotationSizeLimitB of k8s.io/apimachinery/pkg/api/validation), without the name of one.
const largestAnnotations = 255 << 10

// peakSize matches the maximum memory of a process (proc_pid_status(5)).
var peakSize = regexp.MustCompile(`VmHWM:\s+([0-9]+) kB`)

// measureLargest measures the controller's memory if a user fills a namespace with the largest
// claims that the API server accepts, for another driver.
func measureLargest(ctx context.Context, b *bench) (out []Measurement, err error) {
	count := 1200
	if b.quick {
		count = 24
	}

	s, err := b.newSite(ctx, "largest", 1, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.end(ctx)) }()

	create := func(ctx context.Context, i int) error {
		return s.client.Create(ctx, largestClaim(i))
	}
	if err := s.each(ctx, count, create); err != nil {
		return nil, err
	}

	defer func() {
		remove := func(ctx context.Context, i int) error {
			return s.client.Delete(ctx, largestClaim(i))
		}
		err = errors.Join(err, s.each(context.WithoutCancel(ctx), count, remove))
	}()

	memory := Measurement{
		What: fmt.Sprintf("controller, memory (peak), %d claims of others with 255 kB each", count),
		Unit: Bytes, Goal: atMost(200e6),
	}

	for range b.runs(3) {
		peak, err := b.peakOnce(ctx, s)
		if err != nil {
			return nil, err
		}
		memory.Samples = append(memory.Samples, peak)
	}

	return []Measurement{memory}, nil
}

// peakOnce starts a controller, waits until it has read everything and serves a Port, and ends it.
func (b *bench) peakOnce(ctx context.Context, s *site) (peak float64, err error) {
	controller, err := b.startScaled(s.cluster)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, controller.end()) }()

	if err := s.claim(ctx, 1); err != nil {
		return 0, err
	}
	if err := s.up(ctx, controller.process, len(s.claims)); err != nil {
		return 0, err
	}
	if err := pauseWith(ctx, controller.process, 5*time.Second); err != nil {
		return 0, err
	}

	return kilobytes(controller.cmd.Process.Pid, "status", peakSize)
}

func largestClaim(i int) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: fmt.Sprintf("of-others-%d", i),
			Annotations: map[string]string{
				"example.com/a": strings.Repeat("a", largestAnnotations),
			},
		},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name:    "gpu",
			Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.example.com"},
		}}}},
	}
}
