package netdev

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
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
func (e *Engine) observeVF(ctx context.Context, device Device, want function.Interface) (Observed, error) {
	observed := Observed{Name: want.Name, Addresses: want.Addresses}
	now, err := e.complete(ctx, Snapshot{}, Device{PF: device.PF})
	if err == nil && now.VF != nil {
		observed.MAC = now.VF.MAC
	}
	return observed, err
}

// restoreUserspace undoes what the PF and the eswitch enforce. Where they do not tell, the Function is gone, and what
// was enforced with it.
func (e *Engine) restoreUserspace(ctx context.Context, device Device, before Snapshot) error {
	now, err := e.complete(ctx, Snapshot{}, device)
	if err != nil {
		return err
	}
	errs := []error{e.unenforce(ctx, device, now, before)}
	if now, err = e.complete(ctx, Snapshot{}, device); err != nil {
		return errors.Join(append(errs, err)...)
	}
	if left := Diff(before, now); len(left) > 0 {
		return errors.Join(append(errs, fmt.Errorf("the Function is not as it was: %s", strings.Join(left, "; ")))...)
	}
	return nil
}
