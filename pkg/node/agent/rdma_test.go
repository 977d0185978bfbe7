// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// TestRDMAMoves checks which RDMA devices go to which pods, and which nodes their containers have.
func TestRDMAMoves(t *testing.T) {
	const dir = "bus/pci/devices/0000:3b:02.1"
	id := function.ID{Address: "0000:3b:02.1"}
	roce := pool.Pool{Spec: v1alpha1.DevicePoolSpec{
		Selectors: []v1alpha1.FunctionSelector{{IsRdma: true}},
	}}
	byPod := journal.Attachment{Function: id}
	byClaim := journal.Attachment{Function: id, Claim: journal.Claim{UID: "claim"}}

	tests := map[string]struct {
		mode      function.RDMAMode
		pool      pool.Pool
		owner     journal.Attachment
		allocated bool // the kubelet gave uverbs0 to a container
		deleted   bool // the pool, meanwhile
		want      *netdev.RDMANames
	}{
		"mode shared":  {mode: function.RDMAShared, pool: roce, owner: byClaim},
		"mode unknown": {pool: roce, owner: byClaim},
		"not asked for": {
			mode: function.RDMAExclusive, owner: byClaim,
			pool: pool.Pool{Spec: v1alpha1.DevicePoolSpec{
				Selectors: []v1alpha1.FunctionSelector{{}},
			}},
		},
		"claim": {
			mode: function.RDMAExclusive, pool: roce, owner: byClaim, allocated: true,
			want: &netdev.RDMANames{Dir: dir, Names: []string{"mlx5_2"}},
		},
		"device plugin": {
			mode: function.RDMAExclusive, pool: roce, owner: byPod, allocated: true,
			want: &netdev.RDMANames{
				Dir: dir, Names: []string{"mlx5_2"}, Nodes: []string{"uverbs0", "umad0"},
			},
		},
		"claim of a pool that is deleted": {
			mode: function.RDMAExclusive, pool: roce, deleted: true,
			owner: journal.Attachment{Function: id, Claim: byClaim.Claim,
				Devices: &journal.Devices{RDMA: true}},
			want: &netdev.RDMANames{Dir: dir, Names: []string{"mlx5_2"}},
		},
		"claim from before the pool asked for it": {
			mode: function.RDMAExclusive, pool: roce,
			owner: journal.Attachment{Function: id, Claim: byClaim.Claim, Devices: &journal.Devices{}},
		},
		"device plugin of a pool that is deleted": {
			mode: function.RDMAExclusive, pool: roce, owner: byPod, allocated: true, deleted: true,
			want: &netdev.RDMANames{
				Dir: dir, Names: []string{"mlx5_2"}, Nodes: []string{"uverbs0", "umad0"},
			},
		},
		"device plugin, after a start of the agent": {
			mode: function.RDMAExclusive, pool: roce, owner: byPod,
			want: &netdev.RDMANames{
				Dir: dir, Names: []string{"mlx5_2"}, Nodes: []string{"uverbs3", "umad3"},
			},
		},
	}

	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			f := function.Function{
				ID: id, Kind: function.VF, RDMA: true, RDMADevices: []string{"mlx5_2"},
				RDMAMode: tt.mode,
			}
			sysRoot := t.TempDir()
			nodes := func(number string) {
				for class, node := range map[string]string{
					"infiniband_verbs": "uverbs", "infiniband_mad": "umad",
				} {
					folder := filepath.Join(sysRoot, dir, class)
					if err := os.RemoveAll(folder); err != nil {
						t.Fatal(err)
					}
					if err := os.MkdirAll(filepath.Join(folder, node+number), 0o755); err != nil {
						t.Fatal(err)
					}
				}
			}

			m := &rdmaMoves{
				sysRoot: sysRoot,
				find:    func(function.ID) (function.Function, bool) { return f, true },
				poolOf: func(function.ID) (pool.Pool, bool) {
					if tt.deleted {
						return pool.Pool{}, false
					}
					return tt.pool, true
				},
			}
			nodes("0")
			if tt.allocated {
				if err := m.allocated(f, tt.pool); err != nil {
					t.Fatal(err)
				}
			}

			nodes("3")
			if diff := cmp.Diff(tt.want, m.of(tt.owner)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
