// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// TestNumVFs: a pool makes as many VFs as it asks for, but not while a pod has one of them.
func TestNumVFs(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		s.start()
		s.wantHealthy(s.vfs...)
		p := newPod(t, "pod1")
		if _, err := s.give(p.name, s.vfs[0]); err != nil {
			t.Fatal(err)
		}

		s.mustAdd(p, s.vfs[0])

		spec := byDevicePlugin(v1alpha1.ProvisionAtAdd)
		spec.NumVFs = new(int32(3))
		spec.Selectors = []v1alpha1.FunctionSelector{{RootDevices: []string{"0000:3b:00.0"}}}
		s.declare(spec)
		s.wantSupply(v1alpha1.ReasonInUse, "belongs to pod default/pod1")
		s.wantInPod(p, s.vfs[0])

		s.del(p, s.vfs[0])
		s.pods.Set()
		s.eventually("there are 3 VFs", func() bool { return len(s.host.Functions()) == 4 })
		var vfs []function.ID
		for _, address := range s.functions("0000:3b:00.0") {
			vfs = append(vfs, function.ID{Address: address})
		}

		s.wantHealthy(vfs...)
		s.wantSupply(v1alpha1.ReasonAllMade, "every PF")

		again := newPod(t, "pod2")
		if _, err := s.give(again.name, vfs[2]); err != nil {
			t.Fatal(err)
		}

		s.mustAdd(again, vfs[2])
		s.del(again, vfs[2])
		s.end()
	})
}

// wantSupply waits until the reason why the pool lacks VFs is reported, or no reason for
// [v1alpha1.ReasonAllMade]. It is a metric, and with an API server also a condition that
// xpu-controller makes of the agent's report.
func (s *site) wantSupply(reason, text string) {
	s.t.Helper()
	want := `
# HELP xpu_supply_shortages PFs of this node that do not have the VFs, or cannot have the SFs, that a DevicePool asks for, by pool and reason.
# TYPE xpu_supply_shortages gauge
xpu_supply_shortages{pool="fast",reason="` + reason + `"} 1
`

	if reason == v1alpha1.ReasonAllMade {
		want = ""
	}

	s.eventually("metrics of the supply", func() bool {
		return testutil.GatherAndCompare(s.metrics, strings.NewReader(want),
			"xpu_supply_shortages") == nil
	})

	if s.admin == nil {
		return
	}

	s.eventually("condition Supplied is "+reason, func() bool {
		var pool v1alpha1.DevicePool
		if err := s.admin.Get(s.t.Context(), client.ObjectKey{Name: "fast"}, &pool); err != nil {
			s.t.Fatal(err)
		}
		c := meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionSupplied)
		return c != nil && c.Reason == reason && strings.Contains(c.Message, text) &&
			(c.Status == metav1.ConditionTrue) == (reason == v1alpha1.ReasonAllMade)
	})
}
