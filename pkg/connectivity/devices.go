// SPDX-License-Identifier: Apache-2.0

package connectivity

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/dynamic-resource-allocation/cel"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// freeNodes returns the nodes that publish a device which the DeviceClass selects and whose taints
// keep no pod away. It returns nil if pods get no claim, or if the user may not read the devices.
func (t *Test) freeNodes(ctx context.Context) (map[string]bool, error) {
	if t.Resource != "" {
		return nil, nil
	}
	var all resourceapi.ResourceSliceList
	if err := t.API.List(ctx, &all); err != nil {
		if apierrors.IsForbidden(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	class, err := t.classSelectors(ctx)
	if err != nil {
		return nil, err
	}

	free := map[string]bool{}
	for _, s := range all.Items {
		if s.Spec.Driver != v1alpha1.GroupName || s.Spec.NodeName == nil {
			continue
		}
		offers, err := class.matchAny(ctx, s.Spec.Devices)
		if err != nil && t.failing == "" {
			t.failing = fmt.Sprintf("node %s: %v", *s.Spec.NodeName, err)
		}
		if offers {
			free[*s.Spec.NodeName] = true
		}
	}
	return free, nil
}

// takesPods reports whether a device has no taint that keeps pods away.
func takesPods(d resourceapi.Device) bool {
	return !slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
		return t.Effect == resourceapi.DeviceTaintEffectNoSchedule ||
			t.Effect == resourceapi.DeviceTaintEffectNoExecute
	})
}

// selectors are the compiled CEL expressions of a DeviceClass.
type selectors []cel.CompilationResult

// classSelectors compiles the selectors of the test's DeviceClass. It returns none if the user may
// not read it.
func (t *Test) classSelectors(ctx context.Context) (all selectors, err error) {
	var class resourceapi.DeviceClass
	if err := t.API.Get(ctx, client.ObjectKey{Name: t.Class}, &class); err != nil {
		if apierrors.IsForbidden(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("DeviceClass %s: %w", t.Class, err)
	}

	// The API server has judged the expression by its own features. All are on here, so that none
	// that it takes is refused.
	compiler := cel.GetCompiler(cel.Features{
		EnableConsumableCapacity: true, EnableListTypeAttributes: true,
	})
	for i, s := range class.Spec.Selectors {
		if s.CEL == nil {
			continue
		}
		compiled := compiler.CompileCELExpression(s.CEL.Expression, cel.Options{})
		if compiled.Error != nil {
			return nil, fmt.Errorf("DeviceClass %s: spec.selectors[%d]: %w", t.Class, i, compiled.Error)
		}
		all = append(all, compiled)
	}

	return all, nil
}

// matchAny reports whether one of the devices of this driver takes pods and is selected. It ends at
// the first one for which a selector fails, for example by an attribute that the device does not
// have: the scheduler places no pod then.
func (all selectors) matchAny(ctx context.Context, devices []resourceapi.Device) (bool, error) {
	for _, d := range devices {
		selected, err := all.match(ctx, d)
		if err != nil {
			return false, fmt.Errorf("device %s: %w", d.Name, err)
		}
		if selected && takesPods(d) {
			return true, nil
		}
	}
	return false, nil
}

// match reports whether each selector is true for the device.
func (all selectors) match(ctx context.Context, d resourceapi.Device) (bool, error) {
	input := cel.Device{Driver: v1alpha1.GroupName, Attributes: d.Attributes, Capacity: d.Capacity,
		AllowMultipleAllocations: d.AllowMultipleAllocations}
	for i, s := range all {
		if matches, _, err := s.DeviceMatches(ctx, input); err != nil || !matches {
			if err != nil {
				err = fmt.Errorf("spec.selectors[%d]: %w", i, err)
			}
			return false, err
		}
	}
	return true, nil
}
