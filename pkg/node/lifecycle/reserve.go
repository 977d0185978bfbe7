package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Reserve records durably whom the Function belongs to and what its interface shall be, and then has it set up for
// its owner; nothing else is touched. What is in the way is settled first, see [Manager.Settle]. The state and what
// belongs to it are set here. Reserving again for the same owner changes nothing once the Function is being attached;
// before, what the interface shall be is replaced. A reservation whose setting up failed stays, and is continued when it
// is made again.
//
// The owner is the CNI request, or else the claim, or else whomever the kubelet allocates the Function to: a reservation
// without a claim and a request is for the next pod that comes, and made again it is a new one, after a release.
func (m *Manager) Reserve(ctx context.Context, want journal.Attachment) error {
	if err := m.reserve(ctx, want); err != nil {
		return fmt.Errorf("Function %s: %w", want.Function, err)
	}
	return nil
}

func (m *Manager) reserve(ctx context.Context, want journal.Attachment) error {
	if err := validate(want); err != nil {
		return err
	}
	for {
		settled, err := m.settle(ctx, partyOf(want), want.Function)
		if err != nil {
			return err
		}
		if settled.step == Keep {
			return nil
		}
		if done, err := m.take(ctx, settled, reservation(want)); done || err != nil {
			return err
		}
	}
}

// take writes the reservation down, if the record is still the one that was settled, and has the Function set up.
func (m *Manager) take(ctx context.Context, settled Settled, want journal.Attachment) (done bool, err error) {
	unlock, err := m.journal.Lock(ctx, want.Function)
	if err != nil {
		return false, err
	}
	defer unlock()
	have, exists := m.journal.Get(want.Function)
	if exists != settled.Exists || !reflect.DeepEqual(have, settled.Record) {
		return false, nil
	}
	if want, err = m.record(ctx, have, exists, want); err != nil {
		return false, err
	}
	return true, m.setUp(ctx, want)
}

// record writes the reservation down, where the one there is does not say as much already, and returns it.
func (m *Manager) record(
	ctx context.Context, have journal.Attachment, exists bool, want journal.Attachment,
) (_ journal.Attachment, err error) {
	if exists && have.Claim.UID != want.Claim.UID {
		return want, taken("belongs to %s", owner(have)) // since the request was made up
	}
	if exists {
		want.Ended, want.ReservedAt = have.Ended, have.ReservedAt
		if want.Port == nil {
			want.Port = have.Port // the xPU may serve it already; only a release takes it away
		}
	}
	if want.Setup, err = m.planSetup(ctx, have, want); err != nil {
		return want, err
	}
	if reflect.DeepEqual(have, want) {
		return want, nil
	}
	if err := m.journal.Put(want); err != nil {
		return want, err
	}
	m.log.V(1).Info("Function reserved", "function", want.Function.String(), "owner", owner(want))
	m.options.Taken(want.Function)
	return want, nil
}

// planSetup is what is to be done for the owner. What was done already stays, as only a release undoes it.
func (m *Manager) planSetup(ctx context.Context, have, want journal.Attachment) (*journal.Setup, error) {
	switch {
	case have.Setup != nil:
		return have.Setup, nil
	case want.Setup == nil:
		return nil, nil
	case m.options.Setup == nil:
		return nil, errNoSetup
	}
	return m.options.Setup.Plan(ctx, want)
}

// setUp does what the reservation's Setup says, if it has one. The caller has the Function's lock.
func (m *Manager) setUp(ctx context.Context, reserved journal.Attachment) error {
	if reserved.Setup == nil {
		return nil
	}
	if m.options.Setup == nil {
		return errNoSetup
	}
	return m.options.Setup.SetUp(ctx, reserved)
}

// errNoSetup is returned for what only an [Setup] can do.
var errNoSetup = errors.New("cannot be set up: this agent makes no SFs and binds no drivers")

// validate checks the interface. The device plugin does not know its name.
func validate(want journal.Attachment) error {
	if want.Claim.UID == "" && want.CNI == nil {
		want.Interface.Name = cmp.Or(want.Interface.Name, "later")
	}
	return want.Interface.Validate()
}

// reservation is what is wanted, with nothing else.
func reservation(want journal.Attachment) journal.Attachment {
	reserved := want.Untouched()
	reserved.Interface, reserved.CNI = want.Interface, want.CNI
	reserved.ReservedAt, reserved.Ended = time.Now().UTC(), nil
	return reserved
}
