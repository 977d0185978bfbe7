// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	bpflink "github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
)

// carriedOnHost returns what the host has put on a netdev, or "" for nothing. A netdev with such
// additions is refused, because a release would take them for the pod's and remove them.
func (e *Engine) carriedOnHost(l *link) (use string, err error) {
	if use, _, err = e.onTop(l); use != "" || err != nil {
		return use, err
	}

	err = namespace.Do(e.host.ns, func() error {
		for _, at := range tcxSides {
			programs, err := e.tcx.programs(l.Identity.Index, at)
			if err != nil {
				return err
			}
			if len(programs) > 0 {
				use = fmt.Sprintf("%s program %d", at, programs[0].ID)
			}
		}
		return nil
	})

	return use, err
}

// inUse returns the error for a netdev that the host uses. how says what the host uses it for.
func inUse(netdev, how string) error {
	return fmt.Errorf("netdev %s: is in use on the host, %s", netdev, how)
}

// detachForeign removes what a pod may have left on a netdev that is back on the host, and that
// could still read or forge its frames: BPF programs, and netdevs on top of it.
func (e *Engine) detachForeign(
	ctx context.Context, l *link, place Place, rebinding *Rebinding,
) error {
	if err := namespace.Do(e.host.ns, func() error {
		return e.detachPrograms(ctx, l)
	}); err != nil {
		return err
	}
	return e.makeAlone(ctx, l, place, rebinding)
}

// detachPrograms detaches tcx programs, and XDP programs that a BPF link holds. Other XDP programs
// are detached by rtnetlink: see [Engine.detachXDP].
func (e *Engine) detachPrograms(ctx context.Context, l *link) error {
	index := l.Identity.Index
	for _, at := range tcxSides {
		programs, err := e.tcx.programs(index, at)
		switch {
		case errors.Is(err, ErrGone):
			return err
		case err != nil:
			return fmt.Errorf("%w: %w", err, ErrLeaks)
		}

		for _, p := range programs {
			if err := ctx.Err(); err != nil {
				return err
			}
			e.trace(fmt.Sprintf("detach %s program %d", at, p.ID))
			if err := detachTCX(index, at, p); err != nil {
				return fmt.Errorf("detach %s program %d: %w: %w", at, p.ID, err, ErrLeaks)
			}
		}
	}

	if l.Carried.XDP == "" {
		return nil
	}

	return e.detachXDPLinks(ctx, index)
}

// detachTCX detaches a program. It succeeds if the program is no longer attached.
func detachTCX(index int, at ebpf.AttachType, p bpflink.AttachedProgram) error {
	if id, held := p.LinkID(); held {
		return unlessEnded(detachLink(id))
	}

	program, err := ebpf.NewProgramFromID(p.ID)
	if err != nil {
		return unlessEnded(err)
	}
	defer program.Close()

	return unlessEnded(bpflink.RawDetachProgram(bpflink.RawDetachProgramOptions{
		Target: index, Program: program, Attach: at,
	}))
}

func unlessEnded(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func detachLink(id bpflink.ID) error {
	held, err := bpflink.NewFromID(id)
	if err != nil {
		return err
	}
	defer held.Close()
	return held.Detach()
}

// detachXDPLinks detaches the BPF links that hold an XDP program of the netdev. rtnetlink does not
// report these links. A link names its netdev only by an ifindex, which may belong to another
// namespace. Therefore its program must also be a program of the netdev.
func (e *Engine) detachXDPLinks(ctx context.Context, index int) error {
	programs, err := e.xdpPrograms(index)
	if err != nil {
		return err
	}

	all := new(bpflink.Iterator)
	defer all.Close()

	for all.Next() {
		if err := ctx.Err(); err != nil {
			return err
		}

		info, err := all.Link.Info()
		if err != nil || info.XDP() == nil || int(info.XDP().Ifindex) != index ||
			!programs[uint32(info.Program)] {
			continue
		}

		e.trace(fmt.Sprintf("detach BPF link %d of XDP program %d", info.ID, info.Program))
		if err := all.Link.Detach(); err != nil {
			return fmt.Errorf("detach BPF link %d of XDP program %d: %w: %w", info.ID, info.Program,
				err, ErrLeaks)
		}
	}

	if err := all.Err(); err != nil {
		return fmt.Errorf("list BPF links: %w", err)
	}

	return nil
}

// xdpPrograms returns the ids of the XDP programs of a netdev, in all modes.
func (e *Engine) xdpPrograms(index int) (map[uint32]bool, error) {
	message, err := e.host.ask(index)
	if err != nil {
		return nil, err
	}

	attrs, err := links.Attributes(message)
	if err != nil {
		return nil, err
	}

	xdp, err := attribute.Parse(attrs[unix.IFLA_XDP])
	programs := map[uint32]bool{}
	for _, kind := range []uint16{
		unix.IFLA_XDP_PROG_ID, unix.IFLA_XDP_DRV_PROG_ID, unix.IFLA_XDP_SKB_PROG_ID,
		unix.IFLA_XDP_HW_PROG_ID,
	} {
		if xdp.Has(kind) {
			programs[xdp.Uint32(kind)] = true
		}
	}

	return programs, err
}
