// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// register connects to the driver through its registration socket, like the kubelet.
func (h *host) register(ctx context.Context) (*kubelettest.DRADriver, error) {
	return kubelettest.RegisterDRADriver(ctx, h.path("kubelet"), v1alpha1.GroupName)
}

// prepare prepares one claim, like the kubelet for a pod with one claim.
func prepare(
	ctx context.Context, driver *kubelettest.DRADriver, c *resourceapi.ResourceClaim,
) error {
	devices, err := driver.Prepare(ctx, c)
	if err == nil && len(devices) != 1 {
		err = fmt.Errorf("%d devices", len(devices))
	}
	if err != nil {
		return fmt.Errorf("prepare claim %s: %w", c.Name, err)
	}
	return nil
}

// measurePrepare measures how long the kubelet waits for a claim whose Port is up already.
func measurePrepare(ctx context.Context, b *bench) (out []Measurement, err error) {
	one, many := 100, 64
	if b.quick {
		one, many = 4, 4
	}

	c, err := b.startCluster(ctx)
	if err != nil {
		return nil, err
	}

	h, err := b.newHost(ctx, 256)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.close()) }()

	if err := c.reset(ctx); err != nil {
		return nil, err
	}

	stopRuntime, err := h.startRuntime()
	if err != nil {
		return nil, err
	}
	defer stopRuntime()

	a, err := b.startAgent(c, h)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.end()) }()

	if err := a.await(ctx, "publishes", a.published(h.vfs)); err != nil {
		return nil, err
	}

	driver, err := h.register(ctx)
	if err != nil {
		return nil, err
	}
	defer driver.Close()

	claims, err := c.makeClaims(ctx, h, max(one, many)+1)
	if err != nil {
		return nil, err
	}

	// An agent that has seen the last Port has seen all.
	last := claims[len(claims)-1]
	if err := errors.Join(prepare(ctx, driver, last), driver.Unprepare(ctx, last)); err != nil {
		return nil, err
	}

	alone, err := b.prepareAlone(ctx, c, h, driver, claims[:one])
	if err != nil {
		return nil, err
	}

	together, err := b.prepareTogether(ctx, driver, claims[:many])
	return []Measurement{alone, together}, err
}

// prepareAlone prepares one claim after the other.
func (b *bench) prepareAlone(
	ctx context.Context, c *cluster, h *host, driver *kubelettest.DRADriver,
	claims []*resourceapi.ResourceClaim,
) (m Measurement, err error) {
	m = Measurement{What: "Prepare a claim", Unit: Seconds, Reference: "GET the claim, sync 4 kB",
		Goal: lessThan(0.010)}
	file, err := os.Create(filepath.Join(h.path("state"), "reference"))
	if err != nil {
		return m, err
	}
	defer file.Close()

	for _, one := range claims {
		took, err := timed(func() error { return prepare(ctx, driver, one) })
		if err != nil {
			return m, err
		}

		m.Samples = append(m.Samples, took.Seconds())
		reference, err := timed(func() error {
			if _, err := c.clientset.ResourceV1().ResourceClaims(one.Namespace).Get(ctx, one.Name,
				metav1.GetOptions{}); err != nil {
				return err
			}
			_, err := writeAndSync(file, 1)
			return err
		})

		if err != nil {
			return m, err
		}

		m.ReferenceSamples = append(m.ReferenceSamples, reference.Seconds())
		if err := driver.Unprepare(ctx, one); err != nil {
			return m, err
		}
	}

	return m, nil
}

// prepareTogether prepares all claims at once, each in a separate call, like for as many pods. The
// result is the time from the first call to the last answer, divided by the number of claims.
func (b *bench) prepareTogether(
	ctx context.Context, driver *kubelettest.DRADriver, claims []*resourceapi.ResourceClaim,
) (m Measurement, err error) {
	m = Measurement{What: fmt.Sprintf("Prepare %d claims at once, each", len(claims)),
		Unit: Seconds, Goal: lessThan(0.010)}
	for range b.runs(5) {
		errs := make([]error, len(claims))
		var group sync.WaitGroup
		begin := time.Now()

		for i, one := range claims {
			group.Go(func() { errs[i] = prepare(ctx, driver, one) })
		}

		group.Wait()
		m.Samples = append(m.Samples, time.Since(begin).Seconds()/float64(len(claims)))

		for _, one := range claims {
			errs = append(errs, driver.Unprepare(ctx, one))
		}
		if err := errors.Join(errs...); err != nil {
			return m, err
		}
	}

	return m, nil
}

// makeClaims creates claims with an allocated VF each, and their Ports.
func (c *cluster) makeClaims(
	ctx context.Context, h *host, n int,
) (claims []*resourceapi.ResourceClaim, err error) {
	for _, f := range h.functions {
		if f.Index < 0 || len(claims) == n {
			continue
		}

		one, err := c.makeClaim(ctx, f, fmt.Sprintf("claim-%d", len(claims)))
		if err != nil {
			return nil, err
		}
		if err := c.makePort(ctx, f, one, len(claims)); err != nil {
			return nil, err
		}

		claims = append(claims, one)
	}

	if len(claims) < n {
		return nil, fmt.Errorf("%d VFs for %d claims", len(claims), n)
	}

	return claims, nil
}

const request = "nic"

// makeClaim creates and allocates a claim, like user and scheduler.
func (c *cluster) makeClaim(
	ctx context.Context, f simulate.Function, name string,
) (*resourceapi.ResourceClaim, error) {
	client := c.clientset.ResourceV1().ResourceClaims(metav1.NamespaceDefault)
	made := &resourceapi.ResourceClaim{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{
			{Name: request, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "xpu"}},
		},
	}}}

	made.Name = name
	made, err := client.Create(ctx, made, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}

	made.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: request, Driver: v1alpha1.GroupName,
				Pool:   claim.PoolID{Node: nodeName, PF: f.PF, DevicePool: poolName}.String(),
				Device: function.ID{Address: f.Address}.DeviceName(),
			}},
			Config: []resourceapi.DeviceAllocationConfiguration{{
				Source: resourceapi.AllocationConfigSourceClaim,
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: v1alpha1.GroupName,
					Parameters: runtime.RawExtension{
						Raw: []byte(
							`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig","network":"blue"}`,
						),
					},
				}},
			}},
		}},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: "pod-" + name, UID: types.UID("pod-" + name)},
		},
	}

	return client.UpdateStatus(ctx, made, metav1.UpdateOptions{})
}

// makePort creates a Port that is up, like the controller and an OPI agent.
func (c *cluster) makePort(
	ctx context.Context, f simulate.Function, one *resourceapi.ResourceClaim, number int,
) error {
	id := function.ID{Address: f.Address}
	port := &v1alpha1.XPUPort{Spec: v1alpha1.XPUPortSpec{
		NodeName: nodeName, Function: claim.FunctionRef(id), XPU: "xpu-1", Network: "blue",
		MAC: fmt.Sprintf("02:00:00:00:01:%02x", number), MTU: 1400,
		Addresses: []string{fmt.Sprintf("10.10.0.%d/24", number+1)},
		Claim:     v1alpha1.ClaimRef{Name: one.Name, UID: one.UID, Request: request},
	}}

	port.Namespace, port.Name = one.Namespace, claim.PortName(nodeName, id)
	if err := c.client.Create(ctx, port); err != nil {
		return err
	}

	port.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonUp,
		LastTransitionTime: metav1.Now(),
	}}

	return c.client.Status().Update(ctx, port)
}
