// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
)

const (
	// These files have the number of VFs of a PF and its maximum. A write to sriov_numvfs returns
	// when the driver has made the VFs, which takes seconds. While there are VFs, the kernel
	// refuses any number but 0.
	numVFs, totalVFs = "sriov_numvfs", "sriov_totalvfs"

	askTimeout  = 2 * time.Second // bounds the kubelet's answer about the devices of pods
	lockTimeout = 2 * time.Second // bounds the wait for other work on the PF or one of its VFs
	// bounds the wait until sysfs shows the written number; only a simulated host is late
	showTimeout = time.Second
)

// problem is the reason why a PF does not have what a DevicePool asks for. It becomes a
// [v1alpha1.Shortage].
type problem struct {
	reason  string // a reason of the condition Supplied
	message string // what is missing and what to do, without the PF
	// the number of VFs was written without success: a later try may help, but not the release of a
	// Function
	tried bool
	final bool // another try would cost the existing VFs
}

func problemf(reason, format string, arguments ...any) *problem {
	return &problem{reason: reason, message: fmt.Sprintf(format, arguments...)}
}

func (p *problem) shortage(pf pci.Address) v1alpha1.Shortage {
	return v1alpha1.Shortage{
		PF: string(pf), Reason: p.reason, Message: fmt.Sprintf("PF %s %s", pf, p.message),
	}
}

// give makes want VFs for a PF, unless the PF or one of its VFs is in use. It calls making before
// it changes the PF. It returns nil if the PF has the VFs.
func (v *VFs) give(ctx context.Context, pf pci.Address, want int, making func(have int)) *problem {
	have, p := v.look(pf, want)
	if p != nil {
		return p
	}
	if have == want {
		v.finished(pf)
		return nil
	}
	if p = v.inError(pf); p != nil {
		return p
	}

	vfs, err := v.vfs(pf)
	if err != nil {
		return failed(err)
	}
	// The first check is before the locks, so that owners of Functions are not disturbed.
	if p = v.inUse(ctx, pf, vfs); p != nil {
		return p
	}

	locking, cancel := context.WithTimeoutCause(ctx, lockTimeout,
		fmt.Errorf("took more than %s", lockTimeout))
	defer cancel()

	// The locks keep the PF and its VFs from being reserved. Other callers that lock several
	// Functions must take the locks in the same order.
	for _, address := range slices.Sorted(slices.Values(append(slices.Clone(vfs), pf))) {
		unlock, err := v.Journal.Lock(locking, function.ID{Address: address})
		if err != nil {
			return problemf(v1alpha1.ReasonInUse, "is in use: %v", err)
		}
		defer unlock()
	}

	switch now, err := v.vfs(pf); {
	case err != nil:
		return failed(err)
	case !slices.Equal(vfs, now):
		return problemf(v1alpha1.ReasonBusy, "is being changed by somebody else")
	}

	if p = cmp.Or(v.inError(pf), v.inUse(ctx, pf, vfs)); p != nil {
		return p
	}

	making(have)
	defer v.changing(pf)()
	if have > 0 { // they are about to go, and nothing else would say that the PF had some
		if err := v.Journal.PutVFs(pf, have); err != nil {
			return problemf(v1alpha1.ReasonRefused, "is not changed: %v", err)
		}
	}

	start := time.Now()
	p = v.change(pf, have, want)
	took := time.Since(start)
	v.Metrics.seconds.Observe(took.Seconds())

	if p != nil {
		p.tried = true
		v.Metrics.changes.WithLabelValues("failed").Inc()
		return p
	}

	v.finished(pf)
	v.Metrics.changes.WithLabelValues("done").Inc()
	v.Log.Info("PF has the VFs that are wanted", "pf", pf, "from", have, "to", want, "took",
		took.String())

	return nil
}

// changing notes that the VFs of the PF are being changed, until done is called. What the kernel
// shows of them then is neither the old nor the new number.
func (v *VFs) changing(pf pci.Address) (done func()) {
	v.mutex.Lock()
	defer v.mutex.Unlock()
	v.inChange.Insert(pf)
	return func() {
		v.mutex.Lock()
		defer v.mutex.Unlock()
		v.inChange.Delete(pf)
	}
}

// finished forgets how many VFs the PF had before. A record that stays is deleted when the PF is
// looked at again.
func (v *VFs) finished(pf pci.Address) {
	if err := v.Journal.DeleteVFs(pf); err != nil {
		v.Log.Error(err, "The record of a change of VFs stays", "pf", pf)
	}
}

// look returns the number of VFs of the PF, and a problem if the PF cannot have as many as wanted.
func (v *VFs) look(pf pci.Address, want int) (have int, p *problem) {
	have, err := v.device(pf).Number(numVFs)
	total, totalErr := v.device(pf).Number(totalVFs)
	switch {
	case errors.Is(err, fs.ErrNotExist) && want == 0:
		return 0, nil
	case errors.Is(err, fs.ErrNotExist):
		return 0, problemf(v1alpha1.ReasonNotSupported,
			"cannot have VFs: the kernel shows no sriov_numvfs; is SR-IOV on in the card and in "+
				"the machine's firmware?")
	case err != nil || totalErr != nil:
		return 0, failed(cmp.Or(err, totalErr))
	case want > total:
		return 0, tooMany(want, total)
	}

	return have, nil
}

func tooMany(want, total int) *problem {
	return problemf(v1alpha1.ReasonOutOfRange,
		"can have %d VFs at most, not %d: lower numVFs, or raise the limit in the card",
		total, want)
}

func (v *VFs) vfs(pf pci.Address) ([]pci.Address, error) {
	links, err := v.device(pf).VFs()
	vfs := make([]pci.Address, 0, len(links))
	for _, link := range links {
		vfs = append(vfs, link.Address)
	}
	return vfs, err
}

// change changes the number of VFs by way of 0, because the kernel makes VFs only for a PF without
// VFs. It does not end with a context. If the process is killed meanwhile, or the PF gets no VFs,
// the journal has the number that the PF had: see [VFs.planUnfinished].
func (v *VFs) change(pf pci.Address, have, want int) *problem {
	if have > 0 {
		p := v.write(pf, 0)
		if vfs, err := v.vfs(pf); p != nil && (err != nil || len(vfs) > 0) {
			return p
		}
	}

	if want == 0 {
		return nil
	}

	p := v.write(pf, want)
	if p == nil || have == 0 {
		return p
	}
	if vfs, err := v.vfs(pf); err != nil || len(vfs) > 0 {
		return p // some VFs are better than none
	}

	if back := v.write(pf, have); back != nil {
		p.message += fmt.Sprintf("; the %d VFs that it had are gone, as it then %s",
			have, back.message)
		return p
	}

	p.final = true
	p.message += fmt.Sprintf("; it has its %d VFs again, and is left alone until numVFs or its "+
		"driver changes", have)
	return p
}

// write has the kernel make n VFs for a PF without VFs, or remove all VFs, and checks the result.
func (v *VFs) write(pf pci.Address, n int) *problem {
	if v.Writing != nil {
		v.Writing(pf, n)
	}

	if err := v.device(pf).Write(numVFs, strconv.Itoa(n)); err != nil {
		return v.refused(pf, n, err)
	}

	have := 0
	err := wait.PollUntilContextTimeout(context.Background(), 5*time.Millisecond, showTimeout, true,
		func(context.Context) (bool, error) {
			vfs, err := v.vfs(pf)
			have = len(vfs)
			return have == n, err
		})

	switch {
	case err == nil:
		return nil
	case !wait.Interrupted(err):
		return failed(err)
	}

	driver, _ := v.device(pf).Link("driver")
	p := problemf(v1alpha1.ReasonRefused, "has %d VFs after driver %s was told to make %d: "+
		"see the kernel's log%s", have, driver, n, v.whetherDown(pf))
	if p.final = have > 0; p.final {
		p.message += "; it is left alone until numVFs or its driver changes"
	}

	return p
}

// refused explains the error of the kernel (sriov_numvfs_store in drivers/pci/iov.c, and the
// driver's sriov_configure).
func (v *VFs) refused(pf pci.Address, n int, err error) *problem {
	driver, _ := v.device(pf).Link("driver")
	var errno unix.Errno
	errors.As(err, &errno)

	switch {
	case errno == unix.EBUSY || errno == unix.EAGAIN:
		// i40e and ice return EAGAIN while they work on a VF
		return problemf(v1alpha1.ReasonBusy,
			"cannot be given %d VFs now: driver %s says %q; does somebody else change its VFs?",
			n, driver, errno.Error())
	case errno == unix.ERANGE:
		total, _ := v.device(pf).Number(totalVFs)
		return tooMany(n, total)
	case errno == unix.ENOENT && driver == "":
		return problemf(v1alpha1.ReasonNotSupported, "has no driver: bind one that makes VFs")
	case errno == unix.ENOENT || errno == unix.ENOSYS || quirk.NotSupported(errno):
		return problemf(v1alpha1.ReasonNotSupported,
			"has driver %s, which makes no VFs: bind one that does", driver)
	case errno == unix.EROFS || errno == unix.EACCES: // not EPERM, which some drivers return
		return problemf(v1alpha1.ReasonRefused,
			"cannot be given %d VFs: this agent may not write sriov_numvfs (%v): "+
				"its sysfs must be mounted writable, as deploy/agent does", n, errno)
	case errno != 0:
		err = errno // without the path, which the message contains anyway
	}

	return problemf(v1alpha1.ReasonRefused,
		"cannot be given %d VFs: driver %s says %q; see the kernel's log%s", n, driver, err,
		v.whetherDown(pf))
}

// whetherDown adds to a message that the PF is administratively down, if it is. Some drivers make
// no VFs for a PF that is down, and bnxt reports success nevertheless (quirk "VFs that were not
// made"). A missing link is different and keeps no driver from making VFs.
func (v *VFs) whetherDown(pf pci.Address) string {
	dir, names, err := v.device(pf).Netdevs()
	if err != nil || len(names) != 1 {
		return ""
	}

	text, err := dir.Dir(names[0]).Attribute("flags")
	if err != nil {
		return ""
	}
	if flags, err := strconv.ParseUint(text, 0, 32); err != nil || flags&unix.IFF_UP != 0 {
		return ""
	}

	return "; the PF is administratively down: " + function.HowToSetUp(names[0])
}

// inError returns the problem that a health reporter shows an error of the PF's card, or nil. Such
// a PF is left alone, because a change resets the card and may never end.
func (v *VFs) inError(pf pci.Address) *problem {
	if v.Fault == nil {
		return nil
	}
	if fault := v.Fault(function.OfPF(pf)); fault != "" {
		return problemf(v1alpha1.ReasonFault,
			"is not changed: %s; its VFs are changed when the driver has recovered", fault)
	}
	return nil
}

func failed(err error) *problem {
	return problemf(v1alpha1.ReasonRefused, "has VFs that cannot be changed: %v", err)
}
