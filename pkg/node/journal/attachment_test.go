// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestOwners(t *testing.T) {
	claim := journal.Attachment{Claim: journal.Claim{UID: "u"}}
	claimByCNI := journal.Attachment{
		Claim: journal.Claim{UID: "u"}, CNI: &journal.CNI{ContainerID: "c1", IfName: "net1"},
	}
	resource := journal.Attachment{Resource: "xpu.opiproject.org/fast"}
	resourceByCNI := journal.Attachment{
		Resource: "xpu.opiproject.org/fast", CNI: &journal.CNI{ContainerID: "c1", IfName: "net1"},
	}
	for _, test := range []struct {
		name    string
		belongs func(journal.Attachment) bool
		want    []bool // claim, claimByCNI, resource, resourceByCNI
	}{
		{"the container", journal.ContainerIs("c1", "net1"), []bool{false, true, false, true}},
		{"another container", journal.ContainerIs("c2", "net1"),
			[]bool{false, false, false, false}},
		{"another interface", journal.ContainerIs("c1", "net2"),
			[]bool{false, false, false, false}},
	} {
		for i, a := range []journal.Attachment{claim, claimByCNI, resource, resourceByCNI} {
			if got := test.belongs(a); got != test.want[i] {
				t.Errorf("%s: attachment %d belongs: %t, want %t", test.name, i, got, test.want[i])
			}
		}
	}
}

// TestQuarantine: the record keeps a quarantine in the states Detaching and Releasing only, and not
// after the Function is restored. Older agents know these states.
func TestQuarantine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	j := open(t, path)
	q := &journal.Quarantine{Reason: journal.MayLeak, Message: "macvlan evil0", Attempts: 3}
	for state, allowed := range map[journal.State]bool{
		journal.Reserved: false, journal.Attaching: false, journal.Attached: false,
		journal.Lost: false, journal.Reattaching: false,
		journal.Detaching: true, journal.Releasing: true,
	} {
		a := full(vf1)
		a.State, a.Quarantine = state, q
		if err := j.Put(a); (err == nil) != allowed {
			t.Errorf("state %s: error %v, want success: %t", state, err, allowed)
		}
	}

	done := restored()
	done.Quarantine = q
	if err := j.Put(done); err == nil {
		t.Error("a Function that is restored is quarantined")
	}

	want := full(vf1)
	want.State, want.Quarantine = journal.Releasing, q
	must.Succeed(t, j.Put(want))
	must.Succeed(t, j.Close())
	got, _ := open(t, path).Get(vf1)
	if diff := cmp.Diff(want, got, comparePrefixes); diff != "" || !got.Quarantined() {
		t.Errorf("record (-want +got):\n%s", diff)
	}
	if reserved := got.BackToReserved(); reserved.Quarantined() {
		t.Error("a Function that is back is quarantined")
	}
}

// TestOwnDriver: a Function must get back the driver that it had before the setup of the
// reservation.
func TestOwnDriver(t *testing.T) {
	for name, test := range map[string]struct {
		a      journal.Attachment
		driver string
		known  bool
	}{
		"recorded":        {journal.Attachment{Driver: "iavf"}, "iavf", true},
		"of an older one": {journal.Attachment{}, "", false},
		"bound for a pod": {
			journal.Attachment{Driver: "x", Setup: &journal.Setup{Driver: "vfio-pci", Own: "iavf"}},
			"iavf", true,
		},
		"had none before": {
			journal.Attachment{Setup: &journal.Setup{Driver: "vfio-pci"}}, "", true,
		},
		"an SF was made": {journal.Attachment{Setup: &journal.Setup{SF: true}}, "", false},
	} {
		if driver, known := test.a.OwnDriver(); driver != test.driver || known != test.known {
			t.Errorf("%s: driver %q, known %t; want %q, %t", name, driver, known, test.driver,
				test.known)
		}
	}
}
