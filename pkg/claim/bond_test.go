// SPDX-License-Identifier: Apache-2.0

package claim_test

import (
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const bondConfig = `"bond": {"name": "bond0", "mode": "active-backup"}, "addresses": ["10.1.0.5/24"]`

// bonded returns the two devices of a claim.
func bonded(t *testing.T, options ...claimtest.Option) []claim.Device {
	t.Helper()
	devices, err := claim.Devices(claimtest.Allocated("net", append([]claimtest.Option{
		claimtest.Result("left", testPool, "0000-3b-00-2"),
		claimtest.Result("right", testPool, "0000-3b-00-3"),
	}, options...)...))
	must.Succeed(t, err)
	return devices
}

// TestBond checks that two requests have one bond, and that single settings of the bond are merged.
func TestBond(t *testing.T) {
	devices := bonded(t, claimtest.FromClass(`"bond": {"mode": "balance-xor", "miimon": 50}`),
		claimtest.FromClaim(bondConfig),
		claimtest.FromClaim(`"interfaceName": "a", "bond": {"primary": true}`, "left"))
	want := function.Bond{Name: "bond0", Mode: "active-backup", MIIMon: 50}
	for n, d := range devices {
		must.Succeed(t, d.ConfigErr)
		want.Primary = n == 0
		if *d.Interface.Bond != want || len(d.Interface.Addresses) != 1 {
			t.Errorf("%s: bond %+v of %+v, want %+v", d.Request, d.Interface.Bond, d.Interface, want)
		}
	}

	alone := bonded(t, claimtest.FromClaim(bondConfig))[0].Interface.Bond
	if alone.MIIMon != 100 {
		t.Errorf("miimon %d, want the default 100", alone.MIIMon)
	}
}

// TestBondsThatDiffer checks that the second of two devices is refused if it asks for something else
// of the same bond.
func TestBondsThatDiffer(t *testing.T) {
	const another = "request left has a bond of this name with another configuration"
	for fields, want := range map[string]string{
		`"mtu": 1400`: another, `"bond": {"miimon": 50}`: another, `"addresses": ["10.1.0.6/24"]`: another,
		`"bond": {"name": "bond1"}`: "", `"interfaceName": "b"`: "", `"mac": "02:00:00:00:00:01"`: "",
		`"vf": {"trust": true}`:                              "",
		`"routes": [{"to": "10.2.0.0/16"}]`:                  another,
		`"vrf": {"name": "red", "table": 5}`:                 another,
		`"sysctls": {"net.ipv4.conf.IFNAME.rp_filter": "1"}`: another,
		`"allMulticast": true`:                               another,
	} {
		devices := bonded(t, claimtest.FromClaim(bondConfig), claimtest.FromClaim(fields, "right"))
		must.Succeed(t, devices[0].ConfigErr)
		err := devices[1].ConfigErr
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %v, want %q", fields, err, want)
		}
	}

	devices := bonded(t, claimtest.FromClaim(`"bond": {"primary": true}`), claimtest.FromClaim(bondConfig))
	const primary = "bond.primary: another Function of the bond has it too"
	if err := devices[1].ConfigErr; err == nil || !strings.Contains(err.Error(), primary) {
		t.Errorf("error %v, want %q", err, primary)
	}
}

// TestBondWithNetwork checks that the ports of a bond in a network keep their own MAC addresses, and
// join the same network, whoever names it.
func TestBondWithNetwork(t *testing.T) {
	const mode = "bond.mode 802.3ad: must be active-backup for a Function that joins a network (blue)"
	for fields, want := range map[string]string{
		`"bond": {"name": "b", "mode": "802.3ad"}, "network": "blue"`:                    mode,
		`"bond": {"name": "b", "mode": "active-backup"}, "network": "blue"`:              "",
		`"bond": {"name": "b", "mode": "active-backup"}, "networks": [{"name": "blue"}]`: "bond: must be absent",
	} {
		for _, d := range bonded(t, claimtest.FromClaim(fields)) {
			if want == "" {
				must.Succeed(t, d.ConfigErr)
			} else if d.ConfigErr == nil || !strings.Contains(d.ConfigErr.Error(), want) {
				t.Errorf("%s: error %v, want %q", fields, d.ConfigErr, want)
			}
		}
	}

	lacp := bonded(t, claimtest.FromClaim(`"bond": {"name": "b", "mode": "802.3ad"}`))[0]
	none, red := v1alpha1.DevicePoolSpec{}, v1alpha1.DevicePoolSpec{Network: "red"}
	must.Succeed(t, lacp.CheckBond(none))
	if err := lacp.CheckBond(red); err == nil || !strings.Contains(err.Error(), "joins a network (red)") {
		t.Errorf("error %v of a pool with a network", err)
	}
	must.Succeed(t, bonded(t)[0].CheckBond(red))

	devices := bonded(t, claimtest.FromClaim(bondConfig))
	others := devices[0].BondPorts(devices)
	if len(others) != 1 || others[0].Request != "right" {
		t.Fatalf("other ports of the bond: %+v", others)
	}
	must.Succeed(t, devices[0].CheckBondPort(red, others[0], red))
	err := devices[0].CheckBondPort(red, others[0], none)
	const differ = "request left joins network red, and request right joins no network"
	if err == nil || !strings.Contains(err.Error(), differ) {
		t.Errorf("error %v, want %q", err, differ)
	}
	if plain := bonded(t); len(plain[0].BondPorts(plain)) != 0 {
		t.Error("Functions without a bond are ports of one")
	}
}
