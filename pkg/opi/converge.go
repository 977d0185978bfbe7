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

// kind has the calls to the agent for ports or for networks, where a [Client] treats both alike.
type kind struct {
	noun string
	// status also says whether the object is the installation's.
	status func(ctx context.Context, id string) (s Status, ours bool, err error)
	delete func(ctx context.Context, id string) error
	// again: an object that is still in service some time after a deletion is deleted again.
	again bool
}

func (k kind) object(id string) object { return object{k.noun, id} }

// deleteAgain is the time after which a deletion that shows no effect is taken for lost. The
// reference agent may keep an object for ever that is deleted while it works on an earlier
// deletion.
const deleteAgain = 2 * time.Second

// created interprets the error of a call that creates an object. It returns nil if there is an
// object of the id although the call failed. The caller must verify that it is the right one.
func (c *Client) created(ctx context.Context, k kind, op, id string, err error) error {
	if err != nil && outcomeUnknown(err) {
		if _, _, getErr := k.status(ctx, id); getErr == nil {
			return nil
		}
	}
	return c.failure(ctx, op, id, err)
}

// delete returns nil once the agent says that there is no such object, or that it is not the
// installation's. It asks the agent for nothing while the object is being deleted.
func (c *Client) delete(ctx context.Context, k kind, op, id string) error {
	if err := checkID(op, id); err != nil {
		return err
	}

	var asked time.Time
	var refused error
	o := k.object(id)

	return await(ctx, op, id, func(ctx context.Context) (done bool, said string, err error) {
		if said, err := c.answered(ctx, op, o); err != nil {
			return false, said, err
		}

		got, ours, err := k.status(ctx, id)
		err = c.failure(ctx, op, id, err)
		if errors.Is(err, ErrNotFound) {
			c.changes.seen(o, false)
			doubt := c.changes.doubt(o, creation)
			return doubt == "", doubt, nil
		}

		if err != nil {
			return false, "", err
		}

		c.changes.seen(o, got.State != StateDeleting)
		if !ours {
			return true, "", nil
		}

		said = got.of(k.noun)
		switch {
		case got.State == StateDeleting:
		case refused != nil:
			return false, said, c.failure(ctx, op, id, refused)
		case asked.IsZero() || k.again && time.Since(asked) >= deleteAgain:
			asked = time.Now()
			refused = c.change(ctx, o, deletion, func(ctx context.Context) error {
				return k.delete(ctx, id)
			})
		}

		switch {
		case errors.Is(refused, ErrInUse):
		case refused == nil || status.Code(refused) == codes.NotFound || outcomeUnknown(refused):
			return false, said, nil
		}

		return false, said, c.failure(ctx, op, id, refused)
	})
}

// await calls look until it says that it is done or returns an error; there is nothing to watch in
// the API. The pauses grow by half, so that waiting takes at most half longer than the agent
// itself. If the context ends first, the error has what look returned last as said; "" is nothing
// new.
func await(
	ctx context.Context, op, id string,
	look func(context.Context) (done bool, said string, err error),
) error {
	last := "the agent has not said anything about it"
	step := func(ctx context.Context) (bool, error) {
		done, said, err := look(ctx)
		last = cmp.Or(said, last)
		return done, err
	}

	// The second look follows the first at once: an agent may have done in its answer what it was
	// asked for, and a pause of less than a millisecond takes the Go runtime a millisecond.
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
