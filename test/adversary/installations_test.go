// SPDX-License-Identifier: Apache-2.0

package adversary

import (
	"slices"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestTwoClustersAtOneAgent: both clusters have a node of the same name with the same addresses,
// and networks of the same name and VLAN. The first keeps its port and its network whatever the
// second does, which is told why it gets none.
func TestTwoClustersAtOneAgent(t *testing.T) {
	ours.Need(t)
	second, err := kubeapitest.Start(deploy)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, second.Stop()) })

	agent := opitest.Start(t)
	us, them := newWorld(t, ours), newWorld(t, second)
	for _, w := range []*world{us, them} {
		w.create(xpu("card", "node1", agent.Config().Endpoint), network("blue", 100, ""),
			pool("fast"))
	}

	us.claim("a", "node1", 0, `"network": "blue"`)
	first := us.port("default", "node1", 0, v1alpha1.ReasonUp, "")
	networks := agent.Networks()

	same := them.claim("a", "node1", 0, `"network": "blue"`)
	other := them.claim("b", "node1", 1, `"network": "blue"`)
	refused := them.port("default", "node1", 0, v1alpha1.ReasonConflict, "")
	them.port("default", "node1", 1, v1alpha1.ReasonConflict, "VLAN 100")
	them.told(same, v1alpha1.ReasonConflict, "")
	them.gone(same)
	them.gone(other)
	them.gone(refused)
	them.gone(network("blue", 100, ""))
	them.gone(xpu("card", "node1", ""))
	compared(t, agent)

	if !slices.Contains(agent.Ports(), first.Status.BridgePort) ||
		!slices.Equal(agent.Networks(), networks) {
		t.Errorf("the agent has ports %q and networks %q, want %s in %q", agent.Ports(),
			agent.Networks(), first.Status.BridgePort, networks)
	}

	us.port("default", "node1", 0, v1alpha1.ReasonUp, "")
}
