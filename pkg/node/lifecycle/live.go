package lifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Addresses are what an IPAM plugin gave an interface that is attached already.
type Addresses struct {
	Addresses []netip.Prefix
	Routes    []function.Route
	// Result is what the plugin printed.
	Result json.RawMessage
}

// Check describes how an attached Function differs from what was attached; nothing means that it does not.
func (m *Manager) Check(ctx context.Context, id function.ID) (differences []string, err error) {
	unlock, err := m.journal.Lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	defer wrap(&err, id)
	record, _ := m.journal.Get(id)
	if record.State != journal.Attached {
		return []string{"is not attached"}, nil
	}
	device, _ := Device(m.netdevs, record) // the netdev is in the pod; the PF is what matters
	return m.engine.Check(ctx, device, attached(record))
}

// Address gives the addresses to the interface that a CNI request has attached, and returns what the interface is then.
// belongs says whether the attachment is that of the request. Adding again what the interface has is no error.
func (m *Manager) Address(
	ctx context.Context, id function.ID, belongs func(journal.Attachment) bool, add Addresses,
) (_ netdev.Observed, err error) {
	unlock, err := m.journal.Lock(ctx, id)
	if err != nil {
		return netdev.Observed{}, err
	}
	defer unlock()
	defer wrap(&err, id)
	record, _ := m.journal.Get(id)
	if record.State != journal.Attached || record.CNI == nil || !belongs(record) {
		return netdev.Observed{}, errors.New("is not attached for this request")
	}
	request := *record.CNI
	request.IPAM = add.Result
	record.CNI = &request
	record.Interface.Addresses = union(record.Interface.Addresses, add.Addresses)
	record.Interface.Routes = union(record.Interface.Routes, add.Routes)
	if err := record.Interface.Validate(); err != nil {
		return netdev.Observed{}, err
	}
	if err := m.journal.Put(record); err != nil {
		return netdev.Observed{}, err
	}
	observed, err := m.engine.Add(ctx, attached(record), add.Addresses, add.Routes)
	if err != nil {
		return netdev.Observed{}, err
	}
	record.Observed = &observed
	return observed, m.journal.Put(record)
}

// union returns have with what it lacks of more at its end. have is not changed: it is in the journal.
func union[T comparable](have, more []T) []T {
	all := slices.Clone(have)
	for _, m := range more {
		if !slices.Contains(all, m) {
			all = append(all, m)
		}
	}
	return all
}

func attached(record journal.Attachment) netdev.Attached {
	return netdev.Attached{Before: *record.Before, Place: record.Place, Want: record.Interface, Observed: *record.Observed}
}
