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
	// allocateTimeout is how long an Allocate waits for a Function where Manager.AllocateTimeout is 0. The kubelet admits
	// pods, ends them and probes them in one loop, which stands still meanwhile.
	allocateTimeout = 2500 * time.Millisecond
	// impatience is how long, after an Allocate waited in vain, others wait only a fifth of that: an xPU that is away
	// would otherwise stop the kubelet's loop for as many times as pods wait for it.
	impatience = 10 * time.Second
)

// ProvisionsAtAllocate says whether the xPU is asked before a container starts.
func ProvisionsAtAllocate(p pool.Pool) bool {
	return devicePlugin(p).ProvisionAt == v1alpha1.ProvisionAtAllocate
}

// GetDevicePluginOptions says that the kubelet may ask which Functions go well together.
func (s *server) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// GetPreferredAllocation chooses among Functions by the pool's policy. It never fails: the kubelet would fail the pod,
// where it can as well choose for itself.
func (s *server) GetPreferredAllocation(
	_ context.Context, r *pluginapi.PreferredAllocationRequest,
) (*pluginapi.PreferredAllocationResponse, error) {
	o := s.offer.Load()
	response := &pluginapi.PreferredAllocationResponse{}
	for _, c := range r.ContainerRequests {
		chosen := prefer(devicePlugin(o.pool).PreferredAllocation,
			o.some(c.AvailableDeviceIDs), o.some(c.MustIncludeDeviceIDs), int(c.AllocationSize))
		response.ContainerResponses = append(response.ContainerResponses,
			&pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: deviceIDs(chosen)})
	}
	return response, nil
}

// Allocate has Functions ready for containers and says what these get. The kubelet fails the pod with the error's text.
// There is no call that takes an Allocate back.
func (s *server) Allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	begin := time.Now()
	budget, metrics := &s.manager.budget, s.manager.Metrics
	ctx, cancel := context.WithTimeout(ctx, budget.timeout(s.manager.AllocateTimeout))
	defer cancel()
	response, err := s.allocate(ctx, r)
	budget.ended(ctx, err)
	took := time.Since(begin)
	metrics.allocateSeconds.WithLabelValues(s.resource).Observe(took.Seconds())
	if err != nil {
		metrics.allocateErrors.WithLabelValues(s.resource).Inc()
		s.log.Error(err, "Allocate failed, and with it the pod", "took", took.String())
		return nil, err
	}
	for _, c := range r.ContainerRequests {
		metrics.allocations.WithLabelValues(s.resource).Add(float64(len(c.DevicesIds)))
	}
	return response, nil
}

func (s *server) allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	o := s.offer.Load()
	// All requests are read before anything is done for one.
	for _, c := range r.ContainerRequests {
		if _, err := o.find(s.resource, c.DevicesIds); err != nil {
			return nil, err
		}
	}
	response := &pluginapi.AllocateResponse{}
	for _, c := range r.ContainerRequests {
		one, err := s.allocateContainer(ctx, c.DevicesIds)
		if err != nil {
			return nil, err
		}
		response.ContainerResponses = append(response.ContainerResponses, one)
	}
	return response, nil
}

func (s *server) allocateContainer(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	functions, p, err := s.awaitHealthy(ctx, ids)
	if err != nil {
		return nil, err
	}
	one, err := s.prepare(ctx, functions, p)
	if err != nil {
		// Other pools have nothing done to their Functions before a container starts.
		if p.Spec.SFs != nil || p.Spec.Driver != "" || ProvisionsAtAllocate(p) {
			_ = s.each(functions, func(_ int, f function.Function) error {
				s.manager.Allocator.GiveUp(ctx, f, p)
				return nil
			})
		}
		return nil, err
	}
	s.log.Info("Functions allocated", "functions", firstOf(ids), "count", len(ids))
	return one, nil
}

// awaitHealthy returns the Functions, and the pool, as they are when all may be handed out. It fails if one must not
// be, and waits while it only has to come back from its last pod: the kubelet may have chosen it before it was told.
func (s *server) awaitHealthy(ctx context.Context, ids []string) ([]function.Function, pool.Pool, error) {
	for {
		o := s.offer.Load()
		functions, err := o.find(s.resource, ids)
		if err != nil {
			return nil, pool.Pool{}, err
		}
		pending, err := s.pending(functions)
		if err != nil || pending == "" {
			return functions, o.pool, err
		}
		select {
		case <-ctx.Done():
			return nil, pool.Pool{}, status.Errorf(codes.DeadlineExceeded, "%s (waited for it: %v)", pending, ctx.Err())
		case <-o.replaced:
		}
	}
}

// pending says what there is to wait for until the Functions may be handed out, "" if that is now. An error says why
// one must not be.
func (s *server) pending(functions []function.Function) (string, error) {
	pending := ""
	for _, f := range functions {
		for _, problem := range s.manager.Problems(f) {
			pending = fmt.Sprintf("Function %s of resource %s: %s", f.ID, s.resource, problem.Message)
			if problem.Taint != v1alpha1.TaintReleasePending {
				return "", status.Error(codes.FailedPrecondition, pending)
			}
		}
	}
	return pending, nil
}

// prepare has the Functions free of their last pods, set up, and, where the pool wants that, served by the xPU. It
// returns what the container gets, and writes that where the runtime and CNI plugins look for it.
func (s *server) prepare(
	ctx context.Context, functions []function.Function, p pool.Pool,
) (*pluginapi.ContainerAllocateResponse, error) {
	contents := make([]content, len(functions))
	err := s.each(functions, func(i int, f function.Function) (err error) {
		contents[i].function, err = s.manager.Allocator.Reserve(ctx, f, p)
		return err
	})
	if err != nil {
		return nil, err
	}
	for i, c := range contents { // before the xPU is asked in vain
		if contents[i], err = contentOf(&s.manager.Nodes, c.function, p); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}
	if ProvisionsAtAllocate(p) {
		err := s.each(functions, func(i int, _ function.Function) error {
			if err := s.manager.Allocator.Ready(ctx, contents[i].function, p); err != nil {
				return fmt.Errorf("xPU not ready for it: %w", err)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	one, err := s.deliver(contents)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return one, nil
}

// each does something for all Functions, at once. Errors are the kubelet's.
func (s *server) each(functions []function.Function, do func(i int, f function.Function) error) error {
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

// deliver writes what a container gets where the runtime and CNI plugins look for it, and returns the rest of it.
func (s *server) deliver(contents []content) (*pluginapi.ContainerAllocateResponse, error) {
	for _, c := range contents {
		if err := writeDeviceInfo(s.manager.DeviceInfoDir, s.resource, c); err != nil {
			return nil, err
		}
	}
	if err := s.manager.CDI.include(s.resource, contents); err != nil {
		return nil, err
	}
	return response(s.resource, contents, s.manager.CDI != nil)
}

// allocateBudget says how long an Allocate may wait. The zero value is ready for use, by several goroutines at once.
type allocateBudget struct {
	vainly atomic.Pointer[time.Time] // when an Allocate last waited in vain; nil after one that did not
}

// timeout is the time for the next Allocate, of which usual is the longest.
func (b *allocateBudget) timeout(usual time.Duration) time.Duration {
	if vainly := b.vainly.Load(); vainly != nil && time.Since(*vainly) < impatience {
		return usual / 5
	}
	return usual
}

// ended says how an Allocate ended that had this context.
func (b *allocateBudget) ended(ctx context.Context, err error) {
	switch {
	case err == nil:
		b.vainly.Store(nil)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		b.vainly.Store(new(time.Now()))
	}
}
