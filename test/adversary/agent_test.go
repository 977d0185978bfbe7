// SPDX-License-Identifier: Apache-2.0

package adversary

import (
	"errors"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestHostileAgent: an agent that answers nothing, lists without end, says a book for an error or
// loses its ports harms its own node only, and an object says so.
func TestHostileAgent(t *testing.T) {
	for name, test := range map[string]struct {
		behaviour func(*opitest.Behaviour)
		reason    string // of its XPU
	}{
		"hung":    {func(b *opitest.Behaviour) { b.Hung = true }, v1alpha1.ReasonXPUUnavailable},
		"endless": {func(b *opitest.Behaviour) { b.Endless = true }, v1alpha1.ReasonConnected},
		"wordy": {func(b *opitest.Behaviour) {
			b.Realise = func(string) error { return errors.New(strings.Repeat("no ", 20_000)) }
		}, v1alpha1.ReasonConnected},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, ours)
			hostile, good := opitest.Start(t), opitest.Start(t)
			bad := xpu("bad", "node1", hostile.Config().Endpoint)
			w.create(bad, xpu("good", "node2", good.Config().Endpoint), network("blue", 100, ""),
				pool("fast"))
			w.claim("before", "node1", 0, `"network": "blue"`)
			w.port("default", "node1", 0, v1alpha1.ReasonUp, "")
			hostile.Set(test.behaviour)
			refused := w.claim("bad", "node1", 1, `"network": "blue"`)
			w.claim("good", "node2", 1, `"network": "blue"`)
			w.port("default", "node2", 1, v1alpha1.ReasonUp, "")
			w.ready(bad, &bad.Status.Conditions, test.reason, "")

			if name == "wordy" {
				w.told(refused, v1alpha1.ReasonFailed, "no no")
			}

			compared(t, good)
			w.port("default", "node2", 1, v1alpha1.ReasonUp, "")
		})
	}
}

// TestForgetfulAgent: a port that the agent loses is made again.
func TestForgetfulAgent(t *testing.T) {
	w := newWorld(t, ours)
	agent := opitest.Start(t)
	w.create(xpu("card", "node1", agent.Config().Endpoint), network("blue", 100, ""), pool("fast"))
	w.claim("a", "node1", 0, `"network": "blue"`)
	port := w.port("default", "node1", 0, v1alpha1.ReasonUp, "")
	agent.Lose(port.Status.BridgePort)
	must.Eventually(t, "the port is there again", func() bool {
		return len(agent.Ports()) == 1 && agent.Ports()[0] == port.Status.BridgePort
	})
}
