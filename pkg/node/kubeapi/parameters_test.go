// SPDX-License-Identifier: Apache-2.0

package kubeapi_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// withParameters returns a claim with configurations for this driver. fields is JSON without braces.
func withParameters(name string, fields ...string) *resourceapi.ResourceClaim {
	c := claimFor("default", name)
	for _, of := range fields {
		if of != "" {
			of = ", " + of
		}
		c.Spec.Devices.Config = append(c.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{
			DeviceConfiguration: parametersFor(v1alpha1.GroupName, fmt.Sprintf(
				`{"apiVersion": %q, "kind": "InterfaceConfig"%s}`, v1alpha1.SchemeGroupVersion, of)),
		})
	}
	return c
}

func parametersFor(driver, text string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(text)},
	}}
}

// enforced waits until the policy for parameters is enforced.
func enforced(t *testing.T, admin client.Client) {
	t.Helper()
	must.Eventually(t, "parameters are judged", func() bool {
		return kubeapitest.DeniedByPolicy(admin.Create(t.Context(),
			withParameters("early", `"nonsense": 1`), client.DryRunAll))
	})
}

// TestParametersPolicy checks what the policy refuses and how it says it. It must not refuse what
// the driver takes.
func TestParametersPolicy(t *testing.T) {
	cluster := bare(t)
	admin := newClient(t, cluster.Admin())
	enforced(t, admin)

	for fields, want := range map[string]string{
		``: "", `"mtu": 1400`: "", `"mtu": null`: "", `"network": "blue", "interfaceName": ""`: "",
		`"interfaceName": "sixteen-bytes-xx"`: ".interfaceName: must be a text of at most 15 bytes",
		`"mtuu": 1`:                           `: unknown field "mtuu"; fields are addresses, `,
		`"MTU": 1400`:                         `: unknown field "MTU"`,
		`"mtu": 9`:                            ".mtu: must be 68-9216",
		`"mtu": "1400"`:                       ".mtu: must be 68-9216",
		`"mtu": 1400.5`:                       ".mtu: must be 68-9216",
		`"mtu": 99999999999`:                  ".mtu: must be 68-9216",
		`"allMulticast": "on"`:                ".allMulticast: must be true or false",
		`"addresses": "10.0.0.1/24"`:          ".addresses: must be a list of at most 16, where each entry must be a text",
		`"addresses": ["10.0.0.1/24"]`:        "",
		`"driver": "igb_uio"`:                 ".driver: must be vfio-pci",
		`"driver": "vfio-pci"`:                "",
		`"vf": {"vlan": 5, "qos": 7, "trust": true, "linkState": "auto"}`: "",
		`"vf": {"vlam": 5, "qos": 9}`:                                     `: unknown field "vf.vlam"; fields are linkState, maxTxRate, minTxRate, nodeGUID, portGUID, qos, spoofCheck, trust, vlan, vlanProtocol; at.vf.qos: must be 0-7`,
		`"mtu": 9, "vf": {"vlan": 5000, "qos": 9, "trust": 1, "minTxRate": -1, "linkState": null}`: ".mtu: must be 68-9216; " +
			"at.vf.vlan: must be 0-4094; at.vf.qos: must be 0-7; at.vf.trust: must be true or false; and 1 more",
		`"vf": 5`:                   ".vf: must have fields",
		`"vf": {"linkState": "up"}`: ".vf.linkState: must be auto or disable or enable",
		`"vf": {"nodeGUID": "00:11:22:33:44:55:66:77", "portGUID": ""}`:                                          "",
		`"vf": {"portGUID": "0011223344556677"}`:                                                                 ".vf.portGUID: must be 8 bytes such as 00:11:22:33:44:55:66:77",
		`"ethtool": {"rings": {"rx": 4096}, "features": {"rx-gro": false}, "pause": {"rx": true}}`:               "",
		`"ethtool": {"rings": {"rx": "4096"}}`:                                                                   ".ethtool.rings: must be names with values, where each value must be 0-2147483647",
		`"ethtool": {"ring": {"rx": 4096}}`:                                                                      `: unknown field "ethtool.ring"`,
		`"ethtool": {"rss": {"weights": [3, 1], "hashKey": "6d:5a", "hashFunction": "xor"}}`:                     "",
		`"ethtool": {"rss": {"weights": [70000]}}`:                                                               ".ethtool.rss: must have only equal, weights, hashKey, hashFunction",
		`"ethtool": {"rss": {"weight": [1]}}`:                                                                    ".ethtool.rss: must have only equal, weights, hashKey, hashFunction",
		`"ethtool": {"fec": ["rs"]}`:                                                                             `: unknown field "ethtool.fec"`,
		`"sysctls": {"net.ipv4.conf.IFNAME.arp_ignore": "1"}`:                                                    "",
		`"sysctls": {"net.ipv4.conf.all.arp_ignore": "1"}`:                                                       ".sysctls: must have names of the list in the documentation",
		`"sysctls": {"net.ipv4.conf.IFNAME.arp_ignore": 1}`:                                                      ".sysctls: must have names of the list in the documentation",
		`"routes": [{"to": "10.2.0.0/16", "via": "10.1.0.1", "table": 7, "onLink": true, "scope": "link"}]`:      "",
		`"routes": [{"to": "10.2.0.0/16", "gateway": "10.1.0.1"}]`:                                               ".routes: must be a list, where each entry must have only to, via, metric",
		`"rules": [{"priority": 5, "table": 7, "incoming": true}]`:                                               "",
		`"rules": [{"priority": 0, "table": 7, "incoming": true}]`:                                               ".rules: must be a list of at most 64, where each entry must have only priority",
		`"neighbors": [{"address": "10.0.0.1", "mac": "02:00:00:00:00:01"}], "vrf": {"name": "red", "table": 5}`: "",
		`"networks": [{"name": "a", "addresses": ["10.0.0.1/24"], "interfaceName": "a0"}]`:                       "",
		`"networks": [{"name": "a", "vlan": 5}]`:                                                                 ".networks: must be a list of at most 64, where each entry must have only name",
		`"bond": {"name": "bond0", "mode": "802.3ad", "lacpRate": "fast", "miimon": 50}, "vrf": null`:            "",
		`"bond": {"primary": true}`:                                                                              "", `"bond": {"mode": "lacp"}`: ".bond.mode: must be balance-rr or active-backup or",
		`"offload": {"gsoMaxSize": 0}`: ".offload.gsoMaxSize: must be 1-524280",
	} {
		c := withParameters("a", fields)
		err := admin.Create(t.Context(), c, client.DryRunAll)
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", fields, err)
		case want == "" && claim.ValidateClaim("spec.devices", &c.Spec.Devices) != nil:
			t.Errorf("%s: the test takes it for right", fields)
		case want == "":
		default:
			const at = "spec.devices.config[0].opaque.parameters"
			message := at + strings.ReplaceAll(want, "; at.", "; "+at+".")
			if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), message) {
				t.Errorf("%s: error %v, want %q", fields, err, message)
			}
			if claim.ValidateClaim("spec.devices", &c.Spec.Devices) == nil {
				t.Errorf("%s: the driver would take it", fields)
			}
		}
	}

	policy := &admissionregistrationv1.ValidatingAdmissionPolicy{}
	must.Succeed(t, admin.Get(t.Context(), client.ObjectKey{Name: "xpu-parameters"}, policy))
	if checking := policy.Status.TypeChecking; checking != nil && len(checking.ExpressionWarnings) > 0 {
		t.Errorf("the API server warns of the policy: %v", checking.ExpressionWarnings)
	}
}

// TestParametersOfKinds checks each kind that has parameters, with configurations of several
// drivers.
func TestParametersOfKinds(t *testing.T) {
	cluster.Need(t)
	admin := newClient(t, cluster.Admin())
	enforced(t, admin)

	others := parametersFor("gpu.example.com", `{"kind": "InterfaceConfig", "mtuu": 1}`)
	good := withParameters("a", `"mtu": 1400`).Spec.Devices.Config[0].DeviceConfiguration
	bad := withParameters("a", `"mtu": 9`).Spec.Devices.Config[0].DeviceConfiguration
	otherKind := parametersFor(v1alpha1.GroupName, `{"apiVersion": "v1", "kind": "InterfaceConfig"}`)
	objects := func(name string, configs ...resourceapi.DeviceConfiguration) []client.Object {
		c := claimFor("default", name)
		class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
		for _, config := range configs {
			c.Spec.Devices.Config = append(c.Spec.Devices.Config,
				resourceapi.DeviceClaimConfiguration{DeviceConfiguration: config})
			class.Spec.Config = append(class.Spec.Config,
				resourceapi.DeviceClassConfiguration{DeviceConfiguration: config})
		}
		return []client.Object{c, class, &resourceapi.ResourceClaimTemplate{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: c.Spec},
		}}
	}

	paths := []string{"spec.devices.", "spec.", "spec.spec.devices."}
	for i, object := range objects("bad", others, good, bad) {
		want := "request: " + paths[i] + "config[2].opaque.parameters.mtu: must be 68-9216"
		err := admin.Create(t.Context(), object)
		if !apierrors.IsInvalid(err) || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	for i, object := range objects("kind", otherKind) {
		want := paths[i] + "config[0].opaque.parameters: apiVersion and kind: must be " +
			"xpu.opiproject.org/v1alpha1 and InterfaceConfig"
		if err := admin.Create(t.Context(), object); !apierrors.IsInvalid(err) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	for _, object := range append(objects("others", others), objects("good", others, good)...) {
		must.Succeed(t, admin.Create(t.Context(), object))
		t.Cleanup(func() { must.Succeed(t, admin.Delete(context.WithoutCancel(t.Context()), object)) })
		object.SetLabels(map[string]string{"a": "b"})
		must.Succeed(t, admin.Update(t.Context(), object))
	}

	class := objects("good", good)[1].(*resourceapi.DeviceClass)
	must.Succeed(t, admin.Get(t.Context(), client.ObjectKeyFromObject(class), class))
	class.Spec.Config[1].DeviceConfiguration = bad
	if err := admin.Update(t.Context(), class); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("a class gets wrong parameters: error %v, want the policy's", err)
	}
}

// TestParametersFromBefore checks that objects with wrong parameters from before the policy can be
// changed, mended and deleted.
func TestParametersFromBefore(t *testing.T) {
	cluster.Need(t)
	admin := newClient(t, cluster.Admin())
	enforced(t, admin)
	binding := &admissionregistrationv1.ValidatingAdmissionPolicyBinding{}
	must.Succeed(t, admin.Get(t.Context(), client.ObjectKey{Name: "xpu-parameters"}, binding))
	must.Succeed(t, admin.Delete(t.Context(), binding))

	old := withParameters("old", `"mtu": 9`)
	old.Finalizers = []string{"example.com/wait"}
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{
		Name: "old", Finalizers: []string{"example.com/wait"},
	}}
	class.Spec.Config = []resourceapi.DeviceClassConfiguration{
		{DeviceConfiguration: old.Spec.Devices.Config[0].DeviceConfiguration},
	}
	must.EventuallySucceed(t, "the policy is away", func() error {
		return admin.Create(t.Context(), old.DeepCopy(), client.DryRunAll)
	})
	must.Succeed(t, admin.Create(t.Context(), old))
	must.Succeed(t, admin.Create(t.Context(), class))
	binding.ResourceVersion, binding.UID = "", ""
	must.Succeed(t, admin.Create(t.Context(), binding))
	enforced(t, admin)

	class.Spec.ExtendedResourceName = new("example.com/old")
	must.Succeed(t, admin.Update(t.Context(), class))
	class.Spec.Selectors = []resourceapi.DeviceSelector{
		{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "xpu.opiproject.org"`}},
	}
	must.Succeed(t, admin.Update(t.Context(), class))
	more := class.DeepCopy()
	more.Spec.Config = append(more.Spec.Config, more.Spec.Config[0])
	if err := admin.Update(t.Context(), more); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("a class gets wrong parameters once more: error %v, want the policy's", err)
	}

	for _, object := range []client.Object{old, class} {
		object.SetLabels(map[string]string{"a": "b"})
		must.Succeed(t, admin.Update(t.Context(), object))
		must.Succeed(t, admin.Delete(t.Context(), object))
		must.Succeed(t, admin.Get(t.Context(), client.ObjectKeyFromObject(object), object))
		object.SetFinalizers(nil)
		must.Succeed(t, admin.Update(t.Context(), object))
	}
}

// TestParametersCost checks that the largest parameters that the API server takes are still judged:
// what costs more than the API server allows would pass.
func TestParametersCost(t *testing.T) {
	cluster.Need(t)
	admin := newClient(t, cluster.Admin())
	enforced(t, admin)

	full := func(list, entry string) string {
		n := (resourceapi.OpaqueParametersMaxLength - 200) / (len(entry) + 1)
		return fmt.Sprintf(`"mtu": 9, %q: [%s]`, list, strings.Repeat(entry+",", n-1)+entry)
	}
	names := &strings.Builder{}
	for i := range 600 {
		fmt.Fprintf(names, `, "n%d": 1`, i)
	}

	for name, fields := range map[string]string{
		"addresses": full("addresses", `"10.0.0.1/24"`),
		"routes":    full("routes", `{"to":"10.2.0.0/16"}`),
		"neighbors": full("neighbors", `{"address":"10.0.0.1","mac":"02:00:00:00:00:01"}`),
		"rules":     full("rules", `{"priority":5,"table":5}`),
		"networks":  full("networks", `{"name":"a","addresses":["10.0.0.1/24"]}`),
		"channels":  `"mtu": 9, "ethtool": {"channels": {"x": 1` + names.String() + `}}`,
		"weights":   `"mtu": 9, "ethtool": {"rss": {"weights": [1` + strings.Repeat(", 0", 3000) + `]}}`,
		"unknown":   `"mtu": 9` + names.String(),
	} {
		t.Run(name, func(t *testing.T) {
			all := make([]string, resourceapi.DeviceConfigMaxSize)
			for i := range all {
				all[i] = fields
			}
			err := admin.Create(t.Context(), withParameters("large", all...), client.DryRunAll)
			if !kubeapitest.DeniedByPolicy(err) {
				t.Errorf("%d configurations of %d bytes: error %v, want the policy's", len(all),
					len(fields), err)
			}
		})
	}
}
