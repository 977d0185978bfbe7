// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"cmp"
	"context"
	"errors"
	"math"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"
)

// objectKind has the calls for ports or for networks, for the code that treats both alike.
type objectKind struct {
	noun string
	// status also reports whether the object is the installation's.
	status func(ctx context.Context, id string) (s Status, ours bool, err error)
	delete func(ctx context.Context, id string) error
	// deleteAgain is the time after which a deletion without effect is repeated; 0 means never.
	deleteAgain time.Duration
}

func (k objectKind) object(id string) object { return object{k.noun, id} }

// verifyCreated interprets the error of a create call. It returns nil if the object exists although
// the call failed. The caller must verify the object's properties.
func (c *Client) verifyCreated(ctx context.Context, k objectKind, op, id string, err error) error {
	if err != nil && outcomeUnknown(err) {
		if _, _, getErr := k.status(ctx, id); getErr == nil {
			return nil
		}
	}
	return c.failure(ctx, op, id, err)
}

// delete returns nil once the agent reports that the object does not exist, or is not the
// installation's. While the object is being deleted, it only waits.
func (c *Client) delete(ctx context.Context, k objectKind, op, id string) error {
	if err := checkID(op, id); err != nil {
		return err
	}

	var askedAt time.Time
	var deleteErr error
	o := k.object(id)

	return await(ctx, op, id, func(ctx context.Context) (done bool, progress string, err error) {
		if progress, err := c.waitForChange(ctx, op, o); err != nil {
			return false, progress, err
		}

		got, ours, err := k.status(ctx, id)
		err = c.failure(ctx, op, id, err)
		if errors.Is(err, ErrNotFound) {
			c.changes.observe(o, false)
			doubt := c.changes.doubt(o, creation)
			return doubt == "", doubt, nil
		}

		if err != nil {
			return false, "", err
		}

		c.changes.observe(o, got.State != StateDeleting)
		if !ours {
			return true, "", nil
		}

		progress = got.describe(k.noun)
		switch {
		case got.State == StateDeleting:
		case deleteErr != nil:
			return false, progress, c.failure(ctx, op, id, deleteErr)
		case askedAt.IsZero() || k.deleteAgain > 0 && time.Since(askedAt) >= k.deleteAgain:
			askedAt = time.Now()
			deleteErr = c.change(ctx, o, deletion, func(ctx context.Context) error {
				return k.delete(ctx, id)
			})
		}

		switch {
		case errors.Is(deleteErr, ErrInUse):
		case deleteErr == nil || status.Code(deleteErr) == codes.NotFound ||
			outcomeUnknown(deleteErr):
			return false, progress, nil
		}

		return false, progress, c.failure(ctx, op, id, deleteErr)
	})
}

// await calls poll until it is done or returns an error, because the API has no watch. Pauses grow
// by half, so that waiting takes at most half longer than the agent. If ctx ends first, the error
// contains the last non-empty progress.
func await(
	ctx context.Context, op, id string,
	poll func(context.Context) (done bool, progress string, err error),
) error {
	last := "the agent has not said anything about it"
	step := func(ctx context.Context) (bool, error) {
		done, progress, err := poll(ctx)
		last = cmp.Or(progress, last)
		return done, err
	}

	// The second poll follows at once, because an agent may already have carried out what the first
	// asked for, and because the Go runtime takes a millisecond for any shorter pause.
	done, err := step(ctx)
	if !done && err == nil {
		pauses := wait.Backoff{Duration: time.Millisecond, Factor: 1.5, Cap: 100 * time.Millisecond,
			Steps: math.MaxInt32}
		err = pauses.DelayFunc().Until(ctx, true, true, step)
	}

	if ended(ctx) && (wait.Interrupted(err) || errors.Is(err, ErrTimeout)) {
		return timeout(ctx, op, id, last)
	}

	return err
}
