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

// TestHostileAgent checks that an agent that never answers, lists without end, returns huge errors
// or loses its ports affects only its own node, and that an object reports it.
func TestHostileAgent(t *testing.T) {
	for name, test := range map[string]struct {
		behaviour func(*opitest.Behaviour)
		reason    string // of the condition Ready of its XPU
	}{
		"hung":    {func(b *opitest.Behaviour) { b.Hung = true }, v1alpha1.ReasonXPUUnavailable},
		"endless": {func(b *opitest.Behaviour) { b.Endless = true }, v1alpha1.ReasonConnected},
		"wordy": {func(b *opitest.Behaviour) {
			b.Realise = func(string) error { return errors.New(strings.Repeat("no ", 20_000)) }
		}, v1alpha1.ReasonConnected},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, sharedCluster)
			hostile, good := opitest.Start(t), opitest.Start(t)
			bad := xpu("bad", "node1", hostile.Config().Endpoint)
			w.create(bad, xpu("good", "node2", good.Config().Endpoint), network("blue", 100, ""),
				pool("fast"))
			w.claim("before", "node1", 0, `"network": "blue"`)
			w.waitForPort("default", "node1", 0, v1alpha1.ReasonUp, "")
			hostile.Set(test.behaviour)
			refused := w.claim("bad", "node1", 1, `"network": "blue"`)
			w.claim("good", "node2", 1, `"network": "blue"`)
			w.waitForPort("default", "node2", 1, v1alpha1.ReasonUp, "")
			w.waitForReady(bad, &bad.Status.Conditions, test.reason, "")

			if name == "wordy" {
				w.waitForProvisioned(refused, v1alpha1.ReasonFailed, "no no")
			}

			waitForComparisons(t, good)
			w.waitForPort("default", "node2", 1, v1alpha1.ReasonUp, "")
		})
	}
}

// TestForgetfulAgent checks that a port which the agent lost is created again.
func TestForgetfulAgent(t *testing.T) {
	w := newWorld(t, sharedCluster)
	agent := opitest.Start(t)
	w.create(xpu("card", "node1", agent.Config().Endpoint), network("blue", 100, ""), pool("fast"))
	w.claim("a", "node1", 0, `"network": "blue"`)
	port := w.waitForPort("default", "node1", 0, v1alpha1.ReasonUp, "")
	agent.Lose(port.Status.BridgePort)
	must.Eventually(t, "the port is there again", func() bool {
		return len(agent.Ports()) == 1 && agent.Ports()[0] == port.Status.BridgePort
	})
}
