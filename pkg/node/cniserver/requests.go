// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
)

// del ends the container's attachments as the interface, except those for which except returns
// true. It succeeds if there is none. It does not read the configuration, which may have been
// deleted with the namespace.
func (s *Server) del(
	ctx context.Context, r wire.Request, except func(journal.Attachment) bool,
) error {
	_, end, err := s.takeOver(ctx, r, errDeleted)
	if err != nil {
		return err
	}

	end()
	if err := s.Lifecycle.EndRequest(ctx, r.ContainerID, r.IfName, except); err != nil {
		return fail(CodeRelease, "%w", err)
	}
	return nil
}

// madeAfter returns a function that reports whether an attachment was made after the runtime's
// request, so that the request cannot concern it. It compares times since the boot, because the
// clock may be set in between. It compares clock times if the request is from an older shim, or the
// record from an older agent, which do not have that time.
func (s *Server) madeAfter(r wire.Request) func(journal.Attachment) bool {
	return func(a journal.Attachment) bool {
		if after, known := a.Made.After(r.Asked, s.BootID); known {
			return after
		}
		return cmp.Or(a.AttachedAt, a.ReservedAt).After(r.At)
	}
}

// gc releases the attachments of the network configuration that were made before the request and
// are not in its list.
func (s *Server) gc(ctx context.Context, r wire.Request) error {
	if r.At.IsZero() {
		return fail(types.ErrInvalidEnvironmentVariables, "GC: the time of the request is missing")
	}

	n, err := decode(r.Config)
	if err != nil {
		return err
	}
	if n.Name == "" || n.ValidAttachments == nil {
		return n.invalid("name and cni.dev/valid-attachments: must be there for GC")
	}

	valid := func(a journal.Attachment) bool {
		attachment := types.GCAttachment{ContainerID: a.CNI.ContainerID, IfName: a.CNI.IfName}
		return a.CNI.Network != n.Name || s.madeAfter(r)(a) ||
			slices.Contains(n.ValidAttachments, attachment) ||
			s.adds.Held(attachment) // an ADD that came after the list was made
	}

	var errs []error
	for _, a := range s.Journal.All() {
		if a.CNI != nil && !valid(a) {
			errs = append(errs, s.Lifecycle.EndRequest(ctx, a.CNI.ContainerID, a.CNI.IfName, valid))
		}
	}

	if err := errors.Join(errs...); err != nil {
		return fail(CodeRelease, "%w", err)
	}

	return nil
}

// check compares the interface with the journal. If the runtime kept the result of the last plugin
// of the chain, MAC, addresses and routes are compared with that result, because later plugins may
// have changed them (CNI specification, section CHECK).
func (s *Server) check(ctx context.Context, a cniRequest) error {
	if _, err := s.attachedFor(a); err != nil {
		return err
	}

	var expect func(*netdev.Attached)
	if a.prev != nil {
		expect = func(is *netdev.Attached) { expectPrevious(is, a.prev) }
	}

	differences, err := s.Lifecycle.Check(ctx, a.device, expect)
	if err != nil {
		return fail(types.ErrIOFailure, "%w", err)
	}
	if len(differences) > 0 {
		return fail(CodeCheck, "interface %s (Function %s) is not as it was attached: %s",
			a.IfName, a.device, strings.Join(differences, "; "))
	}

	return nil
}

// expectPrevious changes what is expected of the interface to the result that the runtime kept. If
// addresses or routes of the interface are missing in the result, a later plugin removed them. If
// the interface is missing, it belongs to another interface now, such as a bond.
func expectPrevious(is *netdev.Attached, prev *types100.Result) {
	had := is.Expected.Addresses
	is.Expected = netdev.Expected{}
	is.Want.Routes = slices.DeleteFunc(slices.Clone(is.Want.Routes),
		func(route function.Route) bool {
			return !slices.ContainsFunc(prev.Routes, func(r *types.Route) bool {
				to, ok := netaddr.FromIPNet(&r.Dst)
				return ok && to.Masked() == route.To
			})
		})

	index := slices.IndexFunc(prev.Interfaces, func(i *types100.Interface) bool {
		return i.Name == is.Want.Name && i.Sandbox == is.Place.NetNS
	})
	if index < 0 {
		is.Want.Routes = nil
		return
	}

	if mac, err := function.ParseMAC(prev.Interfaces[index].Mac); err == nil {
		is.Expected.MAC = mac
	}

	for _, ip := range prev.IPs {
		address, ok := netaddr.FromIPNet(&ip.Address)
		own := ip.Interface == nil || *ip.Interface == index
		if ok && own && slices.Contains(had, address) {
			is.Expected.Addresses = append(is.Expected.Addresses, address)
		}
	}
}

// address adds the addresses of an IPAM plugin that needed the interface first to an attached
// interface.
func (s *Server) address(ctx context.Context, a cniRequest) (record journal.Attachment, err error) {
	if a.ipam.result == nil {
		return record, a.conf.invalid("no result of an IPAM plugin")
	}

	add := lifecycle.Addresses{Addresses: a.ipam.addresses, Routes: a.ipam.routes, Result: a.IPAM}
	have, _ := s.Journal.Get(a.device)
	if err := s.checkPrivileged(a, have); err != nil {
		return record, err
	}

	if have.CNI != nil && have.CNI.Claimed != nil {
		if err := addressesOfClaim(a, *have.CNI.Claimed, have.Claim.Name); err != nil {
			return record, err
		}
	}

	if have.Interface.Userspace {
		// the program in the pod reads them from the result
		add.Addresses, add.Routes = []netip.Prefix{}, nil
	}
	if err := s.Lifecycle.Address(ctx, a.device, journal.ContainerIs(a.ContainerID, a.IfName),
		add); err != nil {
		return record, fail(CodeAttach, "%w", loop.WithCause(ctx, err))
	}

	return s.attachedFor(a)
}
