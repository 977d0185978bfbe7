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

// TestTwoClustersAtOneAgent checks two clusters whose nodes, addresses, networks and VLANs are the
// same. The first keeps its port and its network whatever the second does, and the second reports
// why it gets none.
func TestTwoClustersAtOneAgent(t *testing.T) {
	sharedCluster.Need(t)
	second, err := kubeapitest.Start(deploy)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, second.Stop()) })

	agent := opitest.Start(t)
	us, them := newWorld(t, sharedCluster), newWorld(t, second)
	for _, w := range []*world{us, them} {
		w.create(xpu("card", "node1", agent.Config().Endpoint), network("blue", 100, ""),
			pool("fast"))
	}

	us.claim("a", "node1", 0, `"network": "blue"`)
	first := us.waitForPort("default", "node1", 0, v1alpha1.ReasonUp, "")
	networks := agent.Networks()

	same := them.claim("a", "node1", 0, `"network": "blue"`)
	other := them.claim("b", "node1", 1, `"network": "blue"`)
	refused := them.waitForPort("default", "node1", 0, v1alpha1.ReasonConflict, "")
	them.waitForPort("default", "node1", 1, v1alpha1.ReasonConflict, "VLAN 100")
	them.waitForProvisioned(same, v1alpha1.ReasonConflict, "")
	them.deleteAndWait(same)
	them.deleteAndWait(other)
	them.deleteAndWait(refused)
	them.deleteAndWait(network("blue", 100, ""))
	them.deleteAndWait(xpu("card", "node1", ""))
	waitForComparisons(t, agent)

	if !slices.Contains(agent.Ports(), first.Status.BridgePort) ||
		!slices.Equal(agent.Networks(), networks) {
		t.Errorf("the agent has ports %q and networks %q, want %s in %q", agent.Ports(),
			agent.Networks(), first.Status.BridgePort, networks)
	}

	us.waitForPort("default", "node1", 0, v1alpha1.ReasonUp, "")
}
