// SPDX-License-Identifier: Apache-2.0

package claim_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
)

const (
	nic = "nic" // name of a request
	at  = "spec.devices.config[0].opaque.parameters."
)

// written returns the claim as its author wrote it, with the configurations of the options and with
// requests for these names; "a|b" is a prioritized list a of one subrequest b.
func written(requests []string, options ...claimtest.Option) *resourceapi.DeviceClaim {
	var c resourceapi.DeviceClaim
	for _, name := range requests {
		request := resourceapi.DeviceRequest{Name: name}
		if list, sub, isList := strings.Cut(name, "|"); isList {
			request.Name = list
			request.FirstAvailable = []resourceapi.DeviceSubRequest{{Name: sub}}
		} else {
			request.Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: "fast"}
		}
		c.Requests = append(c.Requests, request)
	}

	for _, config := range claimtest.Allocated("net", options...).Status.Allocation.Devices.Config {
		c.Config = append(c.Config, resourceapi.DeviceClaimConfiguration{
			Requests: config.Requests, DeviceConfiguration: config.DeviceConfiguration,
		})
	}

	return &c
}

func linesOf(err error) []string {
	if err == nil {
		return nil
	}
	return strings.Split(err.Error(), "\n")
}

func TestValidateClaim(t *testing.T) {
	ofOther := func(c *resourceapi.ResourceClaim) {
		claimtest.FromClaim(`"mtu": 9`)(c)
		configs := c.Status.Allocation.Devices.Config
		configs[len(configs)-1].Opaque.Driver = "gpu.example.com"
	}
	for name, test := range map[string]struct {
		requests []string
		options  []claimtest.Option
		want     []string
	}{
		"no parameters": {},
		"right":         {options: []claimtest.Option{claimtest.FromClaim(`"mtu": 1400`)}},
		"misspelt": {
			options: []claimtest.Option{claimtest.FromClaim(`"mtuu": 1400`)},
			want: []string{"spec.devices.config[0].opaque.parameters: strict decoding error: " +
				`unknown field "mtuu"`},
		},
		"another kind": {
			options: []claimtest.Option{
				claimtest.Config("", `{"apiVersion": "xpu.opiproject.org/v1", "kind": "Interface"}`),
			},
			want: []string{`spec.devices.config[0].opaque.parameters: apiVersion ` +
				`"xpu.opiproject.org/v1" and kind "Interface": must be ` +
				`"xpu.opiproject.org/v1alpha1" and "InterfaceConfig"`},
		},
		"several values": {
			options: []claimtest.Option{
				claimtest.FromClaim(`"mtu": 9, "ethtool": {"rings": {"rx": -1}}`),
			},
			want: []string{at + "mtu 9: must be 68-9216"},
		},
		"a value of the driver": {
			options: []claimtest.Option{claimtest.FromClaim(`"ethtool": {"rings": {"rx": -1}}`)},
			want:    []string{at + `ethtool.rings: "rx" is "-1": must be a number`},
		},
		"the parameters of another driver": {options: []claimtest.Option{ofOther}},
		"the index counts other drivers": {
			options: []claimtest.Option{ofOther, claimtest.FromClaim(`"mtu": 9`)},
			want:    []string{"spec.devices.config[1].opaque.parameters.mtu 9: must be 68-9216"},
		},
		"bonds whose rest a class gives": {
			options: []claimtest.Option{claimtest.FromClaim(`"bond": {"primary": true}`),
				claimtest.FromClaim(`"bond": {"lacpRate": "fast"}`, "other"),
				claimtest.FromClaim(`"bond": {"name": "net1"}`, "other")},
			requests: []string{nic, "other"},
			want: []string{
				"spec.devices.config[0][1][2] together: bond.primary: must be absent with mode 802.3ad; " +
					"only active-backup, balance-tlb, balance-alb has it",
			},
		},
		"a bond with neighbors": {options: []claimtest.Option{claimtest.FromClaim(
			`"bond": {"primary": true}, "neighbors": [{"address": "10.1.0.1", "mac": "02:00:00:00:00:01"}]`,
		)}},
		"a bond in a network": {
			options: []claimtest.Option{claimtest.FromClaim(
				`"bond": {"name": "bond0", "mode": "802.3ad"}, "network": "blue"`)},
			want: []string{at + `bond.mode 802.3ad: must be active-backup for a Function that joins a ` +
				`network (blue), because the xPU lets each Function send from its own MAC address ` +
				`only; or use a DevicePool without network`},
		},
		"two requests, one wrong": {
			requests: []string{"left", "right"},
			options: []claimtest.Option{
				claimtest.FromClaim(`"mtu": 1400`, "left"), claimtest.FromClaim(`"mtu": 9`, "right"),
			},
			want: []string{"spec.devices.config[1].opaque.parameters.mtu 9: must be 68-9216"},
		},
		"two requests with one configuration": {
			requests: []string{"left", "right"},
			options:  []claimtest.Option{claimtest.FromClaim(`"mtu": 9`)},
			want:     []string{at + "mtu 9: must be 68-9216"},
		},
		"a subrequest": {
			requests: []string{"any|vf"},
			options:  []claimtest.Option{claimtest.FromClaim(`"mtu": 9`, "any/vf")},
			want:     []string{at + "mtu 9: must be 68-9216"},
		},
		"replaced by the next": {
			options: []claimtest.Option{
				claimtest.FromClaim(`"mtu": 9`), claimtest.FromClaim(`"mtu": 1400`),
			},
		},
		"wrong together": {
			options: []claimtest.Option{
				claimtest.FromClaim(`"vf": {"minTxRate": 100}`),
				claimtest.FromClaim(`"vf": {"maxTxRate": 10}`),
			},
			want: []string{"spec.devices.config[0][1] together: vf.minTxRate 100: must be at most " +
				"vf.maxTxRate 10"},
		},
		"a class may give the VLAN": {
			options: []claimtest.Option{
				claimtest.FromClaim(`"vf": {"qos": 3, "vlanProtocol": "802.1ad"}`),
			},
		},
		"no class can give the VLAN": {
			options: []claimtest.Option{claimtest.FromClaim(`"vf": {"qos": 3, "vlan": 0}`)},
			want:    []string{at + "vf.vlan: must be 1-4094 where qos or vlanProtocol is given"},
		},
		"a class may name the interface": {
			options: []claimtest.Option{
				claimtest.FromClaim(`"vrf": {"name": "net1", "table": 7}`),
			},
		},
		"privileged": {
			options: []claimtest.Option{claimtest.FromClaim(`"mac": "02:00:00:00:00:01"`)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if test.requests == nil {
				test.requests = []string{nic}
			}
			got := linesOf(claim.ValidateClaim("spec.devices", written(test.requests, test.options...)))
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// TestValidateAdminAccess checks that parameters are not judged which are not read.
func TestValidateAdminAccess(t *testing.T) {
	c := written([]string{nic}, claimtest.FromClaim(`"mtu": 9`))
	c.Requests[0].Exactly.AdminAccess = ptr.To(true)
	if err := claim.ValidateClaim("spec.devices", c); err != nil {
		t.Errorf("parameters of a request with admin access: %v", err)
	}
}

// TestValidateAsPrepared checks that a claim is refused when it is written only if it would be
// refused when it is prepared with a class that adds what may be missing, and with the same message.
func TestValidateAsPrepared(t *testing.T) {
	class := claimtest.FromClass(`"interfaceName": "data0", "vf": {"vlan": 5}`)
	for _, fields := range []string{
		`"mtu": 9`, `"mtu": "9"`, `"mac": "x"`, `"interfaceName": "eth0"`, `"driver": "igb_uio"`,
		`"vf": {"qos": 8}`, `"vf": {"qos": 2}`, `"vf": {"trust": "on"}`, `"rules": [{"table": 1}]`,
		`"vrf": {"name": "net1", "table": 1}`, `"vrf": {"name": "net1", "table": 253}`,
		`"networks": [{"name": "a"}], "network": "b"`, `"sysctls": {"a": "b"}`, `"nonsense": 1`,
		`"addresses": ["10.0.0.1"], "routes": [{"to": "x"}]`, `"offload": {"gsoMaxSize": 0}`,
		`"driver": "vfio-pci", "mtu": 1400`, `"neighbors": [{"address": "10.0.0.1"}]`,
	} {
		t.Run(fields, func(t *testing.T) {
			config := claimtest.FromClaim(fields)
			early := claim.ValidateClaim("spec.devices", written([]string{nic}, config))
			devices, err := claim.Devices(claimtest.Allocated("net",
				claimtest.Result(nic, testPool, "0000-3b-00-2"), class, config))
			if err != nil {
				t.Fatal(err)
			}

			late := devices[0].ConfigErr
			if late == nil && early != nil {
				t.Fatalf("would be prepared, and is refused: %v", early)
			}
			for _, line := range linesOf(early) {
				message := strings.TrimPrefix(strings.TrimPrefix(line, at), strings.TrimSuffix(at, ".")+": ")
				if !strings.Contains(late.Error(), message) {
					t.Errorf("says %q, and when it is prepared %v", message, late)
				}
			}
		})
	}
}

func TestValidateClass(t *testing.T) {
	parameters := func(fields string) *resourceapi.DeviceClassSpec {
		c := written(nil, claimtest.FromClaim(fields))
		return &resourceapi.DeviceClassSpec{Config: []resourceapi.DeviceClassConfiguration{
			{DeviceConfiguration: c.Config[0].DeviceConfiguration},
		}}
	}
	for fields, want := range map[string]string{
		`"vf": {"trust": true}`: "",
		`"vf": {"qos": 3}`:      "",
		`"mtu": 9`:              "spec.config[0].opaque.parameters.mtu 9: must be 68-9216",
		`"vf": {"vlam": 3}`: "spec.config[0].opaque.parameters: strict decoding error: " +
			`unknown field "vf.vlam"`,
	} {
		got := strings.Join(linesOf(claim.ValidateClass("spec", parameters(fields))), "\n")
		if got != want {
			t.Errorf("%s: %q, want %q", fields, got, want)
		}
	}
}

// TestValidateLargest checks that the largest claim that the API server takes costs little.
func TestValidateLargest(t *testing.T) {
	var options []claimtest.Option
	c := written(nil)
	for i := range resourceapi.DeviceRequestsMaxSize {
		request := resourceapi.DeviceRequest{Name: fmt.Sprint("r", i)}
		for j := range resourceapi.FirstAvailableDeviceRequestMaxSize {
			request.FirstAvailable = append(request.FirstAvailable,
				resourceapi.DeviceSubRequest{Name: fmt.Sprint("s", j)})
		}
		c.Requests = append(c.Requests, request)
	}

	for i := range resourceapi.DeviceConfigMaxSize {
		var requests []string
		for j := range 32 {
			requests = append(requests, fmt.Sprintf("r%d/s%d", (i+j)%32, (i*j)%8))
		}
		many := strings.Repeat(`"10.0.0.1/24",`, resourceapi.OpaqueParametersMaxLength/14-9)
		options = append(options, claimtest.FromClaim(`"addresses": [`+many+`"10.0.0.1/24"]`, requests...))
	}
	c.Config = written(nil, options...).Config

	allocations := testing.AllocsPerRun(1, func() {
		if err := claim.ValidateClaim("spec.devices", c); err == nil {
			t.Error("is right")
		}
	})
	if allocations > 1_000_000 {
		t.Errorf("%v allocations", allocations)
	}
}

// TestValidateManyErrors checks that the errors of the largest claims are few, because each error
// takes memory.
func TestValidateManyErrors(t *testing.T) {
	var options []claimtest.Option
	c := written(nil)
	many := strings.Repeat(`{},`, resourceapi.OpaqueParametersMaxLength/3-90)
	for i := range resourceapi.DeviceConfigMaxSize {
		name := fmt.Sprint("r", i)
		c.Requests = append(c.Requests, resourceapi.DeviceRequest{
			Name: name, Exactly: &resourceapi.ExactDeviceRequest{},
		})
		options = append(options, claimtest.FromClaim(`"neighbors": [`+many+`{}]`, name))
	}
	c.Config = written(nil, options...).Config

	if n := len(linesOf(claim.ValidateClaim("spec.devices", c))); n == 0 || n > 200 {
		t.Errorf("%d errors", n)
	}
}
