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

// carriedOnHost says what the host has on a netdev that a release would take for the pod's, "" for
// nothing.
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

// inUse is the error of a netdev that the host uses as the words say.
func inUse(netdev, how string) error {
	return fmt.Errorf("netdev %s: is in use on the host, %s", netdev, how)
}

// detachForeign takes away what a pod may have left on a netdev that is on the host again, and that
// goes on to read or forge its frames: BPF programs, and netdevs on top of it.
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

// detachPrograms detaches tcx programs, and the XDP programs that a BPF link holds; rtnetlink
// detaches other XDP programs.
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

// detachTCX detaches a program, which may have gone meanwhile.
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
// say which links these are. A link names its netdev by the index alone, so that its program must
// be the netdev's as well.
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

// xdpPrograms are the numbers of the XDP programs of a netdev, in each mode.
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
