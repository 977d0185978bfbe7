// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// choose chooses a VF for each share of a PF that the claim has, and reserves the VF, so that the
// next agent knows the choice. It queues a write of the choice to the claim's status, which the
// controller reads.
func (d *Driver) choose(
	ctx context.Context, c *resourceapi.ResourceClaim, pod journal.Pod, devices []claim.Device,
) error {
	for i := range devices {
		device := &devices[i]
		if device.Share == "" || device.ConfigErr != nil {
			continue
		}
		if err := d.chooseVF(ctx, c, pod, device); err != nil {
			return fmt.Errorf("request %s, PF %s: %w", device.Request, device.ID.PF, err)
		}
		d.Report(reservation(c, pod, *device).Claim)
	}
	return nil
}

func (d *Driver) chooseVF(
	ctx context.Context, c *resourceapi.ResourceClaim, pod journal.Pod, device *claim.Device,
) error {
	if pf, known := d.Function(function.ID{Address: device.ID.PF}); known && pf.LinkSpeed > 0 &&
		device.Bandwidth > pf.LinkSpeed {
		return fmt.Errorf("the claim has %d Mbit/s of the link, which has %d by now: make the "+
			"pod anew", device.Bandwidth, pf.LinkSpeed)
	}

	for _, a := range d.Journal.ByClaim(c.UID) {
		if a.Claim.Share == device.Share {
			device.Function = a.Function
			return nil
		}
	}

	// recorded is the choice in the claim's status, from before the journal was lost.
	recorded := device.Function
	vfs := d.vfsOf(device.ID)
	slices.SortStableFunc(vfs, func(a, b function.Function) int {
		switch recorded {
		case a.ID:
			return -1
		case b.ID:
			return 1
		}
		return 0
	})

	var errs []error
	for _, f := range vfs {
		if _, used := d.Journal.Get(f.ID); used || d.keepsPodsAway(device.ID.DevicePool, f) {
			continue
		}

		device.Function = f.ID
		want := reservation(c, pod, *device)
		want.PF, want.PFName, want.VFIndex = f.PF, f.PFName, f.Index
		err := d.Lifecycle.Reserve(ctx, want)
		if err == nil {
			return nil
		}

		errs = append(errs, err) // another owner was faster
	}

	device.Function = function.ID{}
	return errors.Join(append([]error{fmt.Errorf("none of the %d VFs of DevicePool %s is free: "+
		"pods have them, or they have problems",
		len(vfs), device.ID.DevicePool)}, errs...)...)
}

// vfsOf returns the VFs of a DevicePool on a PF, by their index.
func (d *Driver) vfsOf(id claim.PoolID) []function.Function {
	var vfs []function.Function
	pools, _ := d.Pools()
	for _, p := range pools {
		if p.Name != id.DevicePool {
			continue
		}
		for _, f := range p.ByPF()[id.PF] {
			if f.Kind == function.VF {
				vfs = append(vfs, f)
			}
		}
	}

	return vfs
}

// keepsPodsAway reports whether a Function has a problem that keeps pods away, other than a cordon,
// which the scheduler has heeded unless the claim tolerates it.
func (d *Driver) keepsPodsAway(devicePool string, f function.Function) bool {
	var spec v1alpha1.DevicePoolSpec
	pools, _ := d.Pools()
	for _, p := range pools {
		if p.Name == devicePool {
			spec = p.Spec
		}
	}
	return slices.ContainsFunc(d.Health.Problems(f), func(p function.Problem) bool {
		return p.Taint != v1alpha1.TaintCordoned && devicemodel.KeepsPodsAway(spec, p)
	})
}
