// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
)

// uppers reports whether something is stacked on a netdev, in any namespace. The zero value is
// ready for use by several goroutines.
//
// The kernel has no request for this, because it lists an upper netdev only in its own namespace.
// Therefore a BPF program of type sched_cls receives a packet that seems to come from the netdev
// (BPF_PROG_TEST_RUN), and reads net_device.adj_list.upper. This list has all netdevs that use
// another netdev (netdev_upper_dev_link and netdev_master_upper_dev_link of net/core/dev.c),
// including those that take its frames by a handler.
//
// The program needs no lock. The kernel makes and moves netdevs under one lock (RTNL). What a pod
// made on its netdev was therefore in the list before the netdev left the pod.
//
// The program needs Linux 6.2 for the function bpf_cast_to_kern_ctx, BTF (CONFIG_DEBUG_INFO_BTF),
// and CAP_SYS_ADMIN or both CAP_BPF and CAP_PERFMON.
type uppers struct {
	once    sync.Once
	program *ebpf.Program
	err     error // why the program cannot run
}

// load loads the program at the first call. This takes about 0.1 s, because the kernel's BTF has
// several MB. Later calls return the same error.
func (u *uppers) load() error {
	u.once.Do(func() {
		program, err := loadUppers()
		if err != nil {
			u.err = fmt.Errorf("BPF program that looks for netdevs on top of another one: %w", err)
			return
		}

		u.program = program
		const loopback = 1
		if _, err := u.on(loopback); err != nil {
			u.err = err
		}
	})
	return u.err
}

func (u *uppers) close() {
	u.once.Do(func() { u.err = errors.New("closed") })
	_ = u.program.Close()
}

// These are the verdicts of the program.
const (
	noUpper   = 0
	someUpper = 1
)

// on reports whether something is stacked on a netdev in the namespace of the calling thread. The
// program must be loaded.
func (u *uppers) on(index int) (bool, error) {
	const size, ifindex = 192, 40 // of struct __sk_buff, which is UAPI, and offset of its field
	context := make([]byte, size)
	binary.NativeEndian.PutUint32(context[ifindex:], uint32(index))

	const shortest = 64 // bytes of an Ethernet frame
	verdict, err := u.program.Run(&ebpf.RunOptions{
		Data: make([]byte, shortest), Context: context, Repeat: 1,
	})
	if err == nil && verdict != noUpper && verdict != someUpper {
		err = fmt.Errorf("verdict %d", verdict)
	}
	if err != nil {
		return false, fmt.Errorf("look for netdevs on top of netdev %d: %w", index, err)
	}

	return verdict == someUpper, nil
}

// loadUppers loads the program. It takes the offsets of fields from the kernel's BTF.
func loadUppers() (*ebpf.Program, error) {
	types, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, err
	}

	var cast *btf.Func
	if err := types.TypeByName("bpf_cast_to_kern_ctx", &cast); err != nil {
		return nil, err
	}

	castID, err := types.TypeID(cast)
	if err != nil {
		return nil, err
	}

	dev, err := offset(types, "sk_buff", "dev")
	if err != nil {
		return nil, err
	}

	upper, err := offset(types, "net_device", "adj_list", "upper")
	if err != nil {
		return nil, err
	}

	call := asm.Instruction{
		OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call),
		Src:    asm.PseudoKfuncCall, Constant: int64(castID),
	}

	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "xpu_uppers", Type: ebpf.SchedCLS, License: "GPL", // the kfunc requires it
		Instructions: asm.Instructions{
			call, // R0 = the sk_buff of the context in R1
			asm.LoadMem(asm.R1, asm.R0, dev, asm.DWord),
			asm.LoadMem(asm.R2, asm.R1, upper, asm.DWord), // adj_list.upper.next
			// An empty list points to itself: &adj_list.upper.
			asm.Add.Imm(asm.R1, int32(upper)),
			asm.Mov.Imm(asm.R0, noUpper),
			asm.JEq.Reg(asm.R1, asm.R2, "end"),
			asm.Mov.Imm(asm.R0, someUpper),
			asm.Return().WithSymbol("end"),
		},
	})
}

// offset returns the offset of a field of a struct in bytes. path names the field, and the structs
// that contain it, from outside to inside.
func offset(types *btf.Spec, name string, path ...string) (int16, error) {
	var s *btf.Struct
	if err := types.TypeByName(name, &s); err != nil {
		return 0, err
	}

	members, at := s.Members, uint32(0)
	for _, field := range path {
		m, before, found := member(members, field)
		if !found {
			return 0, fmt.Errorf("struct %s of the kernel has no field %s", name, field)
		}
		members, at = membersOf(m.Type), at+before
	}

	if at > math.MaxInt16 {
		return 0, fmt.Errorf("struct %s of the kernel: field %s is at %d, must be below %d",
			name, path[len(path)-1], at, math.MaxInt16)
	}

	return int16(at), nil
}

// member finds a field, also within structs and unions without a name. before is the offset of the
// field in bytes.
func member(members []btf.Member, name string) (found btf.Member, before uint32, ok bool) {
	for _, m := range members {
		if m.Name == name {
			return m, m.Offset.Bytes(), true
		}
		if m.Name != "" {
			continue
		}
		if found, before, ok = member(membersOf(m.Type), name); ok {
			return found, m.Offset.Bytes() + before, true
		}
	}
	return found, 0, false
}

// membersOf returns the members of a struct or union, or nil for other types.
func membersOf(t btf.Type) []btf.Member {
	switch t := btf.UnderlyingType(t).(type) {
	case *btf.Struct:
		return t.Members
	case *btf.Union:
		return t.Members
	}
	return nil
}

// SeesUppers returns nil if the Engine can see with one request whether something is stacked on a
// netdev. Otherwise its error says why not. The Engine then sends many requests, so that each
// release takes 0.1 s or more if the kernel has loaded the VLAN module.
//
// The first call takes about 0.1 s. Without this call, the first release takes this time.
func (e *Engine) SeesUppers() error { return e.uppers.load() }

// upper reports whether something is stacked on a netdev of the host. known is false if the kernel
// cannot run the program at all. If the program runs, but fails for this netdev, upper returns an
// error, so that the caller does not fall back to probes, which find out less.
func (e *Engine) upper(l *link) (has, known bool, err error) {
	if e.uppers.load() != nil {
		return false, false, nil
	}

	err = namespace.Do(e.host.ns, func() error {
		has, err = e.uppers.on(l.Identity.Index)
		return err
	})

	switch {
	case errors.Is(err, unix.ENODEV):
		return false, false, fmt.Errorf("%s: %w", l.Name, ErrGone)
	case err != nil:
		return false, false, fmt.Errorf("%s: %w", l.Name, err)
	}

	return has, true, nil
}
