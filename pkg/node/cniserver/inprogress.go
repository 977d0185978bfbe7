package cniserver

import (
	"context"
	"errors"
	"sync"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// attachmentKey is what CNI knows an attachment by.
type attachmentKey struct{ containerID, ifName string }

// add is an ADD that runs.
type add struct {
	key    attachmentKey
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// addsInProgress knows the ADDs that run. There is one at a time for a Function, so that nobody else has its xPU asked.
type addsInProgress struct {
	byFunction sync.Map // *add by function.ID
}

var errDeleted = errors.New("DEL came meanwhile")

// enter begins an ADD, and leave ends it. ctx ends when a DEL for the same attachment comes.
func (a *addsInProgress) enter(
	ctx context.Context, id function.ID, key attachmentKey,
) (_ context.Context, leave func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	running := &add{key: key, cancel: cancel, done: make(chan struct{})}
	if other, taken := a.byFunction.LoadOrStore(id, running); taken {
		cancel(nil)
		return ctx, nil, fail(types.ErrTryAgainLater, "Function %s: an ADD for container %s runs already",
			id, other.(*add).key.containerID)
	}
	return ctx, func() {
		cancel(nil)
		a.byFunction.Delete(id)
		close(running.done)
	}, nil
}

// end ends the ADDs of an attachment and waits until they left.
func (a *addsInProgress) end(ctx context.Context, key attachmentKey) error {
	for _, running := range a.of(key) {
		running.cancel(errDeleted)
		select {
		case <-running.done:
		case <-ctx.Done():
			return fail(types.ErrTryAgainLater, "an ADD of the same interface has not ended yet: %w", context.Cause(ctx))
		}
	}
	return nil
}

// of are the ADDs of an attachment that run.
func (a *addsInProgress) of(key attachmentKey) (list []*add) {
	for _, running := range a.byFunction.Range {
		if running := running.(*add); running.key == key {
			list = append(list, running)
		}
	}
	return list
}
