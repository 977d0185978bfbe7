// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
)

const (
	// tryTimeout limits one try, so that the reason of a failure becomes known.
	tryTimeout = time.Minute
	// firstPause and longestPause bound the pause after a try that failed. A change of the journal
	// ends a pause early, because a Function that another pod had may be free, but not before
	// firstPause.
	firstPause, longestPause = time.Second, 15 * time.Second
	// parallelMoves is how many Functions of a pod are moved in parallel. The kernel moves one
	// netdev after the other. But drivers, firmware and PFs take most of the time, and work in
	// parallel.
	parallelMoves = 16
)

// attempt is the work to attach the Functions of one sandbox. It continues until they are attached,
// or until the sandbox or the connection to the runtime ends. Functions that are attached stay
// attached in the meantime.
type attempt struct {
	cancel context.CancelFunc
	// failed receives the first error of the first try, as soon as it occurs.
	failed chan error
	// tried is closed after the first try.
	tried chan struct{}
	// done is closed when the work has ended.
	done chan struct{}

	// retries says that the work continues after a try that failed. Otherwise the sandbox fails.
	retries atomic.Bool
	// waited says that a container has waited for the attempt.
	waited atomic.Bool

	mutex sync.Mutex
	// errs has the errors of the last try.
	errs map[function.ID]error
}

// begin starts to attach the Functions of a sandbox in the background. It replaces an earlier
// attempt for the sandbox. retries says whether to continue after a failure. RunPodSandbox sets it
// later.
func (p *Plugin) begin(ctx context.Context, pod *api.PodSandbox, retries bool) *attempt {
	ctx, cancel := context.WithCancel(ctx)
	a := &attempt{
		cancel: cancel, failed: make(chan error, 1), tried: make(chan struct{}),
		done: make(chan struct{}),
		errs: map[function.ID]error{},
	}

	a.retries.Store(retries)
	p.mutex.Lock()
	before := p.attempts[pod.GetId()]

	if p.attempts == nil {
		p.attempts = map[string]*attempt{}
	}

	p.attempts[pod.GetId()] = a
	p.mutex.Unlock()

	p.background.Go(func() {
		defer close(a.done)
		defer cancel()

		if before != nil {
			before.end()
		}

		p.keepTrying(ctx, pod, a)

		p.mutex.Lock()
		defer p.mutex.Unlock()

		if p.attempts[pod.GetId()] == a {
			delete(p.attempts, pod.GetId())
		}
	})

	return a
}

// attempt returns the attempt for a sandbox, or nil if there is none.
func (p *Plugin) attempt(sandbox string) *attempt {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.attempts[sandbox]
}

// end cancels the attempt, and returns when it has ended.
func (a *attempt) end() {
	if a == nil {
		return
	}
	a.cancel()
	<-a.done
}

// fail passes the first error to RunPodSandbox at once, and returns the error, which may be nil.
func (a *attempt) fail(err error) error {
	if err == nil {
		return nil
	}
	select {
	case a.failed <- err:
	default: // it is not the first error
	}
	return err
}

// err returns why a Function was not attached by the last try, or nil if this is unknown.
func (a *attempt) err(id function.ID) error {
	if a == nil {
		return nil
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.errs[id]
}

func (p *Plugin) keepTrying(ctx context.Context, pod *api.PodSandbox, a *attempt) {
	changes := p.Journal.Subscribe(ctx)
	pauses := loop.Backoff(firstPause, longestPause)
	for first := true; ; first = false {
		err := p.try(ctx, pod, a)
		if first {
			close(a.tried)
		}

		if err == nil || ctx.Err() != nil || !a.retries.Load() {
			return
		}

		pause := pauses.Step()
		p.log(pod).Error(err,
			"Pod has not an interface that it claimed; its containers cannot start; trying again",
			"retry", pause.String())

		select {
		case <-changes: // changes that this try made
		default:
		}

		if !loop.Sleep(ctx, firstPause) || !loop.Wait(ctx, changes, pause) {
			return
		}
	}
}

// try attaches the sandbox's Functions in parallel. It leaves out the Functions of CNI requests,
// which the runtime made before this call.
func (p *Plugin) try(ctx context.Context, pod *api.PodSandbox, a *attempt) error {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()

	attachments := slices.DeleteFunc(p.Journal.ByPod(types.UID(pod.GetUid())),
		func(a journal.Attachment) bool { return a.CNI != nil })
	attachments = append(attachments, p.sharedClaims(ctx, pod)...)
	if len(attachments) == 0 {
		return nil
	}

	netns := networkNamespace(pod)
	if netns == "" {
		return a.fail(fmt.Errorf("pod %s/%s has a claim to a Function but uses the node's "+
			"network: remove hostNetwork",
			pod.GetNamespace(), pod.GetName()))
	}

	sandbox := lifecycle.Sandbox{ID: pod.GetId(), NetNS: netns, Pod: journal.Pod{
		Namespace: pod.GetNamespace(), Name: pod.GetName(), UID: types.UID(pod.GetUid()),
	}}
	if err := p.attachAll(ctx, sandbox, attachments, a); err != nil {
		return err
	}

	claims := map[types.UID]journal.Claim{}
	for _, a := range attachments {
		claims[a.Claim.UID] = a.Claim
	}

	for _, c := range claims {
		p.Report(c)
	}

	return nil
}

// attachAll attaches the Functions. If one of them fails, it still attaches the others. The agent
// chooses different names for the Functions of a pod. If the pod has an interface of a chosen name
// already, the Functions that need another name get it one after the other.
func (p *Plugin) attachAll(
	ctx context.Context, sandbox lifecycle.Sandbox, attachments []journal.Attachment, a *attempt,
) error {
	var group errgroup.Group
	group.SetLimit(parallelMoves)
	later := make([]bool, len(attachments))
	for i, record := range attachments {
		group.Go(func() error {
			err := p.attachOne(ctx, sandbox, record, a)
			if later[i] = record.AnyName && nameIsTaken(err); later[i] {
				return nil
			}
			return a.fail(err)
		})
	}

	err := group.Wait()

	for i, record := range attachments {
		if later[i] {
			err = errors.Join(err, a.fail(p.attachOne(ctx, sandbox, record, a)))
		}
	}

	return err
}

func nameIsTaken(err error) bool {
	return errors.Is(err, netdev.ErrNameTaken) || errors.Is(err, unix.EEXIST)
}

// attachOne attaches one Function. The error names the pod and the claim.
func (p *Plugin) attachOne(
	ctx context.Context, sandbox lifecycle.Sandbox, record journal.Attachment, a *attempt,
) error {
	_, err := p.Lifecycle.Attach(ctx, record.Function, sandbox)
	if err != nil && record.Pod.UID != sandbox.Pod.UID {
		err = fmt.Errorf("%w; %s", err, ownClaim)
	}

	a.mutex.Lock()
	a.errs[record.Function] = err
	a.mutex.Unlock()

	if err != nil {
		err = fmt.Errorf("pod %s/%s, claim %s: %w", sandbox.Pod.Namespace, sandbox.Pod.Name,
			record.Claim.Name, err)
	}

	return err
}
