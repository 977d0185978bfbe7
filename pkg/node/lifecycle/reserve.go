package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Reserve waits until the owner is admitted, see [Manager.Admit], records durably that the Function is the owner's and
// what its interface shall be, and sets the Function up. It sets the state and the fields that depend on it. Reserving
// again for the same owner replaces the interface until the Function is being attached, and changes nothing from then on.
// Without a claim and a request the reservation is for the next pod that comes: made again it is a new one, after a
// release. A reservation whose setup failed stays, and the next Reserve continues it.
func (m *Manager) Reserve(ctx context.Context, want journal.Attachment) (err error) {
	defer wrap(&err, want.Function)
	checked := want.Interface
	if want.Claim.UID == "" && want.CNI == nil {
		checked.Name = cmp.Or(checked.Name, "later") // the device plugin does not know it yet
	}
	if err := checked.Validate(); err != nil {
		return err
	}
	_, err = m.whenAdmitted(ctx, triggerOf(want), want.Function, func(have journal.Attachment) error {
		return m.take(ctx, have, want)
	})
	return err
}

// take replaces the record that the Function has, if any, and sets the Function up. The caller has the Function's lock.
func (m *Manager) take(ctx context.Context, have, want journal.Attachment) (err error) {
	exists := have.State != ""
	if exists && have.Claim.UID != want.Claim.UID {
		return taken("belongs to %s", owner(have)) // since the request was made up
	}
	cni, wanted := want.CNI, want.Interface
	want = want.BackToReserved()
	want.CNI, want.Interface, want.Ended, want.ReservedAt = cni, wanted, nil, time.Now().UTC()
	if exists {
		want.Ended, want.ReservedAt = have.Ended, have.ReservedAt
		if want.Port == nil {
			want.Port = have.Port // the xPU may serve it already; only a release takes it away
		}
	}
	if have.Setup != nil {
		want.Setup = have.Setup // only a release undoes it
	} else if want.Setup != nil {
		if m.options.Setup == nil {
			return errNoSetup
		}
		if want.Setup, err = m.options.Setup.Plan(ctx, want); err != nil {
			return err
		}
	}
	if !reflect.DeepEqual(have, want) {
		if err := m.journal.Put(want); err != nil {
			return err
		}
		m.log.V(1).Info("Function reserved", "function", want.Function.String(), "owner", owner(want))
		m.options.Taken(want.Function)
	}
	return m.setUp(ctx, want)
}

// setUp does what the record's Setup says, if it has one. The caller has the Function's lock.
func (m *Manager) setUp(ctx context.Context, a journal.Attachment) error {
	if a.Setup == nil {
		return nil
	}
	if m.options.Setup == nil {
		return errNoSetup
	}
	return m.options.Setup.SetUp(ctx, a)
}

// errNoSetup is returned for what only a [Setup] can do.
var errNoSetup = errors.New("cannot be set up: this agent makes no SFs and binds no drivers")
