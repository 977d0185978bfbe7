// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	bpflink "github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// kernel answers queries by the ifindex of the netdev.
type kernel struct {
	answers map[int]error
	asked   []int
}

func (k *kernel) query(index int, _ ebpf.AttachType) ([]bpflink.AttachedProgram, error) {
	k.asked = append(k.asked, index)
	return nil, k.answers[index]
}

// TestTCXSupport checks that a kernel counts as one without tcx only if it says so about lo. Any
// other answer does not prove that the netdev has no programs.
func TestTCXSupport(t *testing.T) {
	const lo, netdev = 1, 7
	hidden := fmt.Errorf("query programs: %w", ebpf.ErrNotSupported) // for EPERM
	for name, test := range map[string]struct {
		lo, netdev error
		noBPF      bool   // the kernel was built without bpf(2)
		says       string // "" if the netdev has no programs
		asked      string
	}{
		"tcx":    {asked: "[1 7 7]"},
		"no tcx": {lo: unix.EINVAL, netdev: unix.EINVAL, asked: "[1]"},
		"EINVAL for the netdev": {
			netdev: unix.EINVAL, says: "list TCXIngress programs: invalid", asked: "[1 7 7]",
		},
		"netdev is gone": {netdev: unix.ENODEV, says: ErrGone.Error(), asked: "[1 7 7]"},
		"kernel is short of memory": {
			lo: unix.ENOMEM, says: "whether the kernel has tcx: cannot allocate", asked: "[1 1]",
		},
		"bpf(2) not allowed": {
			lo: unix.EPERM, says: "bpf(2) must be allowed for the agent", asked: "[1 1]",
		},
		"not allowed, hidden": {
			lo: hidden, says: "bpf(2) must be allowed for the agent", asked: "[1 1]",
		},
		"filter of system calls": {
			lo: unix.ENOSYS, says: "bpf(2) must be allowed for the agent", asked: "[1 1]",
		},
		"no bpf(2)": {lo: unix.ENOSYS, noBPF: true, asked: "[1]"},
	} {
		t.Run(name, func(t *testing.T) {
			k := &kernel{answers: map[int]error{lo: test.lo, netdev: test.netdev}}
			lister := newTCXLister(t.TempDir())
			lister.query = k.query
			if !test.noBPF {
				dir := filepath.Join(lister.procRoot, "sys/kernel")
				must.Succeed(t, os.MkdirAll(dir, 0o755))
				must.Succeed(t,
					os.WriteFile(filepath.Join(dir, "unprivileged_bpf_disabled"), nil, 0o644))
			}

			for range 2 {
				_, err := lister.programs(netdev, ebpf.AttachTCXIngress)
				if (err == nil) != (test.says == "") ||
					err != nil && !strings.Contains(err.Error(), test.says) {
					t.Errorf("error %v, want %q", err, test.says)
				}
			}

			if got := fmt.Sprint(k.asked); got != test.asked {
				t.Errorf("asked about netdevs %s, want %s", got, test.asked)
			}
		})
	}
}

// TestTCXSupportLater checks that an unclear answer is not remembered.
func TestTCXSupportLater(t *testing.T) {
	k := &kernel{answers: map[int]error{1: unix.ENOMEM}}
	lister := &tcxLister{procRoot: t.TempDir(), query: k.query}
	if _, err := lister.supported(); err == nil {
		t.Error("no error")
	}

	k.answers[1] = nil
	if has, err := lister.supported(); !has || err != nil {
		t.Errorf("has tcx: %t, %v", has, err)
	}
}

// TestTCXOfThisKernel checks that the kernel answers EINVAL to an unknown query, and reports a
// netdev that does not exist as such.
func TestTCXOfThisKernel(t *testing.T) {
	lister := newTCXLister("/proc")
	has, err := lister.supported()
	must.Succeed(t, err)

	if !has {
		t.Skip("needs Linux 6.6 with tcx")
	}

	const none, unknownKind = 1<<31 - 1, ebpf.AttachType(1 << 16)
	if _, err := lister.query(1, unknownKind); !strings.Contains(fmt.Sprint(err),
		unix.EINVAL.Error()) {
		t.Errorf("unknown kind: %v, want %v", err, unix.EINVAL)
	}
	if _, err := lister.programs(none, ebpf.AttachTCXIngress); !errors.Is(err, ErrGone) {
		t.Errorf("no such netdev: %v, want %v", err, ErrGone)
	}
}
