// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"sync"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// rdmaMoves says which RDMA devices go to pods: those of Functions whose pool asks for them, where
// the RDMA system is in mode exclusive, because a pod could not open one that stays on the host.
type rdmaMoves struct {
	sysRoot string
	find    func(function.ID) (f function.Function, exists bool)
	poolOf  func(function.ID) (of pool.Pool, exists bool)

	mutex sync.Mutex
	// given has the character devices that the kubelet gave to containers, by Function. The kubelet
	// gives them before the RDMA device moves.
	given map[function.ID][]string
}

// allocated remembers which character devices containers get of a Function of the device plugin.
func (m *rdmaMoves) allocated(f function.Function, p pool.Pool) error {
	var nodes []string
	isGiven := p.Options(f).RDMA
	if isGiven {
		var err error
		if nodes, err = m.nodes(f); err != nil {
			return err
		}
	}

	m.mutex.Lock()
	defer m.mutex.Unlock()
	if !isGiven {
		delete(m.given, f.ID)
		return nil
	}
	if m.given == nil {
		m.given = map[function.ID][]string{}
	}
	m.given[f.ID] = nodes
	return nil
}

// of implements RDMA of [lifecycle.Options]. A container of a claim gets its character devices after
// the attachment. After a start of the agent it is not known which ones the kubelet gave, so that the
// current ones count.
func (m *rdmaMoves) of(owner journal.Attachment) *netdev.RDMANames {
	f, exists := m.find(owner.Function)
	if !exists || f.RDMAMode != function.RDMAExclusive || !m.promised(owner, f) {
		return nil
	}

	moves := &netdev.RDMANames{Dir: string(sysfs.Root("").Function(f)), Names: f.RDMADevices}
	if owner.Claim.UID == "" {
		moves.Nodes = m.givenOf(f)
	}
	return moves
}

// promised reports whether the pool promised the RDMA devices when it gave the Function away. The
// pool of today says it if nobody recorded it, and may have been changed or deleted.
func (m *rdmaMoves) promised(owner journal.Attachment, f function.Function) bool {
	if owner.Devices != nil {
		return owner.Devices.RDMA
	}
	m.mutex.Lock()
	_, isGiven := m.given[f.ID]
	m.mutex.Unlock()
	of, _ := m.poolOf(owner.Function)
	return owner.Claim.UID == "" && isGiven || of.Options(f).RDMA
}

func (m *rdmaMoves) givenOf(f function.Function) []string {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if given, known := m.given[f.ID]; known {
		return slices.Clone(given)
	}

	now, err := m.nodes(f)
	if err != nil {
		now = []string{} // unlike any that the device has
	}
	return now
}

func (m *rdmaMoves) nodes(f function.Function) ([]string, error) {
	return sysfs.Root(m.sysRoot).Function(f).RDMANodes()
}
