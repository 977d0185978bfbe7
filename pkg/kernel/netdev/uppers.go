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

// uppers says whether a netdev has an upper one, which the kernel tells no other way: it lists the
// uppers of a netdev only in their own namespaces. A BPF program of type sched_cls gets a packet
// that seems to come from the netdev (BPF_PROG_TEST_RUN), and looks at net_device.adj_list.upper.
// All kinds of netdevs that use another one are in this list (netdev_upper_dev_link and
// netdev_master_upper_dev_link of net/core/dev.c), also those that take its frames by a handler.
// The program needs no lock: whatever a pod made on its netdev was in the list before the netdev
// left the pod, because the kernel makes and moves netdevs under one lock (RTNL).
//
// It needs Linux 6.2 for the function bpf_cast_to_kern_ctx, BTF (CONFIG_DEBUG_INFO_BTF), and
// CAP_SYS_ADMIN or CAP_BPF and CAP_PERFMON. The zero value is ready for use by several goroutines.
type uppers struct {
	once    sync.Once
	program *ebpf.Program
	err     error // why the kernel cannot be asked
}

// load loads the program at the first call, which takes some 0.1 s, because the kernel's BTF has
// several MB. Its error is the same at each call.
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

// The verdicts of the program.
const (
	noUpper   = 0
	someUpper = 1
)

// on says whether a netdev of the thread's namespace has an upper one. The program must be loaded.
func (u *uppers) on(index int) (bool, error) {
	const size, ifindex = 192, 40 // of struct __sk_buff, which is UAPI, and of its field
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

// loadUppers makes the program of what the kernel says about its types.
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
		Name: "xpu_uppers", Type: ebpf.SchedCLS, License: "GPL", // which the function wants
		Instructions: asm.Instructions{
			call, // R0 = the sk_buff of the context in R1
			asm.LoadMem(asm.R1, asm.R0, dev, asm.DWord),
			asm.LoadMem(asm.R2, asm.R1, upper, asm.DWord), // adj_list.upper.next
			// &adj_list.upper, where an empty list ends
			asm.Add.Imm(asm.R1, int32(upper)),
			asm.Mov.Imm(asm.R0, noUpper),
			asm.JEq.Reg(asm.R1, asm.R2, "end"),
			asm.Mov.Imm(asm.R0, someUpper),
			asm.Return().WithSymbol("end"),
		},
	})
}

// offset is where a field of a struct begins, in bytes. The path goes through structs in structs.
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

// member finds a field, also within structs and unions that have no name. before is where it
// begins, in bytes.
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

// membersOf are the members of a struct or union.
func membersOf(t btf.Type) []btf.Member {
	switch t := btf.UnderlyingType(t).(type) {
	case *btf.Struct:
		return t.Members
	case *btf.Union:
		return t.Members
	}
	return nil
}

// SeesUppers returns nil if the kernel says whether something is on top of a netdev. Otherwise its
// error says why not, and the Engine finds out by many requests: each release takes 0.1 s and more
// where the kernel has loaded VLANs. The first call takes some 0.1 s, which the first release takes
// otherwise.
func (e *Engine) SeesUppers() error { return e.uppers.load() }

// upper says whether something is on top of a netdev of the host. known is false where the kernel
// says it of no netdev. Where it does, and fails for this one, that is an error: what finds out
// less is not asked instead.
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
