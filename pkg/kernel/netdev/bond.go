// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// checkBond returns an error if the name of the bond belongs to a netdev of the pod that is not this
// bond. A bond that the pod made itself is another one, because the agent would not know what to
// remove from it.
func checkBond(pod *conn, want *function.Bond) error {
	if want == nil {
		return nil
	}

	err := nameFree(pod, want.Name)
	if errors.Is(err, ErrNameTaken) {
		// Another name for the interface would not help, so that this is not ErrNameTaken.
		if _, other := existingBond(pod, want); other != nil {
			err = fmt.Errorf("%v: %v", err, other)
		} else {
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("bond %s: %w", want.Name, err)
	}

	return nil
}

// existingBond returns the bond that another Function of the pod has made. It returns
// [links.ErrNotFound] if there is no netdev of the name, and another error if the netdev is not this
// bond.
func existingBond(pod *conn, want *function.Bond) (*netlink.Bond, error) {
	there, err := pod.LinkByName(want.Name)
	if err != nil {
		return nil, err
	}

	b, isBond := there.(*netlink.Bond)
	switch {
	case !isBond || b.Group != podGroup:
		return nil, fmt.Errorf("the pod has another %s of this name: %w", there.Type(), unix.EEXIST)
	case !hasOptions(b, want):
		return nil, fmt.Errorf("the bond of this name has other options, mode %s: %w", b.Mode,
			unix.EEXIST)
	}

	return b, nil
}

// optionsOf sets the options of a bond.
func optionsOf(want *function.Bond, to *netlink.Bond) {
	to.Mode = netlink.StringToBondModeMap[want.Mode]
	to.Miimon = want.MIIMon
	if !want.SetsMAC() {
		to.FailOverMac = netlink.BOND_FAIL_OVER_MAC_ACTIVE
	}
	if want.XmitHashPolicy != "" {
		to.XmitHashPolicy = netlink.StringToBondXmitHashPolicyMap[want.XmitHashPolicy]
	}
	if want.LACPRate != "" {
		to.LacpRate = netlink.StringToBondLacpRateMap[want.LACPRate]
	}
}

// hasOptions reports whether a bond has the options. What was not asked for has the kernel's
// default, 0.
func hasOptions(b *netlink.Bond, want *function.Bond) bool {
	expected := netlink.Bond{}
	optionsOf(want, &expected)
	return b.Mode == expected.Mode && b.Miimon == expected.Miimon &&
		b.FailOverMac == expected.FailOverMac && b.XmitHashPolicy == expected.XmitHashPolicy &&
		max(b.LacpRate, 0) == expected.LacpRate
}

// joinBond makes the netdev a port of the bond, and makes the bond if the pod does not have it. The
// netdev must be down until then. The bond brings it up.
func (e *Engine) joinBond(pod *conn, index int, want *function.Bond) error {
	e.masters.Lock()
	defer e.masters.Unlock()

	port, err := pod.existing(index)
	if err != nil {
		return err
	}

	bond, err := existingBond(pod, want)
	if errors.Is(err, links.ErrNotFound) {
		e.trace("make bond " + want.Name)
		bond, err = makeBond(pod, want, port.MTU)
	}
	if err != nil {
		return err
	}

	if port.master != bond.Index {
		if err := e.enslave(pod, index, bond); err != nil {
			return err
		}
	}
	if !want.Primary {
		return nil
	}

	e.trace("primary port")
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("bond"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_BOND_PRIMARY, nl.Uint32Attr(uint32(index)))
	if err := pod.set(bond.Index, 0, 0, info); err != nil {
		return fmt.Errorf("primary port: %w", err)
	}

	return nil
}

// makeBond makes a bond, which is down. Its ports get its MTU when they join. Another program may
// make a netdev of the name at the same time.
func makeBond(pod *conn, want *function.Bond, mtu int) (*netlink.Bond, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Group, attrs.MTU = want.Name, podGroup, mtu
	bond := netlink.NewLinkBond(attrs)
	optionsOf(want, bond)
	err := pod.library(func(h *netlink.Handle) error { return h.LinkAdd(bond) })
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, fmt.Errorf("the node's kernel has no bonds (CONFIG_BONDING, module bonding): %w",
			err)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, err
	}

	return existingBond(pod, want)
}

// enslave makes a netdev a port of a bond.
func (e *Engine) enslave(pod *conn, index int, bond *netlink.Bond) error {
	e.trace("join bond")
	if err := e.set(pod, index, 0, unix.IFF_UP); err != nil {
		return fmt.Errorf("down: %w", err)
	}

	err := e.set(pod, index, 0, 0, number(unix.IFLA_MASTER, bond.Index))
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("the driver refuses the MAC address of the bond; a VF may need vf.trust: %w",
			err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("the driver does not take part in mode %s: %w", bond.Mode, err)
	}

	return err
}

// dropBond removes a bond of this program that has no ports any more, and then the rules that were
// added for it. The netdev must have left it.
func (e *Engine) dropBond(pod *conn, remains *Remains) (notes []string) {
	e.masters.Lock()
	defer e.masters.Unlock()

	err := e.step("remove bond "+remains.Bond.Name, func() error {
		return dropEmpty(pod, remains.Bond.Name, func(l netlink.Link) bool {
			_, isBond := l.(*netlink.Bond)
			return isBond
		})
	})
	switch {
	case errors.Is(err, errStays):
		return nil
	case err != nil:
		return []string{fmt.Sprintf("bond stays in the pod: %v", err)}
	}

	return e.dropRules(pod, remains.Bond.Name, remains.Rules)
}

// errStays says that a netdev of the pod is not removed, because it has ports, or because it is the
// pod's own.
var errStays = errors.New("is in use, or the pod's own")

// dropEmpty removes a netdev of this program that has no ports any more. It returns nil if the netdev
// is gone. same reports whether the netdev is what the program made under this name.
func dropEmpty(pod *conn, name string, same func(netlink.Link) bool) error {
	there, err := pod.LinkByName(name)
	if errors.Is(err, links.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if !same(there) || there.Attrs().Group != podGroup {
		return errStays
	}

	all, err := request.Consistent(pod.LinkList)
	if err != nil {
		return err
	}
	isPort := func(l netlink.Link) bool { return l.Attrs().MasterIndex == there.Attrs().Index }
	if slices.ContainsFunc(all, isPort) {
		return errStays
	}

	return unlessGone(pod.library(func(h *netlink.Handle) error { return h.LinkDel(there) }))
}

// observeBond reads an interface as [observe] does, with the addresses of its bond.
func observeBond(pod *conn, index int, want function.Interface) (Observed, error) {
	bond, err := pod.LinkByName(want.Bond.Name)
	if err != nil {
		return Observed{}, fmt.Errorf("bond %s: %w", want.Bond.Name, err)
	}
	of, err := observe(pod, bond.Attrs().Index, want.OfBond())
	if err != nil {
		return Observed{}, err
	}

	port, err := pod.existing(index)
	if err != nil {
		return Observed{}, fmt.Errorf("netdev in the pod: %w", err)
	}
	if port.master != bond.Attrs().Index {
		return Observed{}, fmt.Errorf("interface %s: is no longer a port of bond %s", port.Name,
			of.Name)
	}

	return Observed{
		Name: port.Name, MAC: port.MAC, MTU: port.MTU, Addresses: of.Addresses, Index: index,
		Bond: of.Name,
	}, nil
}

// missingPort lists what is wrong with the bond of an interface.
func missingPort(pod *conn, port *link, a Attached) (d []string, err error) {
	want := a.Want.Bond
	if want == nil {
		return nil, nil
	}

	there, err := existingBond(pod, want)
	switch {
	case errors.Is(err, links.ErrNotFound), err == nil && there.Index != port.master:
		return []string{fmt.Sprintf("interface is not a port of bond %s", want.Name)}, nil
	case errors.Is(err, unix.EEXIST):
		return []string{fmt.Sprintf("bond %s: %v", want.Name, err)}, nil
	case err != nil:
		return nil, fmt.Errorf("bond %s: %w", want.Name, err)
	case there.RawFlags&unix.IFF_UP == 0:
		return []string{fmt.Sprintf("bond %s is down", want.Name)}, nil
	}

	return nil, nil
}

// bondOf returns the bond that an interface is a port of, or nil if it is not the bond that the
// interface was to be a port of: see [missingPort].
func bondOf(pod *conn, port *link, want *function.Bond) (*link, error) {
	there, err := existingBond(pod, want)
	switch {
	case errors.Is(err, links.ErrNotFound), errors.Is(err, unix.EEXIST):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("bond %s: %w", want.Name, err)
	case there.Index != port.master:
		return nil, nil
	}

	bond, err := pod.existing(there.Index)
	if err != nil {
		return nil, fmt.Errorf("bond %s: %w", want.Name, err)
	}
	return bond, nil
}
