// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
)

// moments is the number of times at which the agent is killed during a command, spread evenly over
// the duration of the command.
const moments = 4

// TestKilled kills the agent by SIGKILL while xpu-cni asks it to ADD and to DEL, and starts it
// again. The runtime repeats or undoes failed commands. The test checks that nothing is lost.
func TestKilled(t *testing.T) {
	f := newField(t)
	f.Start()
	f.WantHealthy(resource, f.all()...)
	vf := f.vfs[0][0]

	conf := node.NetConf{
		"vlan": 100, "vlanQoS": 3, "mac": "02:00:00:00:00:01", "spoofchk": "off", "trust": "on",
		"max_tx_rate": 100,
		"mtu":         1400,
	}

	pod := f.pod("measured", 1, vf)
	begin := time.Now()
	pod.MustAdd(vf, conf)
	adding := time.Since(begin)
	begin = time.Now()
	pod.MustDel(vf, conf)
	deleting := time.Since(begin)
	t.Logf("ADD takes %s, DEL %s", adding, deleting)

	for i := range moments {
		f.Run(fmt.Sprintf("at %d of %d of ADD", i+1, moments), func(t *testing.T) {
			pod := f.pod(fmt.Sprintf("adding%d", i), 1, vf)
			added := make(chan error, 1)
			go func() { _, err := pod.Add(vf, conf); added <- err }()
			time.Sleep(adding * time.Duration(i+1) / (moments + 1))
			f.Kill()
			err := <-added
			t.Logf("ADD: %v", err)
			f.Start()
			f.WantHealthy(resource, f.all()...)

			if err == nil {
				pod.Interface("net1")
			}

			pod.MustDel(vf, conf)
			node.WantState(t, f.before)
		})
		f.Run(fmt.Sprintf("at %d of %d of DEL", i+1, moments), func(t *testing.T) {
			pod := f.pod(fmt.Sprintf("deleting%d", i), 1, vf)
			pod.MustAdd(vf, conf)
			deleted := make(chan error, 1)
			go func() { deleted <- pod.Del(vf, conf) }()
			time.Sleep(deleting * time.Duration(i+1) / (moments + 1))
			f.Kill()
			if err := <-deleted; err != nil {
				t.Errorf("DEL: %v, want none although the agent died", err)
			}

			f.Start()
			f.WantHealthy(resource, f.all()...)
			pod.WantNo("net1")
			node.WantState(t, f.before)
		})
	}

	f.End()
	f.WantNothingLeft()
}
