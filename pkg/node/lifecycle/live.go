package lifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

// Check says in words how an attached Function differs from what was attached; nothing means that it does not.
func (m *Manager) Check(ctx context.Context, id function.ID) ([]string, error) {
	unlock, err := m.journal.Lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	record, ok := m.journal.Get(id)
	if !ok || record.State != journal.Attached {
		return []string{"is not attached"}, nil
	}
	device, _ := Device(m.netdevs, record) // the netdev is in the pod; the PF is what matters
	differences, err := m.engine.Check(ctx, device, attached(record))
	if err != nil {
		return nil, fmt.Errorf("Function %s: %w", id, err)
	}
	return differences, nil
}

// Address gives the interface that a CNI request has attached the addresses, and says what it is then. belongs says
// whether the attachment is that of the request. What the interface has already is no error.
func (m *Manager) Address(
	ctx context.Context, id function.ID, belongs func(journal.Attachment) bool, add Addresses,
) (netdev.Observed, error) {
	unlock, err := m.journal.Lock(ctx, id)
	if err != nil {
		return netdev.Observed{}, err
	}
	defer unlock()
	observed, err := m.address(ctx, id, belongs, add)
	if err != nil {
		return netdev.Observed{}, fmt.Errorf("Function %s: %w", id, err)
	}
	return observed, nil
}

// address writes down, touches, writes down.
func (m *Manager) address(
	ctx context.Context, id function.ID, belongs func(journal.Attachment) bool, add Addresses,
) (netdev.Observed, error) {
	record, ok := m.journal.Get(id)
	if !ok || record.State != journal.Attached || record.CNI == nil || !belongs(record) {
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

// union has what have lacks of more at its end. have is left as it is: it is in the journal.
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
