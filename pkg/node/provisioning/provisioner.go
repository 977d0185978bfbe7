// SPDX-License-Identifier: Apache-2.0

// Package provisioning has the xPU serve the Functions that the device plugin allocates. [CRD]
// writes XPUPorts, which xpu-controller brings to the OPI agent. [Direct] calls the OPI agent
// itself.
package provisioning

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Provisioner has the xPU serve Functions. Its methods may be called by several goroutines at once;
// for one Function only one at a time.
type Provisioner interface {
	// Provision returns once the xPU serves exactly the Port of the attachment, which must have
	// one. Of the other fields it reads Function, PF and Pod, which is empty where the pod is not
	// known yet. It replaces a Port of the Function that differs or is being deleted. It gives up
	// when ctx ends, and after a few seconds if the network or the xPU is not declared, or the
	// network does not allow the pod's namespace. The error says what is missing.
	Provision(ctx context.Context, a journal.Attachment) (Provisioned, error)
	// Deprovision returns nil once the xPU serves no Port of the attachment's Function. It reads
	// Function and PF.
	Deprovision(ctx context.Context, a journal.Attachment) error
	// Away says why the xPU of the Function cannot be reached, and what to do; "" if it can, or if
	// the Function has no xPU. It does not block.
	Away(f function.Function) string
}

// Provisioned is what the pod's interface must know of its Port.
type Provisioned struct {
	MTU       int            // of the network in bytes, 0 if the network sets none
	Addresses []netip.Prefix // those that the network's address book gave it
}

// MAC is the address of a Function for which nobody asked for another one: locally administered,
// unicast, and always the same for the same Function of a node.
func MAC(node string, f function.ID) function.MAC { return claim.DerivedMAC("", node, f) }

const (
	// verifyTimeout bounds one attempt to verify a Port or a network, which holds the lock of the
	// Function or network.
	verifyTimeout = 15 * time.Second
	// verifyAtOnce is how many Ports are verified at the same time; in direct mode, how many of
	// each xPU.
	verifyAtOnce = 8
	// undeclaredFor is how long to wait for a network or an XPU that is not declared. It may be
	// created together with the pod. If the pod names it by mistake, the user should learn that
	// soon.
	undeclaredFor = 5 * time.Second
)

// retries are the pauses between attempts for one Function: 100 ms, then longer and longer up to 10
// s.
func retries() *wait.Backoff { return loop.Backoff(100*time.Millisecond, 10*time.Second) }

// wantsPort says whether the xPU must serve a Port for the attachment. An attachment that is being
// released keeps its Port until it is deprovisioned, but if the Port is missing, it is not created
// again.
func wantsPort(a journal.Attachment) bool { return a.Port != nil && a.State != journal.Releasing }

// obstacle is an error of a step that also tells [converge] how to go on.
type obstacle struct {
	error
	// refused says that the API server refused a request. The step is repeated after a pause only,
	// and not after a change.
	refused bool
	// undeclared says that an administrator has to declare something first.
	undeclared bool
	// never says that no further step can help.
	never bool
}

func (o obstacle) Unwrap() error { return o.error }

// converge repeats the step until it returns no error: after each change, for which it subscribes,
// and after pauses in case that none comes. When ctx ends, or further steps cannot help, it returns
// the last error that says what is missing, rather than that a step ran out of time.
func converge(
	ctx context.Context, subscribe func(context.Context) <-chan struct{},
	step func(context.Context) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	changes := subscribe(ctx)
	pauses := retries()
	var missing error
	var undeclared time.Time // since when
	for {
		err := step(ctx)
		if err == nil {
			return nil
		}

		// The error of a step that ctx cut short says less than the one before.
		if missing == nil || ctx.Err() == nil && !errors.Is(err, opi.ErrTimeout) {
			missing = err
		}

		now, _ := errors.AsType[obstacle](err)
		switch {
		case !now.undeclared:
			undeclared = time.Time{}
		case undeclared.IsZero():
			undeclared = time.Now()
		case time.Since(undeclared) >= undeclaredFor:
			return missing
		}

		relevant := changes
		if now.refused {
			relevant = nil
		}
		if now.never || !loop.Wait(ctx, relevant, pauses.Step()) {
			return missing
		}
	}
}

// verifyAll calls verify for the Functions, several at once, and returns the errors of those for
// which it failed; none if ctx has ended.
func verifyAll(
	ctx context.Context, ids []function.ID, verify func(context.Context, function.ID) error,
) map[function.ID]error {
	errs := make([]error, len(ids))
	workqueue.ParallelizeUntil(ctx, verifyAtOnce, len(ids), func(i int) {
		errs[i] = verify(ctx, ids[i])
	})
	failed := map[function.ID]error{}
	for i, err := range errs {
		if err != nil && ctx.Err() == nil {
			failed[ids[i]] = err
		}
	}

	return failed
}
