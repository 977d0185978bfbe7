// SPDX-License-Identifier: Apache-2.0

package prototypes_test

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/claim/conversion"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/prototypes"
)

// FuzzConvert: whatever YAML it is given, Convert does not panic, and what it prints is YAML.
func FuzzConvert(f *testing.F) {
	f.Add("apiVersion: devmgmtproto.k8s.io/v1alpha1\nkind: DeviceClaim\nspec: {devices: " +
		"[{name: a, oneOf: [{class: c, requests: {devices: 2}}]}]}")
	f.Add("apiVersion: resource.k8s.io/v1alpha2\nkind: ResourceClaimTemplate\n" +
		"spec: {spec: {requests: [{requirements: [{deviceSelector: device.driverName}]}]}}")
	f.Add("kind: Pod\nspec: {deviceClaims: {devices: [{class: c}]}, containers: [{devices: [{}]}]}")
	f.Add("apiVersion: devmgmtproto.k8s.io/v1alpha1\nkind: DevicePool\n" +
		"spec: {sharedResources: {a: 1}, devices: [{attributes: [{name: b, quantityValue: 1}]}]}")

	f.Fuzz(func(t *testing.T, text string) {
		documents, _, err := prototypes.Convert([]byte(text))
		if err != nil {
			return
		}
		for _, document := range documents {
			if _, err := conversion.Objects([]byte(document)); err != nil {
				t.Errorf("%v in %s", err, document)
			}
		}
	})
}
