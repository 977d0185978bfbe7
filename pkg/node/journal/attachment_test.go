package journal_test

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

func TestOwners(t *testing.T) {
	claim := journal.Attachment{Claim: journal.Claim{UID: "u"}}
	claimByCNI := journal.Attachment{Claim: journal.Claim{UID: "u"}, CNI: &journal.CNI{ContainerID: "c1", IfName: "net1"}}
	resource := journal.Attachment{Resource: "xpu.opiproject.org/fast"}
	resourceByCNI := journal.Attachment{Resource: "xpu.opiproject.org/fast", CNI: &journal.CNI{ContainerID: "c1", IfName: "net1"}}
	for _, test := range []struct {
		name    string
		belongs func(journal.Attachment) bool
		want    []bool // claim, claimByCNI, resource, resourceByCNI
	}{
		{"the container", journal.ContainerIs("c1", "net1"), []bool{false, true, false, true}},
		{"another container", journal.ContainerIs("c2", "net1"), []bool{false, false, false, false}},
		{"another interface", journal.ContainerIs("c1", "net2"), []bool{false, false, false, false}},
	} {
		for i, a := range []journal.Attachment{claim, claimByCNI, resource, resourceByCNI} {
			if got := test.belongs(a); got != test.want[i] {
				t.Errorf("%s: attachment %d belongs: %t, want %t", test.name, i, got, test.want[i])
			}
		}
	}
}
