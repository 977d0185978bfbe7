// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"path/filepath"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/peer"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// For the time reconnecting after the end of the predecessor, a stream counts as lost after
// reconnectPatience already. A kubelet needs reconnectPatience to start a stream after it
// registered an endpoint.
const reconnecting, reconnectPatience = 5 * time.Second, 200 * time.Millisecond

// Reconnect is called in an upgrade when the predecessor has ended; see package upgrade. A kubelet
// before 1.37 then loses the resources of both agents, because it keeps one connection for each
// resource name, and closes it when any endpoint of the resource ends (runClient in
// pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go).
func (m *Manager) Reconnect(ctx context.Context) {
	// The predecessor leaves sockets if it was killed.
	if err := peer.RemoveDead(filepath.Join(m.socketDir(), socketPattern)); err != nil {
		m.Log.Error(err, "A socket that nobody serves remains")
	}

	m.mutex.Lock()
	m.unwatchedFor = reconnectPatience
	for _, s := range m.servers {
		s.patience = reconnectPatience
		if s.endpoint != nil && !s.lostAt.IsZero() {
			s.streamsChanged()
		}
	}

	m.mutex.Unlock()
	loop.Sleep(ctx, reconnecting)
	m.mutex.Lock()
	defer m.mutex.Unlock()

	m.unwatchedFor = unwatchedFor
	for _, s := range m.servers {
		s.patience = max(s.patience, unwatchedFor)
	}
}
