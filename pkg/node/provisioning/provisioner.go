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

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Provisioner has the xPU serve Functions. Its methods may be called concurrently, but for one
// Function only one at a time.
type Provisioner interface {
	// Provision returns once the xPU serves exactly the Port of the attachment, which must have
	// one. Of the other fields Provision reads Function, PF and Pod, which is empty while the pod is
	// not known. Provision replaces a Port of the Function that differs or is being
	// deleted. It gives up when ctx ends. It gives up after a few seconds if the network or the xPU
	// is not declared, or if the network does not allow the pod's namespace. The error says what is
	// missing.
	Provision(ctx context.Context, a journal.Attachment) (Provisioned, error)
	// Deprovision returns nil once the xPU serves no Port of the attachment's Function. It reads
	// Function, PF and the Port's ID.
	Deprovision(ctx context.Context, a journal.Attachment) error
	// Away returns why the xPU of the Function cannot be reached, and what to do. It returns "" if
	// the xPU can be reached, or if the Function has no xPU. It does not block.
	Away(f function.Function) string
	// PortID returns the id for the attachment's Port of a Function that has none yet, which the
	// caller records. "" means that the Provisioner needs no record. It does not block.
	PortID(f function.Function) string
	// NeedsOwnMAC reports whether the xPU of the PF knows Functions by their permanent MAC
	// addresses. It does not block.
	NeedsOwnMAC(pf pci.Address) bool
}

// Provisioned is what the pod's interface must know of its Port.
type Provisioned struct {
	MTU       int            // MTU of the network in bytes, 0 if the network sets none
	Addresses []netip.Prefix // addresses that the network's address book assigned
}

const (
	// verifyTimeout bounds one attempt to verify a Port or a network. The attempt holds the lock of
	// the Function or network.
	verifyTimeout = 15 * time.Second
	// verifyAtOnce is how many Ports are verified at the same time. In direct mode the limit
	// applies to each xPU.
	verifyAtOnce = 8
	// undeclaredFor is how long to wait for a network or an XPU that is not declared. A user may
	// create the object together with the pod. If the pod names the object by mistake, the user
	// should learn that soon.
	undeclaredFor = 5 * time.Second
)

// retries returns the pauses between attempts for one Function, which grow from 100 ms to 10 s.
func retries() *wait.Backoff { return loop.Backoff(100*time.Millisecond, 10*time.Second) }

// wantsPort reports whether the xPU must serve a Port for the attachment. An attachment that is
// being released keeps its Port until it is deprovisioned. If its Port is missing, the Port is not
// created again.
func wantsPort(a journal.Attachment) bool { return a.Port != nil && a.State != journal.Releasing }

// obstacle is an error of a step that also determines how [converge] goes on.
type obstacle struct {
	error
	// refused means that the API server refused a request. The step is repeated after a pause, but
	// not after a change.
	refused bool
	// undeclared means that an administrator has to declare an object first.
	undeclared bool
	// never means that no further step can help.
	never bool
}

func (o obstacle) Unwrap() error { return o.error }

// converge repeats the step until the step returns no error. It repeats the step after each change,
// for which it subscribes, and after pauses in case no change comes. When ctx ends or further steps
// cannot help, converge returns the last error that says what is missing, rather than the error of
// a step that ran out of time.
func converge(
	ctx context.Context, subscribe func(context.Context) <-chan struct{},
	step func(context.Context) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	changes := subscribe(ctx)
	pauses := retries()
	var missing error
	var undeclared time.Time // when the object was first found to be undeclared
	for {
		err := step(ctx)
		if err == nil {
			return nil
		}

		// The error of a step that ctx cut short says less than the error before.
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

// verifyAll calls verify for the Functions, several at a time, and returns the errors by Function.
// It returns no errors if ctx has ended.
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
