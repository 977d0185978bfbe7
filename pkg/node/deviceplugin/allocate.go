// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// allocateTimeout is the default of Manager.AllocateTimeout.
	allocateTimeout = 2500 * time.Millisecond
	// impatience is how long the timeout is reduced to a fifth after an Allocate timed out, because
	// an xPU that does not answer would block the kubelet for each pod that needs the xPU.
	impatience = 10 * time.Second
)

// ProvisionsAtAllocate reports whether the xPU serves the pool's Functions before a container
// starts.
func ProvisionsAtAllocate(p pool.Pool) bool {
	return devicePlugin(p).ProvisionAt == v1alpha1.ProvisionAtAllocate
}

// GetDevicePluginOptions makes the kubelet call GetPreferredAllocation.
func (s *server) GetDevicePluginOptions(
	context.Context, *pluginapi.Empty,
) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// GetPreferredAllocation chooses Functions by the pool's policy. It never fails, because the
// kubelet would fail the pod.
func (s *server) GetPreferredAllocation(
	ctx context.Context, r *pluginapi.PreferredAllocationRequest,
) (response *pluginapi.PreferredAllocationResponse, err error) {
	if s.manager.relay.Forwards() {
		err = s.endpoints().Forward(ctx,
			func(ctx context.Context, successor pluginapi.DevicePluginClient) error {
				response, err = successor.GetPreferredAllocation(ctx, r)
				return err
			})

		if err == nil {
			return response, nil
		}
		s.log.Error(err, "The agent that has the node did not choose Functions for a container")
	}

	o := s.offer.Load()
	response = &pluginapi.PreferredAllocationResponse{}
	for _, c := range r.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses,
			&pluginapi.ContainerPreferredAllocationResponse{
				DeviceIDs: o.prefer(c.AvailableDeviceIDs, c.MustIncludeDeviceIDs,
					int(c.AllocationSize),
					s.manager.InUse),
			})
	}

	return response, nil
}

// Allocate prepares Functions for containers and returns what the containers get. The kubelet fails
// the pod with the text of an error. The API has no call that undoes an Allocate.
func (s *server) Allocate(
	ctx context.Context, r *pluginapi.AllocateRequest,
) (response *pluginapi.AllocateResponse, err error) {
	if s.manager.relay.Forwards() {
		err = s.endpoints().Forward(ctx,
			func(ctx context.Context, successor pluginapi.DevicePluginClient) error {
				response, err = successor.Allocate(ctx, r)
				return err
			})
		return response, err
	}

	metrics := s.manager.Metrics
	response = &pluginapi.AllocateResponse{}
	for _, c := range r.ContainerRequests { // the kubelet sends one
		begin := time.Now()
		one, err := s.allocate(ctx, c.DevicesIds)
		took := time.Since(begin)
		metrics.allocateSeconds.WithLabelValues(s.resource).Observe(took.Seconds())

		if err != nil {
			metrics.allocateErrors.WithLabelValues(s.resource).Inc()
			s.log.Error(err, "Allocate failed, and with it the pod", "took", took.String())
			return nil, err
		}

		metrics.allocations.WithLabelValues(s.resource).Add(float64(len(c.DevicesIds)))
		s.log.Info("Functions allocated", "functions", firstOf(c.DevicesIds), "count",
			len(c.DevicesIds))
		response.ContainerResponses = append(response.ContainerResponses, one)
	}

	return response, nil
}

// allocate prepares Functions for one container. If this fails, it gives up the Functions that it
// reserved.
func (s *server) allocate(
	ctx context.Context, ids []string,
) (_ *pluginapi.ContainerAllocateResponse, err error) {
	budget := &s.manager.budget
	ctx, cancel := context.WithTimeout(ctx, budget.timeout(s.manager.AllocateTimeout))
	defer cancel()
	defer func() { budget.ended(ctx, err) }()

	functions, p, err := s.awaitHealthy(ctx, ids)
	if err != nil {
		return nil, err
	}

	one, err := s.prepare(ctx, functions, p)
	// For other pools, Reserve and Ready change nothing.
	if err != nil && (p.Spec.SFs != nil || p.Spec.Driver != "" || ProvisionsAtAllocate(p)) {
		_ = s.each(functions, func(_ int, f function.Function) error {
			s.manager.Allocator.GiveUp(ctx, f, p)
			return nil
		})
	}

	return one, err
}

// awaitHealthy returns the Functions and their pool once all are healthy. It waits for pending
// releases only, because the kubelet may not have known of them.
func (s *server) awaitHealthy(
	ctx context.Context, ids []string,
) ([]function.Function, pool.Pool, error) {
	for {
		o := s.offer.Load()
		functions, err := o.find(s.resource, ids)
		if err != nil {
			return nil, pool.Pool{}, err
		}

		// pending names the release to wait for.
		pending := ""
		for _, f := range functions {
			for _, problem := range s.manager.Problems(f) {
				pending = fmt.Sprintf("Function %s of resource %s: %s", f.ID, s.resource,
					problem.Message)
				if problem.Taint != v1alpha1.TaintReleasePending {
					return nil, pool.Pool{}, status.Error(codes.FailedPrecondition, pending)
				}
			}
		}

		if pending == "" {
			return functions, o.pool, nil
		}

		select {
		case <-ctx.Done():
			return nil, pool.Pool{}, status.Errorf(codes.DeadlineExceeded, "%s (waited for it: %v)",
				pending, ctx.Err())
		case <-o.replaced:
		}
	}
}

// prepare reserves the Functions, lets the xPU serve them if the pool wants that, and writes the
// files from which the runtime and CNI plugins read what the container gets.
func (s *server) prepare(
	ctx context.Context, functions []function.Function, p pool.Pool,
) (*pluginapi.ContainerAllocateResponse, error) {
	m := s.manager
	contents := make([]content, len(functions))
	err := s.each(functions, func(i int, f function.Function) (err error) {
		contents[i].function, err = m.Allocator.Reserve(ctx, f, p)
		return err
	})
	if err != nil {
		return nil, err
	}

	for i, c := range contents { // This may fail, so it comes before the request to the xPU.
		if contents[i], err = contentOf(&m.Nodes, c.function, p, m.CDI != nil); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}

	if ProvisionsAtAllocate(p) {
		err := s.each(functions, func(i int, _ function.Function) error {
			if err := m.Allocator.Ready(ctx, contents[i].function, p); err != nil {
				return fmt.Errorf("xPU not ready for it: %w", err)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}

	for _, c := range contents {
		if err := m.DeviceInfo.write(s.resource, c); err != nil {
			return nil, status.Errorf(codes.Internal, "device-info file of Function %s: %v",
				c.function.ID, err)
		}
	}

	if m.CDI != nil {
		if err := m.CDI.include(s.resource, contents); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}

	return response(s.resource, contents, m.CDI != nil), nil
}

// each calls do for all Functions in parallel, and returns the errors as a gRPC status for the
// kubelet.
func (s *server) each(
	functions []function.Function, do func(i int, f function.Function) error,
) error {
	errs := make([]error, len(functions))
	var group sync.WaitGroup
	for i, f := range functions {
		group.Go(func() {
			if err := do(i, f); err != nil {
				errs[i] = fmt.Errorf("Function %s of resource %s: %w", f.ID, s.resource, err)
			}
		})
	}

	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}

	return nil
}

// allocateBudget limits how long an Allocate may wait. The zero value is ready for use, by several
// goroutines at once.
type allocateBudget struct {
	// timedOut is the time when an Allocate last timed out; nil after an Allocate that succeeded.
	timedOut atomic.Pointer[time.Time]
}

// timeout returns how long the next Allocate may wait: the usual time, or a fifth of it.
func (b *allocateBudget) timeout(usual time.Duration) time.Duration {
	if last := b.timedOut.Load(); last != nil && time.Since(*last) < impatience {
		return usual / 5
	}
	return usual
}

// ended records the result of an Allocate with this context.
func (b *allocateBudget) ended(ctx context.Context, err error) {
	switch {
	case err == nil:
		b.timedOut.Store(nil)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		b.timedOut.Store(new(time.Now()))
	}
}
