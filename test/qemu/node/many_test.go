// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
)

// TestMany checks that all VFs of eight cards can be in pods at the same time and come back as they
// were. It attaches the VFs of one card one after the other, and the cards side by side.
func TestMany(t *testing.T) {
	f := newField(t)
	const cards, each = 8, 7
	if len(f.pfs) != cards || len(f.all()) != cards*each {
		t.Fatalf("the guest has %d cards and %d VFs, want %d and %d", len(f.pfs), len(f.all()),
			cards, cards*each)
	}

	begin := time.Now()
	f.Start()
	f.WantHealthy(resource, f.all()...)
	t.Logf("%d VFs are offered %s after the agent was started", cards*each,
		since(time.Now(), begin))
	pods := make([][]*node.Pod, cards)
	for card, vfs := range f.vfs {
		for i, vf := range vfs {
			pods[card] = append(pods[card],
				f.pod(fmt.Sprintf("pod%d-%d", card, i), byte(card*each+i+1), vf))
		}
	}

	// The VFs of one index share a VLAN.
	conf := func(index int) node.NetConf { return node.NetConf{"vlan": 100 + index} }

	t.Run("all are attached", func(t *testing.T) {
		f.sideBySide(t, func(card, index int, vf function.ID) error {
			_, err := pods[card][index].Add(vf, conf(index))
			return err
		})
		for _, p := range slices.Concat(pods...) {
			p.Interface("net1")
		}
	})

	t.Run("traffic of one VLAN passes between all cards, and no other", func(t *testing.T) {
		node.Carrier(t, f.pfs...)
		for card := range pods {
			next := (card + 1) % cards
			index := card % each
			pods[card][index].WantReach(t, pods[next][index])
			pods[card][index].WantApart(t, pods[next][(index+1)%each])
		}
	})

	t.Run("all are released", func(t *testing.T) {
		f.sideBySide(t, func(card, index int, vf function.ID) error {
			return pods[card][index].Del(vf, conf(index))
		})
		node.WantState(t, f.before)
	})

	f.End()
	f.WantNothingLeft()
}

// sideBySide calls do for all VFs.
func (f *field) sideBySide(t *testing.T, do func(card, index int, vf function.ID) error) {
	t.Helper()
	begin := time.Now()
	var working sync.WaitGroup
	for card, vfs := range f.vfs {
		working.Go(func() {
			for i, vf := range vfs {
				if err := do(card, i, vf); err != nil {
					t.Errorf("%s: %v", vf, err)
				}
			}
		})
	}

	working.Wait()
	t.Logf("%d VFs in %s", len(f.all()), since(time.Now(), begin))
}
