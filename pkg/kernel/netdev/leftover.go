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

// meaning is what the value that a property has now means for the next owner, where the value that
// it had before cannot be restored.
type meaning int

const (
	// leaks: the next owner may get what belongs to the last one, or what the host kept from
	// owners.
	leaks    meaning = iota
	isolates         // the next owner is as isolated as before
	harmless         // neither owner can do anything with it
)

// remains is what a release could not undo.
type remains struct {
	before, now Snapshot
	neutral     function.MAC // see [neutralMAC]; "" for a Function without a PF
}

// leftovers has what each property of [Snapshot.properties] means when it stays. A property without
// a rule leaks. [Settings] need none, because all of them are harmless.
var leftovers = []struct {
	property string // its name or, with a space at the end, how several names begin
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
	{"XDP program", always(leaks)}, // the netdev had none on the host
	// The move back gave the netdev the host's defaults, whatever the pod wrote.
	{"sysctl ", always(harmless)},
	{"net.ipv6.conf ", always(harmless)},
	// Without a carrier the next owner gets nothing.
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

// meaningOf looks a property up in leftovers.
func (r remains) meaningOf(property string) meaning {
	for _, rule := range leftovers {
		group := strings.HasSuffix(rule.property, " ")
		if property == rule.property || group && strings.HasPrefix(property, rule.property) {
			return rule.means(r)
		}
	}
	return leaks
}

// altNames leak if one is the pod's: it would stand in the way of the host's names.
func (r remains) altNames() meaning {
	pods := func(name string) bool { return !slices.Contains(r.before.AltNames, name) }
	if slices.ContainsFunc(r.now.AltNames, pods) {
		return leaks
	}
	return harmless
}

// mac may stay if it is the one that the PF gave the VF before: a driver may refuse a netdev every
// other one.
func (r remains) mac() meaning {
	was, is := r.before.VF, r.now.VF
	if was != nil && is != nil && r.now.MAC == is.MAC && r.now.MAC == was.MAC {
		return isolates
	}
	return leaks
}

// vfMAC may stay if it is neutral.
func (r remains) vfMAC() meaning {
	if r.now.VF.MAC == r.neutral {
		return isolates
	}
	return leaks
}

// neutralMAC is what a PF gets as the MAC of a VF where its driver refuses zeros: see quirk "zeros
// as a MAC". It is the MAC that the netdev had before the attachment or, without a netdev, a
// locally administered one, which is always the same for a VF. The pod's own would reach the next
// owner.
func neutralMAC(pf *PF, before Snapshot) function.MAC {
	if pf == nil || !before.userspace() {
		return before.MAC
	}
	const locallyAdministered = 2
	sum := sha256.Sum256(fmt.Appendf(nil, "%s VF %d", pf.Address, pf.VF))
	return macOf(append(net.HardwareAddr{locallyAdministered}, sum[:5]...))
}

// isZero says whether an address has bytes, which are all zero.
func isZero(mac function.MAC) bool {
	address := mac.HardwareAddr()
	return len(address) > 0 && !slices.ContainsFunc(address, func(b byte) bool { return b != 0 })
}

// refusals are the errors of an undo, by the names of the properties that they are about.
type refusals map[string]error

func (r refusals) add(err error, properties ...string) {
	if err == nil {
		return
	}
	for _, p := range properties {
		r[p] = errors.Join(r[p], err)
	}
}

// all joins the errors, each once.
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

// passes says whether there is a refusal that may end without anything being done about it.
func passes(err error) bool {
	return err != nil &&
		(errors.Is(err, errNoCarrier) || errors.Is(err, errDown) || errors.Is(err, errSilent) ||
			!quirk.Definite(err))
}

// conclude decides what the properties mean that are left after all rounds. Each is left because
// the driver refused it, or because it accepted it and did not do it. The notes are what may stay.
// The error wraps [ErrLeaks] if something leaks and no other try would help.
func (r remains) conclude(left []property, refused refusals) (notes []string, err error) {
	var again, open, differs []string
	for _, p := range left {
		differs = append(differs, p.String())
		switch refusal := refused[p.name]; {
		// A netdev may refuse every MAC but the one that the PF still has for it.
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
