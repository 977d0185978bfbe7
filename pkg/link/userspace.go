package link

import (
	"errors"
	"fmt"
	"strings"
)

// userspace says that the snapshot is one of a Function without a netdev.
func (s Snapshot) userspace() bool { return s.Name == "" }

// title is for messages.
func (s Snapshot) title() string {
	if s.userspace() {
		return "Function without a netdev"
	}
	return "netdev " + s.Name
}

// observeVF is what a Function without a netdev is for the pod.
func (e *Engine) observeVF(pf *PF, name string) (Observed, error) {
	now, err := e.complete(Snapshot{}, pf)
	if err != nil || now.VF == nil {
		return Observed{Name: name}, err
	}
	return Observed{Name: name, MAC: now.VF.MAC}, nil
}

// restoreVF undoes what the PF enforces. Without a PF that tells, the VF is gone, and what was enforced with it.
func (e *Engine) restoreVF(pf *PF, before Snapshot) error {
	if before.VF == nil {
		return nil
	}
	now, err := e.complete(Snapshot{}, pf)
	if err != nil || now.VF == nil {
		return err
	}
	var errs []error
	for _, c := range append(macChange(*now.VF, *before.VF), vfChanges(*now.VF, *before.VF)...) {
		errs = append(errs, e.changeVF(pf, []vfChange{c}))
	}
	if now, err = e.complete(Snapshot{}, pf); err != nil {
		return errors.Join(append(errs, err)...)
	}
	if left := Diff(before, now); len(left) > 0 {
		return errors.Join(append(errs, fmt.Errorf("the VF is not as it was: %s", strings.Join(left, "; ")))...)
	}
	return nil
}
