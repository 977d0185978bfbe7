// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// TestShown: the status of a claim has at most 16 addresses, and leaves out link-local ones first.
func TestShown(t *testing.T) {
	local := netip.MustParsePrefix("fe80::1/64")
	addresses := []netip.Prefix{local}
	for i := range 16 {
		addresses = append(addresses, netip.MustParsePrefix(fmt.Sprintf("10.1.0.%d/24", i+1)))
	}

	got := shown(addresses)
	if len(got) != 16 || got[0].String() != "10.1.0.1/24" || got[15].String() != "10.1.0.16/24" {
		t.Errorf("%d addresses: %v", len(got), got)
	}
	if got := shown(addresses[:2]); len(got) != 2 || got[1] != local || addresses[0] != local {
		t.Errorf("two addresses: %v", got)
	}
}

// TestNamesBesideCNI checks that an interface of a CNI request, which belongs to no claim, keeps its
// name from the interfaces of the pod's claims.
func TestNamesBesideCNI(t *testing.T) {
	pod := journal.Pod{Namespace: "default", Name: "pod1", UID: "pod1-uid"}
	c := of("pod1", "net",
		claimtest.Result("wanted", fastPool, "0000-3b-00-2"),
		claimtest.Result("any", fastPool, "0000-3b-00-3"),
		claimtest.FromClaim(`"interfaceName": "net1"`, "wanted"))

	names := map[string]chosenName{}
	for key, name := range chooseNames(pod, []*resourceapi.ResourceClaim{c}, []journal.Attachment{{
		CNI: &journal.CNI{}, Interface: function.Interface{Name: "net1"}, Pod: pod,
	}}) {
		names[key.device] = name
	}

	if name := names["0000-3b-00-3"]; name.name != "net2" || name.err != nil {
		t.Errorf("any name is %+v, want net2", name)
	}
	if err := names["0000-3b-00-2"].err; err == nil ||
		!strings.Contains(err.Error(), "a CNI network of the same pod has that name") {
		t.Errorf("error %v", err)
	}
}
