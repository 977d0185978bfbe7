// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// UUIDs of shares, as the scheduler makes them.
const (
	firstShare  = types.UID("6f1c3a5e-0d0b-4a39-9a1c-000000000001")
	secondShare = types.UID("6f1c3a5e-0d0b-4a39-9a1c-000000000002")
	thirdShare  = types.UID("6f1c3a5e-0d0b-4a39-9a1c-000000000003")
)

// chosenFor returns the VF that a claim's status names, or the zero value if it names none.
func (s *site) chosenFor(c *resourceapi.ResourceClaim) function.ID {
	s.t.Helper()
	var now resourceapi.ResourceClaim
	if err := s.admin.Get(s.t.Context(), client.ObjectKeyFromObject(c), &now); err != nil {
		s.t.Fatal(err)
	}

	devices, err := claim.Devices(&now)
	if err != nil {
		s.t.Fatal(err)
	}

	return devices[0].Function
}

// TestSharedPF: claims that share a PF get a VF each. The agent chooses the VF and remembers it,
// and the xPU serves it.
func TestSharedPF(t *testing.T) {
	s := newCRDSite(t)
	pf := function.ID{Address: "0000:3b:00.0"}
	spec := byDRA()
	spec.Model = v1alpha1.ModelPorts
	s.declare(spec)
	first, second := newPod(t, "pod1"), newPod(t, "pod2")
	s.startRuntime()
	s.start()
	s.awaitOffer("the PF is offered", []function.ID{pf}, nil)

	for _, slice := range s.slices() {
		ports, bandwidth := slice.Spec.Devices[0].Capacity[claim.CapacityPorts].Value, slice.Spec.Devices[0].Capacity[claim.CapacityBandwidth].Value
		shared := slice.Spec.Devices[0].AllowMultipleAllocations
		if shared == nil || !*shared || ports.Value() != 2 || bandwidth.String() != "25G" {
			t.Errorf("device %+v, want one of 2 ports and 25 Gbit/s that claims share",
				slice.Spec.Devices[0])
		}
	}

	s.awaitRuntime()

	driver := s.register()
	one, two := s.allocateFor(first.name, "fast", "one", pf, firstShare), s.allocateFor(second.name,
		"fast", "two", pf, secondShare)
	s.prepareUntil(driver, one)
	s.end()
	s.start() // the next agent knows the choice
	s.awaitRuntime()
	driver = s.register()
	s.prepareUntil(driver, one)
	s.prepareUntil(driver, two)
	s.wantPorts(s.vfs...)
	if a, b := s.chosenFor(one), s.chosenFor(two); a != s.vfs[0] || b != s.vfs[1] {
		t.Errorf("claims were told Functions %s and %s, want %s", a, b, s.vfs)
	}

	three := s.allocateFor("pod3", "fast", "three", pf, thirdShare)
	if _, err := driver.Prepare(t.Context(), three); err == nil ||
		!strings.Contains(err.Error(), "none of the 2 VFs of DevicePool fast is free") {
		t.Errorf("a third claim of two VFs: %v", err)
	}

	for i, p := range []pod{first, second} {
		s.runSandbox(p)
		if _, err := p.Handle().LinkByName("fast0"); err != nil {
			t.Errorf("%s has not its interface: %v", p.name, err)
		}
		if f := s.stateOf(s.vfs[i]); f.Attachment == nil || f.Attachment.Pod.Name != p.name {
			t.Errorf("VF %s: %+v, want it to be of %s", s.vfs[i], f.Attachment, p.name)
		}
	}

	s.stopSandbox(first)
	s.unprepare(driver, one)
	s.delete(one)
	s.prepareUntil(driver, three) // the VF that became free
	if got := s.chosenFor(three); got != s.vfs[0] {
		t.Errorf("the third claim was told Function %s, want %s", got, s.vfs[0])
	}

	s.stopSandbox(second)
	for _, c := range []*resourceapi.ResourceClaim{two, three} {
		s.unprepare(driver, c)
		s.delete(c)
	}

	s.eventually("the xPU serves nothing", func() bool { return len(s.opi.Ports()) == 0 })
	s.endClean()
}
