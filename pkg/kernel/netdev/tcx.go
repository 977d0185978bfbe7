// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	bpflink "github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// tcxSides are the sides of a netdev to which a tcx program can be attached. The program stays
// attached when the netdev moves, and when the process that attached it ends.
var tcxSides = []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress}

// tcxLister lists the tcx programs of netdevs. Several goroutines may use it at once.
type tcxLister struct {
	procRoot string
	// query lists the programs at one side of a netdev in the namespace of the calling thread.
	query func(index int, at ebpf.AttachType) ([]bpflink.AttachedProgram, error)

	mutex      sync.Mutex
	known, has bool // whether the kernel has tcx, if that is known
}

func newTCXLister(procRoot string) *tcxLister {
	query := func(index int, at ebpf.AttachType) ([]bpflink.AttachedProgram, error) {
		result, err := bpflink.QueryPrograms(bpflink.QueryOptions{Target: index, Attach: at})
		if err != nil {
			return nil, err
		}
		return result.Programs, nil
	}
	return &tcxLister{procRoot: procRoot, query: query}
}

// programs lists the programs at one side of a netdev in the namespace of the calling thread. It
// returns none if the kernel has no tcx. The error matches [ErrGone] if there is no such netdev.
func (t *tcxLister) programs(index int, at ebpf.AttachType) ([]bpflink.AttachedProgram, error) {
	has, err := t.supported()
	if err != nil || !has {
		return nil, err
	}

	programs, err := t.query(index, at)
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, fmt.Errorf("list %s programs: %w", at, ErrGone)
	case err != nil:
		return nil, fmt.Errorf("list %s programs: %w", at, err)
	}

	return programs, nil
}

// supported reports whether the kernel has tcx. It asks until the kernel gives a clear answer, and
// remembers this answer.
//
// A kernel without tcx (before Linux 6.6, or without CONFIG_NET_XGRESS) answers EINVAL to the
// query, but it also answers EINVAL to other mistakes. Therefore supported asks about lo, which
// exists in each namespace, so that only the kind of the program can be wrong. Any other error is
// no answer.
func (t *tcxLister) supported() (bool, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	if t.known {
		return t.has, nil
	}

	const loopback = 1
	_, err := t.query(loopback, ebpf.AttachTCXIngress)
	switch {
	case err == nil:
		t.has = true
	case errors.Is(err, unix.EINVAL):
	case refusesBPF(err):
		if err := t.withoutBPF(err); err != nil {
			return false, err
		}
	default:
		return false, fmt.Errorf("ask whether the kernel has tcx: %w", err)
	}

	t.known = true
	return t.has, nil
}

// refusesBPF reports whether the kernel or a filter of system calls forbids the query. The library
// returns the same errors for both.
func refusesBPF(err error) bool {
	return errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.ENOSYS) ||
		errors.Is(err, unix.EPERM)
}

// withoutBPF returns nil if the kernel was built without bpf(2), and therefore lacks the sysctl of
// kernel/bpf/syscall.c. Otherwise it returns an error, because the query was forbidden.
func (t *tcxLister) withoutBPF(refused error) error {
	_, err := os.Stat(filepath.Join(t.procRoot, "sys/kernel/unprivileged_bpf_disabled"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("BPF programs of a pod cannot be seen: bpf(2) must be allowed for the "+
		"agent: %w",
		errors.Join(refused, err))
}
