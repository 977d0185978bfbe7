// SPDX-License-Identifier: Apache-2.0

package schedule_test

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestListsNote: the note says what the answer does with lists where the scheduler may decide
// otherwise: one of which nobody said whether it has lists, and one of 1.36, whose allocator
// refuses what this one allows.
func TestListsNote(t *testing.T) {
	rails := resourceapi.DeviceAttribute{IntValues: []int64{0, 1}}
	slice := &resourceapi.ResourceSlice{}
	slice.Spec.Devices = []resourceapi.Device{
		{Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"rail": rails}},
	}

	for _, test := range []struct{ version, gates, want string }{
		{"1.37", "", "add --feature-gates DRAListTypeAttributes=true"},
		{"1.37", "DRAListTypeAttributes=true", ""},
		{"1.36", "", "add --feature-gates DRAListTypeAttributes=true"},
		{"v1.36.3", "DRAListTypeAttributes=true", "the scheduler of 1.36 refuses some claims"},
		{"1.36", "DRAListTypeAttributes=false", ""},
	} {
		features, err := schedule.NewFeatures(test.version, test.gates)
		must.Succeed(t, err)
		note := features.ListsNote([]*resourceapi.ResourceSlice{slice})
		if !strings.Contains(note, test.want) || (note == "") != (test.want == "") {
			t.Errorf("version %s, gates %q: note %q, want %q", test.version, test.gates, note, test.want)
		}
		if note := features.ListsNote(nil); note != "" {
			t.Errorf("version %s, gates %q: note %q without lists", test.version, test.gates, note)
		}
	}
}
