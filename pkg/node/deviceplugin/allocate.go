package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// allocate answers the kubelet's Allocate. The kubelet fails the pod with the error's text. There is no call that takes
// an Allocate back.
func (s *server) allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, s.manager.budget.timeout(s.manager.allocateTimeout()))
	defer cancel()
	response, count, err := s.allocateAll(ctx, r)
	s.manager.budget.ended(ctx, err)
	took := time.Since(begin)
	s.metrics.allocateSeconds.Observe(took.Seconds())
	if err != nil {
		s.metrics.allocateErrors.Inc()
		s.log.Error(err, "Allocate failed, and with it the pod", "took", took.String())
		return nil, err
	}
	s.metrics.allocations.Add(float64(count))
	return response, nil
}

// allocateAll also returns how many Functions were allocated.
func (s *server) allocateAll(
	ctx context.Context, r *pluginapi.AllocateRequest,
) (_ *pluginapi.AllocateResponse, count int, _ error) {
	o, _ := s.current()
	// All requests are read before anything is done for one.
	for _, c := range r.ContainerRequests {
		if _, err := o.find(s.resource, c.DevicesIds); err != nil {
			return nil, 0, status.Error(codes.NotFound, err.Error())
		}
		count += len(c.DevicesIds)
	}
	response := &pluginapi.AllocateResponse{}
	for _, c := range r.ContainerRequests {
		one, err := s.allocateContainer(ctx, c.DevicesIds)
		if err != nil {
			return nil, 0, err
		}
		response.ContainerResponses = append(response.ContainerResponses, one)
	}
	return response, count, nil
}

func (s *server) allocateContainer(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	functions, p, err := s.awaitHealthy(ctx, ids)
	if err != nil {
		return nil, err
	}
	one, err := s.prepare(ctx, functions, p)
	if err != nil {
		if fitsOut(p) || ProvisionsAtAllocate(p) {
			s.giveUp(ctx, functions, p)
		}
		return nil, err
	}
	s.log.Info("Functions allocated", "functions", firstOf(ids), "count", len(ids))
	return one, nil
}

// fitsOut says whether the pool has anything done to its Functions before a container starts.
func fitsOut(p pool.Pool) bool { return p.Spec.SFs != nil || p.Spec.Driver != "" }

// ProvisionsAtAllocate says whether the xPU is asked before a container starts.
func ProvisionsAtAllocate(p pool.Pool) bool {
	return devicePlugin(p).ProvisionAt == v1alpha1.ProvisionAtAllocate
}

// prepare has the Functions ready for a container, and returns what it gets.
func (s *server) prepare(
	ctx context.Context, functions []function.Function, p pool.Pool,
) (*pluginapi.ContainerAllocateResponse, error) {
	functions, err := s.reserve(ctx, functions, p)
	if err != nil {
		return nil, err
	}
	contents, err := s.contents(functions, p) // before the xPU is asked in vain
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	if ProvisionsAtAllocate(p) {
		if err := s.provision(ctx, functions, p); err != nil {
			return nil, err
		}
	}
	one, err := s.deliver(contents)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return one, nil
}

// awaitHealthy returns the Functions, and the pool, as they are when all may be handed out. It fails if one must not
// be, and waits while it only has to come back from its last pod: the kubelet may have chosen it before it was told.
func (s *server) awaitHealthy(ctx context.Context, ids []string) ([]function.Function, pool.Pool, error) {
	for {
		o, renewed := s.current()
		functions, err := o.find(s.resource, ids)
		if err != nil {
			return nil, pool.Pool{}, status.Error(codes.NotFound, err.Error())
		}
		pending, err := s.pending(functions)
		if err != nil {
			return nil, pool.Pool{}, status.Error(codes.FailedPrecondition, err.Error())
		}
		if pending == "" {
			return functions, o.pool, nil
		}
		select {
		case <-ctx.Done():
			return nil, pool.Pool{}, status.Errorf(codes.DeadlineExceeded, "%s (waited for it: %v)", pending, ctx.Err())
		case <-renewed:
		}
	}
}

// pending says what there is to wait for until the Functions may be handed out, "" if that is now. An error says why
// one must not be.
func (s *server) pending(functions []function.Function) (string, error) {
	pending := ""
	for _, f := range functions {
		for _, problem := range s.manager.Health.Problems(f) {
			message := fmt.Sprintf("Function %s of resource %s: %s", f.ID, s.resource, problem.Message)
			if problem.Taint != v1alpha1.TaintReleasePending {
				return "", errors.New(message)
			}
			pending = message
		}
	}
	return pending, nil
}

// provision has the xPU ready for all Functions, at once.
func (s *server) provision(ctx context.Context, functions []function.Function, p pool.Pool) error {
	return s.each(functions, func(_ int, f function.Function) error {
		if err := s.manager.Allocator.Ready(ctx, f, p); err != nil {
			return fmt.Errorf("xPU not ready for it: %w", err)
		}
		return nil
	})
}

// reserve has all Functions free of their last pods and set up, at once, and returns them as they are then.
func (s *server) reserve(
	ctx context.Context, functions []function.Function, p pool.Pool,
) ([]function.Function, error) {
	fitted := make([]function.Function, len(functions))
	err := s.each(functions, func(i int, f function.Function) (err error) {
		fitted[i], err = s.manager.Allocator.Reserve(ctx, f, p)
		return err
	})
	return fitted, err
}

// giveUp undoes what was done for a container that cannot be.
func (s *server) giveUp(ctx context.Context, functions []function.Function, p pool.Pool) {
	_ = s.each(functions, func(_ int, f function.Function) error {
		s.manager.Allocator.GiveUp(ctx, f, p)
		return nil
	})
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

// contents is what a container gets of each of these Functions of the pool.
func (s *server) contents(functions []function.Function, p pool.Pool) ([]content, error) {
	contents := make([]content, 0, len(functions))
	for _, f := range functions {
		c, err := s.manager.Contents.of(f, p)
		if err != nil {
			return nil, err
		}
		contents = append(contents, c)
	}
	return contents, nil
}

// deliver says what a container gets, and writes it where the runtime and CNI plugins look for it.
func (s *server) deliver(contents []content) (*pluginapi.ContainerAllocateResponse, error) {
	m := s.manager
	one, err := response(s.resource, contents, m.CDI == nil)
	if err != nil {
		return nil, err
	}
	for _, c := range contents {
		if err := m.DeviceInfo.write(s.resource, c); err != nil {
			return nil, err
		}
		if m.CDI != nil && len(c.nodes) > 0 {
			one.CdiDevices = append(one.CdiDevices, &pluginapi.CDIDevice{Name: cdiDeviceID(s.resource, c.function.ID)})
		}
	}
	return one, m.CDI.include(s.resource, contents)
}

// writeCDI has the runtime know all Functions of an offer. One of which a container could not get everything is left
// out: its Allocate will say why.
func (s *server) writeCDI(o *offer) error {
	if s.manager.CDI == nil {
		return nil
	}
	contents := make([]content, 0, len(o.functions))
	for _, f := range o.pool.Functions {
		if c, err := s.manager.Contents.of(f, o.pool); err == nil {
			contents = append(contents, c)
		}
	}
	return s.manager.CDI.include(s.resource, contents)
}
