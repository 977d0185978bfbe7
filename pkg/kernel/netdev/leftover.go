// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
)

// meaning is what a property means for the next owner if its old value cannot be restored.
type meaning int

const (
	// leaks means that the next owner may receive what belongs to the previous owner, or what the
	// host withheld from owners.
	leaks    meaning = iota
	isolates         // the next owner is as isolated as before
	harmless         // no owner can make use of it
)

// remains is what a release could not undo.
type remains struct {
	before, now Snapshot
	neutral     function.MAC // see [neutralMAC]; "" for a Function without a PF
}

// leftovers says what each property of [Snapshot.properties] means if its old value is not
// restored. A property without a rule leaks. [Settings] need no rule, because all of them are
// harmless.
var leftovers = []struct {
	property string // name of the property, or prefix of several names if it ends with a space
	means    func(remains) meaning
}{
	{"name", always(harmless)},
	{"altnames", remains.altNames},
	{"alias", always(harmless)},
	{"mtu", always(harmless)},
	{"mac", remains.mac},
	{"txqlen", always(harmless)},
	{"up", always(harmless)},
	{"noarp", always(harmless)},
	{"promiscuous", leaksIf(func(now Snapshot) bool { return now.Promiscuous })},
	{"allmulticast", leaksIf(func(now Snapshot) bool { return now.AllMulticast })},
	{"vf mac", remains.vfMAC},
	{"vf vlan", always(leaks)},
	{"vf min_tx_rate", always(harmless)},
	{"vf max_tx_rate", always(harmless)},
	{"vf spoofchk", leaksIf(func(now Snapshot) bool { return onOff(now.VF.SpoofCheck) != "on" })},
	{"vf trust", leaksIf(func(now Snapshot) bool { return onOff(now.VF.Trust) != "off" })},
	{"vf link-state", always(harmless)},
	{"eswitch min_tx_rate", always(harmless)},
	{"eswitch max_tx_rate", always(harmless)},
	{"group", always(harmless)},
	{"gso_max_size", always(harmless)},
	{"gso_max_segs", always(harmless)},
	{"gro_max_size", always(harmless)},
	{"gso_ipv4_max_size", always(harmless)},
	{"gro_ipv4_max_size", always(harmless)},
	{"multicast", always(harmless)},
	{"link mode", always(harmless)},
	{"broadcast", always(harmless)},
	{"XDP program", always(leaks)}, // the netdev had no program on the host
	// The move back reset the sysctls to the host's defaults, whatever the pod wrote.
	{"sysctl ", always(harmless)},
	{"net.ipv6.conf ", always(harmless)},
	// A reason only keeps the netdev without a carrier, so that the next owner receives nothing.
	{"proto_down reason", always(harmless)},
	{"proto_down", leaksIf(func(now Snapshot) bool { return now.Carried.ProtoDown.On })},
}

func always(m meaning) func(remains) meaning { return func(remains) meaning { return m } }

func leaksIf(open func(now Snapshot) bool) func(remains) meaning {
	return func(r remains) meaning {
		if open(r.now) {
			return leaks
		}
		return isolates
	}
}

// meaningOf returns the meaning of a property by its rule in leftovers.
func (r remains) meaningOf(property string) meaning {
	for _, rule := range leftovers {
		group := strings.HasSuffix(rule.property, " ")
		if property == rule.property || group && strings.HasPrefix(property, rule.property) {
			return rule.means(r)
		}
	}
	return leaks
}

// altNames returns leaks if the pod added an altname, because it would block this name for netdevs
// of the host.
func (r remains) altNames() meaning {
	pods := func(name string) bool { return !slices.Contains(r.before.AltNames, name) }
	if slices.ContainsFunc(r.now.AltNames, pods) {
		return leaks
	}
	return harmless
}

// mac returns isolates if the MAC of the netdev is the one that the PF already enforced before,
// because the driver may refuse every other MAC.
func (r remains) mac() meaning {
	was, is := r.before.VF, r.now.VF
	if was != nil && is != nil && r.now.MAC == is.MAC && r.now.MAC == was.MAC {
		return isolates
	}
	return leaks
}

// vfMAC returns isolates if the PF enforces the neutral MAC.
func (r remains) vfMAC() meaning {
	if r.now.VF.MAC == r.neutral {
		return isolates
	}
	return leaks
}

// neutralMAC returns the MAC that a PF sets for a VF if its driver refuses zeros: see quirk "zeros
// as a MAC". It is the MAC that the netdev had before the attachment. Without a netdev it is a
// locally administered MAC, which is always the same for a VF. Without a neutral MAC, the next
// owner would get the MAC of the pod.
func neutralMAC(pf *PF, before Snapshot) function.MAC {
	if pf == nil || !before.userspace() {
		return before.MAC
	}
	const locallyAdministered = 2
	sum := sha256.Sum256(fmt.Appendf(nil, "%s VF %d", pf.Address, pf.VF))
	return macOf(append(net.HardwareAddr{locallyAdministered}, sum[:5]...))
}

// isZero reports whether an address is present and all its bytes are zero.
func isZero(mac function.MAC) bool {
	address := mac.HardwareAddr()
	return len(address) > 0 && !slices.ContainsFunc(address, func(b byte) bool { return b != 0 })
}

// refusals holds the errors of an undo by the names of the affected properties.
type refusals map[string]error

func (r refusals) add(err error, properties ...string) {
	if err == nil {
		return
	}
	for _, p := range properties {
		r[p] = errors.Join(r[p], err)
	}
}

// all joins the errors. It includes equal errors only once.
func (r refusals) all() error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(r)) {
		same := func(err error) bool { return err.Error() == r[name].Error() }
		if !slices.ContainsFunc(errs, same) {
			errs = append(errs, r[name])
		}
	}
	return errors.Join(errs...)
}

// passes reports whether a refusal may end without any action.
func passes(err error) bool {
	return err != nil &&
		(errors.Is(err, errNoCarrier) || errors.Is(err, errDown) || errors.Is(err, errSilent) ||
			!quirk.Definite(err))
}

// conclude decides what the remaining properties mean after all rounds. A property remains because
// the driver refused the old value, or because the driver accepted it without effect.
//
// notes describes the properties that may stay. The error wraps [ErrLeaks] if a property leaks and
// another try would not help.
func (r remains) conclude(left []property, refused refusals) (notes []string, err error) {
	var again, open, differs []string
	for _, p := range left {
		differs = append(differs, p.String())
		switch refusal := refused[p.name]; {
		// A netdev may refuse every MAC but the one that the PF still enforces for it.
		case p.group == "" && passes(refusal), p.name == "mac" && passes(refused["vf mac"]):
			again = append(again, p.name)
		case p.group == "" && r.meaningOf(p.name) == leaks:
			open = append(open, p.name)
		case refusal != nil:
			notes = append(notes, fmt.Sprintf("%s: the old value was refused: %v", p, refusal))
		case p.now == nil:
			notes = append(notes, p.String())
		default:
			const note = "%s: the driver accepted the old value and did not set it"
			notes = append(notes, fmt.Sprintf(note, p))
		}
	}

	if len(open)+len(again) == 0 {
		return notes, nil
	}

	err = fmt.Errorf("%s is not as it was: %s", r.now.title(), strings.Join(differs, "; "))
	if len(open) > 0 {
		err = fmt.Errorf("%w; %s %w", err, strings.Join(open, ", "), ErrLeaks)
	}

	return nil, errors.Join(err, refused.all())
}
