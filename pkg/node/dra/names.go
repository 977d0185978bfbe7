package dra

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// nameKey is one interface of a claim.
type nameKey struct {
	claim    types.UID
	function function.ID
}

// names are the interface names of the claims that are prepared together.
type names struct {
	chosen map[nameKey]string
	errs   map[nameKey]error
}

// chooseNames gives every interface of a pod's claims its name. A name that an earlier Prepare chose stays; then come
// those that are asked for; the others are "net1", "net2", ... in the order of the claims. A name that is asked for
// twice is an error for the second.
func chooseNames(claims []*resourceapi.ResourceClaim, ofPod []journal.Attachment) names {
	n := names{chosen: map[nameKey]string{}, errs: map[nameKey]error{}}
	taken := map[string]string{} // the name of the claim that has an interface name
	choose := func(key nameKey, claim, name string) { n.chosen[key], taken[name] = name, claim }
	for _, a := range ofPod {
		choose(nameKey{a.Claim.UID, a.Function}, a.Claim.Name, a.Interface.Name)
	}
	var unnamed []func(free string)
	for _, c := range claims {
		devices, _ := claim.Devices(c) // an error is told where the claim is prepared
		for _, device := range devices {
			key, asked := nameKey{c.UID, device.Function}, device.Interface.Name
			switch _, kept := n.chosen[key]; {
			case kept:
			case asked == "":
				unnamed = append(unnamed, func(free string) { choose(key, c.Name, free) })
			case taken[asked] != "":
				n.errs[key] = fmt.Errorf("interfaceName %q: claim %s of the same pod has that name already; choose another", asked, taken[asked])
			default:
				choose(key, c.Name, asked)
			}
		}
	}
	number := 0
	for _, choose := range unnamed {
		name := ""
		for name == "" || taken[name] != "" {
			number++
			name = fmt.Sprintf("net%d", number)
		}
		choose(name)
	}
	return n
}
