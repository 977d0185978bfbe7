// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// TestMaxAllocated: the API server accepts the counters of a pool, and they are written only once.
func TestMaxAllocated(t *testing.T) {
	w := newNode(t, simulate.Config{Cards: []simulate.Card{{PFs: 1, VFs: 70, Bus: "3b"}}})
	w.connect()

	declared := &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "fast"},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors:    []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}},
			MaxAllocated: new(int32(40)),
		}}

	w.create(declared)
	w.start()
	w.eventually("70 devices are published", func() bool { return w.devices() == 70 })

	w.eventually("one slice of 3 says that 40 may be allocated, and each device is one",
		func() bool {
			slices := w.slices()
			counters, consumers := 0, 0
			for _, slice := range slices {
				for _, set := range slice.Spec.SharedCounters {
					if counter := set.Counters["functions"].Value; counter.Value() == 40 {
						counters++
					}
				}
				for _, d := range slice.Spec.Devices {
					if len(d.ConsumesCounters) == 1 {
						consumers++
					}
				}
			}

			return len(slices) == 3 && counters == 1 && consumers == 70
		})

	before := versions(w.slices())
	w.end()
	w.start()

	const published = `# HELP xpu_dra_devices Devices in this node's ResourceSlices.
# TYPE xpu_dra_devices gauge
xpu_dra_devices 70
`

	w.eventually("the next agent has compared them", func() bool {
		return testutil.GatherAndCompare(w.metrics, strings.NewReader(published),
			"xpu_dra_devices") == nil
	})

	w.wantUntouched("the restart", before)

	unlimited := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"maxAllocated":null}}`))
	if err := w.admin.Patch(t.Context(), declared, unlimited); err != nil {
		t.Fatal(err)
	}

	w.eventually("nothing is counted any more", func() bool {
		slices := w.slices()
		for _, slice := range slices {
			if len(slice.Spec.SharedCounters) > 0 ||
				len(slice.Spec.Devices[0].ConsumesCounters) > 0 {
				return false
			}
		}
		return len(slices) == 2 && w.devices() == 70
	})
}
