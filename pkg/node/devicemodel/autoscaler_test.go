// SPDX-License-Identifier: Apache-2.0

package devicemodel

import (
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
)

// TestDevicesOfEqualNodes: autoscalers expect the devices of a node of a new node of its kind.
// cluster-autoscaler copies only slices with a nodeName, and Karpenter's providers describe devices
// before there is a node. So devices of equal nodes are equal, and no pool, slice or device selects
// nodes in another way.
func TestDevicesOfEqualNodes(t *testing.T) {
	pools := []pool.Pool{
		pooltest.DRA("fast", append(pooltest.VFs(0x3b, 4), pooltest.SF(0x3b, 88))...),
		modelled(v1alpha1.ModelCounters, 4, 100_000), modelled(v1alpha1.ModelPorts, 4, 100_000),
	}
	for _, provision := range []v1alpha1.ProvisionMode{
		v1alpha1.ProvisionOnPrepare, v1alpha1.ProvisionBeforeBind, v1alpha1.ProvisionAhead,
	} {
		for i := range pools {
			pools[i].Name = strings.ToLower(string(provision)) + string(rune('a'+i))
			pools[i].Spec.Provision = provision
		}

		one := Resources("one.example.com", pools, healthy, noneAhead)
		two := Resources("two.example.com", pools, healthy, noneAhead)
		if len(one.Pools) != len(pools) {
			t.Fatalf("%s: %d DRA pools of %d DevicePools", provision, len(one.Pools), len(pools))
		}
		for name, p := range one.Pools {
			same := strings.Replace(name, "one.example.com", "two.example.com", 1)
			if diff := gocmp.Diff(p, two.Pools[same]); diff != "" || same == name {
				t.Errorf("pool %s of an equal node (-one +two):\n%s", name, diff)
			}
			if p.NodeSelector != nil || p.AllNodes {
				t.Errorf("pool %s selects nodes, so that its slices have no nodeName", name)
			}
			for _, slice := range p.Slices {
				if slice.PerDeviceNodeSelection != nil {
					t.Errorf("devices of pool %s select nodes", name)
				}
			}
		}
	}
}
