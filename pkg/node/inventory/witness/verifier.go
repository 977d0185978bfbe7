// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

const (
	// quiet is the pause between a change and the comparison, because VFs come one after the other.
	quiet = 5 * time.Second
	// interval is the least pause before a comparison without a request, because some SFs come and
	// go with pods.
	interval = time.Minute
	// budget is how long all questions of a comparison may take.
	budget = 15 * time.Second
	// patience is how long a comparison may take until its end is not awaited any more: a driver
	// that hangs does not answer when a file of sysfs is read.
	patience = 20 * time.Second
)

// Options configures a [Verifier]. All fields but Reader are required.
type Options struct {
	SysRoot   string                     // as in [Source]
	Functions func() []function.Function // the Functions of the inventory as they are now
	Ports     func() ([]devlink.Port, error)
	Reader    func() Reader // as in [Source]
	// Changed is called after each comparison, on the goroutine of Run. It must not block.
	Changed func()
	Log     logr.Logger
}

// Verifier compares the inventory of an agent with sriovnet at the start, and when the Functions
// are others. Several goroutines may call its methods at once, but Run may be called only once.
type Verifier struct {
	options  Options
	requests chan struct{}
	compared notify.Signal

	mutex sync.Mutex
	last  *nodestate.Verification // nil before the first comparison; never changed
}

// NewVerifier returns a Verifier that knows nothing until [Verifier.Run] is called.
func NewVerifier(options Options) *Verifier {
	return &Verifier{options: options, requests: make(chan struct{}, 1)}
}

// Last returns the result of the last comparison, or nil if there was none. It must not be changed.
func (v *Verifier) Last() *nodestate.Verification {
	v.mutex.Lock()
	defer v.mutex.Unlock()
	return v.last
}

// Verify compares again, and returns the result, or an error if the comparison has
// not ended when ctx ends.
func (v *Verifier) Verify(ctx context.Context) (*nodestate.Verification, error) {
	asked := time.Now()
	select {
	case v.requests <- struct{}{}:
	default: // another request waits, and serves this one as well
	}

	if err := loop.Until(ctx, v.compared.Subscribe, func() bool {
		last := v.Last()
		return last != nil && !last.Time.Before(asked)
	}); err != nil {
		return nil, errors.New("the comparison with sriovnet has not ended; see the log of " +
			"xpu-agent, and try again")
	}

	return v.Last(), nil
}

// Run compares until ctx ends. It looks for other Functions after each value from changes. It never
// waits for a comparison that hangs.
func (v *Verifier) Run(ctx context.Context, changes <-chan struct{}) error {
	var compared []identity
	due := time.After(quiet)
	for v.await(ctx, changes, due, compared, time.Now()) {
		compared, due = identities(v.options.Functions()), nil
		if !v.compare(ctx) {
			return nil
		}
	}
	return nil
}

// await waits until a comparison is due, is asked for, or follows from a change of the Functions
// since the last one, which ended at the time last. It returns false if ctx ended first.
func (v *Verifier) await(
	ctx context.Context, changes <-chan struct{}, due <-chan time.Time, compared []identity,
	last time.Time,
) bool {
	for {
		if due == nil && !slices.Equal(identities(v.options.Functions()), compared) {
			due = time.After(max(time.Until(last.Add(interval)), quiet))
		}

		select {
		case <-ctx.Done():
			return false
		case <-due:
			return true
		case <-v.requests:
			return true
		case <-changes:
		}
	}
}

// compare compares once. It returns false if ctx ended first. A comparison that hangs is reported,
// and is awaited before the next one.
func (v *Verifier) compare(ctx context.Context) bool {
	done := make(chan nodestate.Verification, 1)
	go func() {
		ctx, cancel := context.WithTimeoutCause(ctx, budget, errors.New("there was no time left"))
		defer cancel()
		done <- Verify(ctx, Source{
			SysRoot: v.options.SysRoot, Ports: v.options.Ports, Reader: v.options.Reader,
			Functions: func(context.Context) ([]function.Function, error) {
				return v.options.Functions(), nil
			},
		})
	}()

	late := time.After(patience)
	for {
		select {
		case <-ctx.Done():
			return false
		case result := <-done:
			v.learn(result)
			return true
		case <-late:
			v.learn(skipped(errors.New("the comparison with sriovnet hangs: a driver does not " +
				"answer when its files in /sys are read; see the kernel's log")))
		}
	}
}

// learn stores a result.
func (v *Verifier) learn(result nodestate.Verification) {
	v.mutex.Lock()
	before := v.last
	v.last = &result
	v.mutex.Unlock()

	v.compared.Notify()
	v.options.Changed()

	if before != nil && slices.Equal(before.Differences, result.Differences) {
		return
	}
	for _, d := range result.Differences {
		v.options.Log.Info("The inventory and sriovnet disagree: run xpuctl discover --verify",
			"function", d.Function.String(), "property", d.Property, "inventory", d.Inventory,
			"sriovnet", d.Sriovnet)
	}
}

// identity has the properties of a Function whose change causes another comparison. Properties that
// change with each pod are left out.
type identity struct {
	id            function.ID
	kind          function.Kind
	index, numVFs int
	driver        string // of a PF, because a VF may get another one for a pod
	auxDevice     string
}

func identities(functions []function.Function) []identity {
	all := make([]identity, 0, len(functions))
	for _, f := range functions {
		one := identity{
			id: f.ID, kind: f.Kind, index: f.Index, numVFs: f.NumVFs, auxDevice: f.AuxDevice,
		}
		if f.Kind == function.PF {
			one.driver = f.Driver
		}
		all = append(all, one)
	}

	return all
}
