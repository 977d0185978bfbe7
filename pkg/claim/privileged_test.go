// SPDX-License-Identifier: Apache-2.0

package claim_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
)

// TestPrivileged checks that a claim may set what its DevicePool allows, and a class everything.
func TestPrivileged(t *testing.T) {
	for field, value := range map[v1alpha1.PrivilegedField]string{
		v1alpha1.FieldMAC:       `"mac": "02:00:00:00:00:01"`,
		v1alpha1.FieldAddresses: `"addresses": ["10.1.0.5/24"]`,
		v1alpha1.FieldDriver:    `"driver": "vfio-pci"`, v1alpha1.FieldVLAN: `"vf": {"vlan": 0}`,
		v1alpha1.FieldQoS:        `"vf": {"qos": 0}`,
		v1alpha1.FieldTrust:      `"vf": {"trust": false}`,
		v1alpha1.FieldSpoofCheck: `"vf": {"spoofCheck": true}`,
		v1alpha1.FieldMinTxRate:  `"vf": {"minTxRate": 0}`,
		v1alpha1.FieldMaxTxRate:  `"vf": {"maxTxRate": 1}`,
		v1alpha1.FieldLinkState:  `"vf": {"linkState": "auto"}`,
		v1alpha1.FieldNodeGUID:   `"vf": {"nodeGUID": "00:11:22:33:44:55:66:77"}`,
		v1alpha1.FieldPortGUID:   `"vf": {"portGUID": "00:11:22:33:44:55:66:77"}`,

		v1alpha1.FieldPrivateFlags: `"ethtool": {"privateFlags": {"x": false}}`,
		v1alpha1.FieldChannels:     `"ethtool": {"channels": {"rx": 1}}`,
		v1alpha1.FieldRings:        `"ethtool": {"rings": {"rx": 1}}`,
		v1alpha1.FieldPause:        `"ethtool": {"pause": {"rx": true}}`,
	} {
		others := slices.DeleteFunc(v1alpha1.PrivilegedFields(),
			func(f v1alpha1.PrivilegedField) bool { return f == field })
		for _, test := range []struct {
			name   string
			config claimtest.Option
			allow  []v1alpha1.PrivilegedField
			wrong  string
		}{
			{name: "a class", config: claimtest.FromClass(value)},
			{name: "an allowed claim", config: claimtest.FromClaim(value),
				allow: []v1alpha1.PrivilegedField{field}},
			{name: "a claim", config: claimtest.FromClaim(value), allow: others,
				wrong: string(field) + ": Forbidden: DevicePool fast"},
		} {
			devices, err := claim.Devices(claimtest.Allocated("net",
				claimtest.Result("blue", testPool, "0000-3b-00-2"), test.config))
			if err != nil {
				t.Fatal(err)
			}

			err = devices[0].Allowed(v1alpha1.DevicePoolSpec{Network: "lab", Allow: test.allow})
			if (err == nil) != (test.wrong == "") ||
				err != nil && !strings.Contains(err.Error(), test.wrong) {
				t.Errorf("%s sets %s: error %v, want %q", test.name, field, err, test.wrong)
			}
		}
	}
}

// TestUnprivileged covers fields that a pod may always set, and addresses of an interface that
// joins no network.
func TestUnprivileged(t *testing.T) {
	devices, err := claim.Devices(claimtest.Allocated("net",
		claimtest.Result("blue", testPool, "0000-3b-00-2"), claimtest.FromClaim(
			`"interfaceName": "a", "mtu": 1400, "routes": [{"to": "10.2.0.0/16"}], "allMulticast": true,
				"ethtool": {"features": {"rx-gro": false}}, "addresses": ["10.1.0.5/24"]`)))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]v1alpha1.PrivilegedField{v1alpha1.FieldAddresses},
		devices[0].Privileged); diff != "" {
		t.Errorf("privileged (-want +got):\n%s", diff)
	}
	if err := devices[0].Allowed(v1alpha1.DevicePoolSpec{}); err != nil {
		t.Error(err)
	}
}
