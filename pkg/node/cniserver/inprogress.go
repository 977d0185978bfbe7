package cniserver

import (
	"context"
	"errors"
	"sync"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// add is an ADD that runs. done is closed when it has ended.
type add struct {
	types.GCAttachment
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// addsInProgress knows the ADDs that run. There is one at a time for a Function, so that the xPU is asked for one owner only.
type addsInProgress struct {
	byFunction sync.Map // *add by function.ID
}

var errDeleted = errors.New("DEL came meanwhile")

// run runs an ADD. Its context ends when a DEL for the same attachment comes.
func (a *addsInProgress) run(
	ctx context.Context, id function.ID, attachment types.GCAttachment, work func(context.Context) error,
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	running := &add{attachment, cancel, make(chan struct{})}
	if other, taken := a.byFunction.LoadOrStore(id, running); taken {
		return fail(types.ErrTryAgainLater, "Function %s: an ADD for container %s runs already", id, other.(*add).ContainerID)
	}
	defer close(running.done)
	defer a.byFunction.Delete(id)
	return work(ctx)
}

// end ends the ADDs of an attachment and waits until they have ended.
func (a *addsInProgress) end(ctx context.Context, attachment types.GCAttachment) error {
	for _, running := range a.of(attachment) {
		running.cancel(errDeleted)
		select {
		case <-running.done:
		case <-ctx.Done():
			return fail(types.ErrTryAgainLater, "an ADD of the same interface has not ended yet: %w", context.Cause(ctx))
		}
	}
	return nil
}

// of returns the ADDs of an attachment that run.
func (a *addsInProgress) of(attachment types.GCAttachment) (list []*add) {
	for _, running := range a.byFunction.Range {
		if running := running.(*add); running.GCAttachment == attachment {
			list = append(list, running)
		}
	}
	return list
}
