// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/component-base/featuregate"
	"k8s.io/dynamic-resource-allocation/structured"
)

// Versions of Kubernetes whose scheduler can be reproduced.
const (
	OldestKubernetes = "1.34"
	NewestKubernetes = "1.37"
)

// Feature gates of Kubernetes that change how claims are allocated.
const (
	adminAccess         featuregate.Feature = "DRAAdminAccess"
	bindingConditions   featuregate.Feature = "DRADeviceBindingConditions"
	compatibilityGroups featuregate.Feature = "DRADeviceCompatibilityGroups"
	consumableCapacity  featuregate.Feature = "DRAConsumableCapacity"
	derivedAttributes   featuregate.Feature = "DRADerivedAttributes"
	deviceStatus        featuregate.Feature = "DRAResourceClaimDeviceStatus"
	deviceTaintRules    featuregate.Feature = "DRADeviceTaintRules"
	deviceTaints        featuregate.Feature = "DRADeviceTaints"
	extendedResource    featuregate.Feature = "DRAExtendedResource"
	fractionalCapacity  featuregate.Feature = "DRAFractionalCapacityRange"
	listTypeAttributes  featuregate.Feature = "DRAListTypeAttributes"
	nodeOperations      featuregate.Feature = "DRAOptionalNodeOperations"
	partitionable       featuregate.Feature = "DRAPartitionableDevices"
	prioritizedList     featuregate.Feature = "DRAPrioritizedList"
)

// gates returns the feature gates as pkg/features/kube_features.go of Kubernetes 1.37 has them,
// from version 1.34 on.
func gates() map[featuregate.Feature]featuregate.VersionedSpecs {
	since := func(alpha, beta, stable string) (specs featuregate.VersionedSpecs) {
		for _, stage := range []featuregate.FeatureSpec{
			{Version: parsed(alpha), PreRelease: featuregate.Alpha},
			{Version: parsed(beta), PreRelease: featuregate.Beta, Default: true},
			{Version: parsed(stable), PreRelease: featuregate.GA, Default: true},
		} {
			if stage.Version != nil {
				specs = append(specs, stage)
			}
		}
		return specs
	}

	all := map[featuregate.Feature]featuregate.VersionedSpecs{
		adminAccess:         since("1.32", "1.34", "1.36"),
		bindingConditions:   since("1.34", "1.36", ""),
		compatibilityGroups: since("1.37", "", ""),
		consumableCapacity:  since("1.34", "1.36", ""),
		derivedAttributes:   since("1.37", "", ""),
		deviceStatus:        since("1.32", "1.33", "1.37"),
		deviceTaints:        since("1.33", "1.36", "1.37"),
		extendedResource:    since("1.34", "1.36", "1.37"),
		// Beta, but off unless --min-compatibility-version is 1.37 too.
		fractionalCapacity: since("1.37", "", ""),
		listTypeAttributes: since("1.36", "", ""),
		nodeOperations:     since("1.37", "", ""),
		partitionable:      since("1.33", "1.36", ""),
		prioritizedList:    since("1.33", "1.34", "1.36"),
	}

	all[deviceTaintRules] = featuregate.VersionedSpecs{ // off while its API was beta
		{Version: version.MustParse("1.35"), PreRelease: featuregate.Alpha},
		{Version: version.MustParse("1.36"), PreRelease: featuregate.Beta},
		{Version: version.MustParse("1.37"), Default: true, PreRelease: featuregate.GA},
	}

	return all
}

// parsed parses a minor version. It returns nil for "".
func parsed(minor string) *version.Version {
	if minor == "" {
		return nil
	}
	return version.MustParse(minor)
}

// Features are the features of a Kubernetes scheduler.
type Features struct {
	Kubernetes string // version of the scheduler that is reproduced, for example 1.37
	// Unknown is the version that was asked for if it is newer than [NewestKubernetes], for example
	// v1.38.0, and otherwise "". Its scheduler may decide otherwise.
	Unknown           string
	Allocator         structured.Features
	ExtendedResources bool // DeviceClasses can serve extended resources
	TaintRules        bool // DeviceTaintRules have an effect

	// listsUnsaid is true if nobody said whether the scheduler has lists, which are off by default.
	// oldLists is true if it has lists, and compares them otherwise than this program.
	listsUnsaid, oldLists bool
}

// firstWithLists is the first version of Kubernetes whose allocator keeps count of the values that
// devices have in common. The allocator of 1.36 forgets them when it takes a device back
// (matchAttributeConstraint in structured/internal/experimental).
const firstWithLists = "1.37"

// NewFeatures returns the features of the scheduler of a version of Kubernetes: the defaults of
// that version, changed by featureGates in the format of --feature-gates, for example
// "DRAConsumableCapacity=true". The version is like 1.37 or v1.37.1. The allocator is the one of
// [NewestKubernetes] with these features: faults of older ones that were mended since are not
// reproduced. What versions after
// [NewestKubernetes] changed is unknown: they get the features of that version, and [Features.Note]
// says so.
func NewFeatures(kubernetes, featureGates string) (Features, error) {
	v, err := version.ParseGeneric(kubernetes)
	if err != nil {
		return Features{}, fmt.Errorf("version of Kubernetes %q: must be like %s", kubernetes,
			NewestKubernetes)
	}

	unknown := ""
	v = version.MajorMinor(v.Major(), v.Minor())
	if v.LessThan(version.MustParse(OldestKubernetes)) {
		return Features{}, fmt.Errorf("version of Kubernetes %s: the oldest is %s", kubernetes,
			OldestKubernetes)
	}

	if newest := version.MustParse(NewestKubernetes); v.GreaterThan(newest) {
		unknown, v = kubernetes, newest
	}

	gate := featuregate.NewVersionedFeatureGateWithMinCompatibility(v, v)
	if err := gate.AddVersioned(gates()); err != nil {
		return Features{}, err
	}

	if err := gate.Set(featureGates); err != nil {
		return Features{},
			fmt.Errorf("feature gates %q: %w; those that change how claims are allocated are %s",
				featureGates, err, strings.Join(GateNames(), ", "))
	}

	return Features{
		Kubernetes: v.String(),
		Unknown:    unknown,
		listsUnsaid: !gate.Enabled(listTypeAttributes) &&
			!strings.Contains(featureGates, string(listTypeAttributes)),
		oldLists: gate.Enabled(listTypeAttributes) &&
			v.LessThan(version.MustParse(firstWithLists)),
		ExtendedResources: gate.Enabled(extendedResource),
		// Version 1.34 has no separate gate for rules.
		TaintRules: gate.Enabled(deviceTaints) &&
			(gate.Enabled(deviceTaintRules) || v.LessThan(version.MustParse("1.35"))),
		Allocator: structured.Features{
			AdminAccess:             gate.Enabled(adminAccess),
			CompatibilityGroups:     gate.Enabled(compatibilityGroups),
			ConsumableCapacity:      gate.Enabled(consumableCapacity),
			DerivedAttributes:       gate.Enabled(derivedAttributes),
			DeviceBindingAndStatus:  gate.Enabled(bindingConditions) && gate.Enabled(deviceStatus),
			DeviceTaints:            gate.Enabled(deviceTaints),
			FractionalCapacityRange: gate.Enabled(fractionalCapacity),
			ListTypeAttributes:      gate.Enabled(listTypeAttributes),
			OptionalNodeOperations:  gate.Enabled(nodeOperations),
			PartitionableDevices:    gate.Enabled(partitionable),
			PrioritizedList:         gate.Enabled(prioritizedList),
		},
	}, nil
}

// Note returns a sentence for people if the version is not known, and otherwise "".
func (f Features) Note() string {
	if f.Unknown == "" {
		return ""
	}
	return fmt.Sprintf("Kubernetes %s is newer than this program, which does not know what changed: "+
		"the answer is what the scheduler of %s gives", f.Unknown, f.Kubernetes)
}

// ListsNote returns a sentence for people if slices have attributes with several values, and nobody
// said whether the scheduler compares these, or it compares them otherwise. Otherwise it returns "".
func (f Features) ListsNote(all []*resourceapi.ResourceSlice) string {
	if !f.listsUnsaid && !f.oldLists || !slices.ContainsFunc(all, hasList) {
		return ""
	}
	if f.oldLists {
		return fmt.Sprintf("ResourceSlices have attributes with several values, which the answer "+
			"compares as Kubernetes %s does: the scheduler of %s refuses some claims that match by "+
			"them, although they can be satisfied", NewestKubernetes, f.Kubernetes)
	}
	return fmt.Sprintf("ResourceSlices have attributes with several values, which the answer takes for "+
		"equal to nothing: if the scheduler has the feature gate, add --feature-gates %s=true",
		listTypeAttributes)
}

func hasList(s *resourceapi.ResourceSlice) bool {
	return slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool {
		for _, a := range d.Attributes {
			if isList(a) {
				return true
			}
		}
		return false
	})
}

// GateNames returns the feature gates that [NewFeatures] knows, sorted.
func GateNames() []string {
	var names []string
	for name := range gates() {
		names = append(names, string(name))
	}
	slices.Sort(names)
	return names
}
