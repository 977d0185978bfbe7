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
	taken  map[string]string // the claim that has a name
	errs   map[nameKey]error
}

// chooseNames gives every interface of a pod's claims its name. A name that an earlier Prepare chose stays; then come
// those that are asked for; the others are "net1", "net2", ... in the order of the claims. A name that is asked for
// twice is an error for the second.
func chooseNames(claims []*resourceapi.ResourceClaim, ofPod []journal.Attachment) names {
	n := names{chosen: map[nameKey]string{}, taken: map[string]string{}, errs: map[nameKey]error{}}
	for _, a := range ofPod {
		n.choose(nameKey{a.Claim.UID, a.Function}, a.Claim.Name, a.Interface.Name)
	}
	var unnamed []nameKey
	owners := map[nameKey]string{}
	for _, c := range claims {
		devices, _ := claim.Devices(c) // an error is told where the claim is prepared
		for _, device := range devices {
			key := nameKey{c.UID, device.Function}
			owners[key] = c.Name
			asked := device.Interface.Name
			switch _, kept := n.chosen[key]; {
			case kept:
			case asked == "":
				unnamed = append(unnamed, key)
			case n.taken[asked] != "":
				n.errs[key] = fmt.Errorf("interfaceName %q: claim %s of the same pod has that name already; choose another", asked, n.taken[asked])
			default:
				n.choose(key, c.Name, asked)
			}
		}
	}
	for _, key := range unnamed {
		n.choose(key, owners[key], n.free())
	}
	return n
}

func (n names) choose(key nameKey, claim, name string) {
	n.chosen[key], n.taken[name] = name, claim
}

func (n names) free() string {
	for i := 1; ; i++ {
		if name := fmt.Sprintf("net%d", i); n.taken[name] == "" {
			return name
		}
	}
}
