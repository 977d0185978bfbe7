// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
)

// SetRemotes changes where VXLAN is sent to, and brings the networks with a VNI to it. It returns
// an error if ctx ends before.
func (a *Agent) SetRemotes(ctx context.Context, remotes *plane.Remotes) error {
	release, err := a.acquire(ctx)
	if err != nil {
		return err
	}
	defer release()

	a.remotes = remotes
	a.networks.reconcileEach(a.networks.withKey(keyVXLAN))

	return nil
}

// remoteStore keeps the addresses that the agent has put into the forwarding databases of VXLAN
// ports, by network, because the kernel does not say which program added an entry. Only work uses
// it: see [Agent.acquire].
type remoteStore struct {
	agent *Agent
	byID  map[string][]netip.Addr
}

const remotesBucket = "vxlan-remotes" // in the state file; a value has an address in each line

func newRemoteStore(a *Agent) *remoteStore {
	return &remoteStore{agent: a, byID: map[string][]netip.Addr{}}
}

// begin writes down the remotes of a network before the data plane gets them. It returns the
// network with the addresses that are no remotes any more.
func (s *remoteStore) begin(n plane.Segment) (plane.Segment, error) {
	all := slices.Clone(n.Remotes)
	for _, address := range s.byID[n.ID] {
		if !slices.Contains(n.Remotes, address) {
			n.Stale = append(n.Stale, address)
			all = append(all, address)
		}
	}
	return n, s.put(n.ID, all)
}

// end writes down that the data plane has exactly the remotes of a network.
func (s *remoteStore) end(n plane.Segment) error { return s.put(n.ID, n.Remotes) }

// put writes the addresses of a network, if they differ.
func (s *remoteStore) put(id string, addresses []netip.Addr) error {
	addresses = slices.SortedFunc(slices.Values(addresses), netip.Addr.Compare)
	if slices.Equal(addresses, s.byID[id]) {
		return nil
	}

	var lines []string
	for _, address := range addresses {
		lines = append(lines, address.String())
	}

	err := s.agent.state.Update(func(tx *boltfile.Tx) error {
		if err := tx.CreateBucket(remotesBucket); err != nil {
			return err
		}
		return tx.Put(remotesBucket, []byte(id), []byte(strings.Join(lines, "\n")))
	})
	if err != nil {
		return fmt.Errorf("state: %s %s: %w", remotesBucket, id, err)
	}

	s.byID[id] = addresses

	return nil
}

// delete removes the addresses of a network from the state file.
func (s *remoteStore) delete(tx *boltfile.Tx, id string) error {
	return tx.Delete(remotesBucket, []byte(id))
}

func (s *remoteStore) forget(id string) { delete(s.byID, id) }

// load reads the addresses of all networks.
func (s *remoteStore) load(tx *boltfile.Tx) error {
	return tx.ForEach(remotesBucket, func(id, data []byte) error {
		for line := range strings.FieldsSeq(string(data)) {
			address, err := netip.ParseAddr(line)
			if err != nil {
				return fmt.Errorf("%w (%s %q: %w)", boltfile.ErrCorrupt, remotesBucket, id, err)
			}
			s.byID[string(id)] = append(s.byID[string(id)], address)
		}
		return nil
	})
}
