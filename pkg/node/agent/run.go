// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"

	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/node/keep"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

// part is a part of the agent. It runs until ctx ends. An error ends the agent.
type part func(ctx context.Context) error

// onChange returns a part that is notified of the changes from now on, even before it runs. The
// subscription lasts until ctx ends.
func onChange(
	ctx context.Context, signal *notify.Signal, run func(context.Context, <-chan struct{}) error,
) part {
	changes := signal.Subscribe(ctx)
	return func(ctx context.Context) error { return run(ctx, changes) }
}

// runAll runs the parts until ctx ends, or until a part returns an error.
func runAll(ctx context.Context, parts []part) error {
	group, ctx := errgroup.WithContext(ctx)
	start(ctx, group, parts)
	return group.Wait()
}

// start starts the parts as members of the group.
func start(ctx context.Context, group *errgroup.Group, parts []part) {
	for _, run := range parts {
		group.Go(func() error { return run(ctx) })
	}
}

// run runs the parts until ctx ends, until a part cannot work at all, or until a successor asks for
// the node. In this case it returns the retired agent.
func (a *agent) run(ctx context.Context) (*retired, error) {
	// The device plugin outlives the other parts if a successor has asked for the node: it forwards
	// calls while the kubelet does not know the successor yet.
	plugins := newLasting(ctx, &a.env.outputs, a.plugins.Run)

	group, ctx := errgroup.WithContext(ctx)
	serving := a.serving(ctx)

	// The parts that others depend on end last, so that running requests can finish when ctx ends.
	depended, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()

	start(depended, group, []part{
		a.hardware.inventory.Run,
		a.hardware.faults.Run,
		a.backend.connect,
	})
	start(ctx, group, []part{
		a.hardware.sfs.Watch,
		a.hardware.prepareReleases,
		a.serveMonitoring,
		a.serveProfiles,
		a.backend.file.Run,
	})

	group.Go(func() error {
		defer end()
		return a.serve(ctx, serving, plugins)
	})

	err := group.Wait()
	if errors.Is(err, upgrade.ErrSucceeded) {
		return &retired{process: a.process, cni: a.cni, plugins: plugins}, nil
	}

	plugins.stop()
	if errors.Is(err, context.Canceled) {
		err = nil
	}

	return nil, err
}

// serving returns the parts that serve pods. They run once the agent knows the Functions and has
// recovered what the journal records, but they are notified of all changes from now on.
func (a *agent) serving(ctx context.Context) []part {
	inputs, outputs := &a.env.inputs, &a.env.outputs
	functions, pools := inputs.Subscribe(ctx), outputs.Subscribe(ctx)
	return []part{
		onChange(ctx, inputs, a.pools.track),
		onChange(ctx, inputs, a.pools.cordons.run),
		onChange(ctx, inputs, a.hardware.cards.Run),
		onChange(ctx, inputs, a.hardware.macs.Run),
		onChange(ctx, inputs, a.hardware.verifier.Run),
		a.admin.Run,
		func(ctx context.Context) error { return a.pools.vfs.Run(ctx, functions, pools) },
		onChange(ctx, outputs, a.pools.conflicts.run),
		a.claims.Run,
		a.keepFilesComplete,
		a.serveCNI,
		onChange(ctx, inputs, a.owners.lifecycle.Run),
		a.owners.setUpAgain,
		a.owners.hooks.Run,
		a.trim,
		a.awaitSuccessor,
		a.awaitPredecessorEnd,
	}
}

// keepFilesComplete restores files that other programs remove, until ctx ends: CDI files, without
// which the runtime makes no container, and device-info files, in which Multus looks up Functions.
func (a *agent) keepFilesComplete(ctx context.Context) error {
	type restorer interface{ Restore() ([]string, error) }
	var ofCDI []restorer
	if a.claims != nil {
		ofCDI = append(ofCDI, a.owners.files.Dir, a.env.copies)
	}
	if a.plugins.CDI != nil {
		ofCDI = append(ofCDI, a.plugins.CDI)
	}
	complete := func(dir string, restorers ...restorer) part {
		return func(ctx context.Context) error {
			return keep.Complete(ctx, dir, a.env.log.WithName("files"),
				func() (all []string, err error) {
					for _, r := range restorers {
						files, failed := r.Restore()
						all, err = append(all, files...), errors.Join(err, failed)
					}
					return all, err
				})
		}
	}

	a.adoptFiles()
	parts := []part{complete(a.env.deviceInfoDir(), a.plugins.DeviceInfo)}
	if len(ofCDI) > 0 {
		parts = append(parts, complete(a.env.config.CDIDir, ofCDI...))
	}
	return runAll(ctx, parts)
}

// serve waits until the Functions are known, recovers what the journal records, and serves pods
// until ctx ends.
func (a *agent) serve(ctx context.Context, serving []part, plugins *lasting) error {
	// Functions are brought back even if there is no API server.
	if !a.hardware.synced(ctx) {
		return nil
	}

	a.owners.recover(ctx)
	a.kubelet.refresh(ctx)
	plugins.start()

	err := runAll(ctx, append(serving, plugins.watch))
	// Running Allocates may finish while the parts that they need still work.
	if !errors.Is(err, upgrade.ErrSucceeded) {
		err = errors.Join(err, plugins.end())
	}

	return err
}

// lasting runs a part that may outlive the other parts.
type lasting struct {
	part  part
	group *errgroup.Group
	// ctx ends when the part has failed, or when stop is called.
	ctx  context.Context
	stop context.CancelFunc
}

// newLasting returns a part that is notified of the changes from now on; see [onChange].
func newLasting(
	ctx context.Context, signal *notify.Signal, run func(context.Context, <-chan struct{}) error,
) *lasting {
	ctx, stop := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	return &lasting{part: onChange(ctx, signal, run), group: group, ctx: ctx, stop: stop}
}

func (l *lasting) start() { l.group.Go(func() error { return l.part(l.ctx) }) }

// watch returns the error of the part when the part has failed, or nil when ctx ends.
func (l *lasting) watch(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-l.ctx.Done():
		return context.Cause(l.ctx)
	}
}

// end stops the part and waits for its end.
func (l *lasting) end() error {
	l.stop()
	return l.group.Wait()
}
