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

// remains is what a release could not undo.
type remains struct {
	before, now Snapshot
	neutral     function.MAC // see [neutralMAC]; "" for a Function without a PF
}

// leaks reports whether a property, as it is now, may reach the next owner. A property without a row
// in [Properties] does. [Settings] need not be asked about, because all of them are harmless.
func (r remains) leaks(property string) bool {
	for _, row := range table {
		if !row.Covers(property) {
			continue
		}
		for _, left := range row.Leftovers {
			if left.when == nil || left.when(r) {
				return left.Leaks
			}
		}
	}
	return true
}

// podAltNames reports whether the pod added an altname, because it would block this name for
// netdevs of the host.
func (r remains) podAltNames() bool {
	return slices.ContainsFunc(r.now.AltNames, func(name string) bool {
		return !slices.Contains(r.before.AltNames, name)
	})
}

// macOfPF reports whether the MAC of the netdev is the one that the PF already enforced before,
// because the driver may refuse every other MAC.
func (r remains) macOfPF() bool {
	was, is := r.before.VF, r.now.VF
	return was != nil && is != nil && r.now.MAC == is.MAC && r.now.MAC == was.MAC
}

// vfMACOfHost reports whether the VF, whose MAC the attachment did not set, has its own MAC again. The
// PF's MAC is then one that the VF gave itself, or an administrator's.
func (r remains) vfMACOfHost() bool {
	return !r.before.sets().MAC && !r.before.userspace() && r.now.MAC == r.before.MAC
}

// neutralVFMAC reports whether the PF enforces the neutral MAC.
func (r remains) neutralVFMAC() bool { return r.now.VF.MAC == r.neutral }

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
		case p.group == "" && r.leaks(p.name):
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
