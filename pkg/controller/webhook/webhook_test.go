// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionv1 "k8s.io/api/admission/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// parameters returns a configuration for a driver; fields is JSON without braces.
func parameters(driver, fields string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: driver,
		Parameters: runtime.RawExtension{Raw: fmt.Appendf(nil,
			`{"apiVersion":%q,"kind":"InterfaceConfig",%s}`, v1alpha1.SchemeGroupVersion, fields)},
	}}
}

func newClaim(name string, configs ...resourceapi.DeviceConfiguration) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "fast"}},
	}
	for _, config := range configs {
		c.Spec.Devices.Config = append(c.Spec.Devices.Config,
			resourceapi.DeviceClaimConfiguration{DeviceConfiguration: config})
	}
	return c
}

func newTemplate(
	name string, configs ...resourceapi.DeviceConfiguration,
) *resourceapi.ResourceClaimTemplate {
	return &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: resourceapi.ResourceClaimTemplateSpec{
			Spec: newClaim(name, configs...).Spec,
		},
	}
}

func newClass(name string, configs ...resourceapi.DeviceConfiguration) *resourceapi.DeviceClass {
	c := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, config := range configs {
		c.Spec.Config = append(c.Spec.Config,
			resourceapi.DeviceClassConfiguration{DeviceConfiguration: config})
	}
	return c
}

// request returns the request for a review of an object of resource.k8s.io/v1. old is nil for a
// creation.
func request(t testing.TB, resource string, object, old any) admission.Request {
	t.Helper()
	raw := func(o any) runtime.RawExtension {
		text, err := json.Marshal(o)
		must.Succeed(t, err)
		return runtime.RawExtension{Raw: text}
	}

	r := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		UID: "review", Operation: admissionv1.Create, Object: raw(object),
		Resource: metav1.GroupVersionResource{
			Group: "resource.k8s.io", Version: "v1", Resource: resource,
		},
	}}
	if old != nil {
		r.Operation, r.OldObject = admissionv1.Update, raw(old)
	}

	return r
}

func TestHandle(t *testing.T) {
	good, bad := parameters(v1alpha1.GroupName, `"mtu":1400`), parameters(v1alpha1.GroupName, `"mtu":9`)
	others := parameters("gpu.example.com", `"mtu":9`)
	const wrong = ".config[0].opaque.parameters.mtu 9: must be 68-9216"
	leaving := newClass("a", bad)
	leaving.DeletionTimestamp, leaving.Finalizers = new(metav1.Now()), []string{"example.com/wait"}
	labelled := newClass("a", bad)
	labelled.Labels = map[string]string{"a": "b"}
	beta := request(t, "resourceclaims", newClaim("a", bad), nil)
	beta.Resource.Version = "v1beta1"
	status := request(t, "resourceclaims", newClaim("a", bad), nil)
	status.SubResource = "status"
	deletion := request(t, "deviceclasses", newClass("a", bad), nil)
	deletion.Operation = admissionv1.Delete
	watches, alternatives := newClaim("a", bad), newClaim("a", bad)
	watches.Spec.Devices.Requests[0].Exactly.AdminAccess = new(true)
	alternatives.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "nic", FirstAvailable: []resourceapi.DeviceSubRequest{{Name: "a"}}},
	}
	alternatives.Spec.Devices.Config[0].Requests = []string{"nic/a"}
	long := newClaim("a", parameters(v1alpha1.GroupName,
		`"mac":"`+strings.Repeat("0", resourceapi.OpaqueParametersMaxLength)+`"`))
	broken := request(t, "resourceclaims", []int{1}, nil)

	for name, test := range map[string]struct {
		request admission.Request
		refusal string // "" if the object is allowed
		result  string
	}{
		"claim":           {request(t, "resourceclaims", newClaim("a", good), nil), "", allowed},
		"wrong claim":     {request(t, "resourceclaims", newClaim("a", bad), nil), "spec.devices" + wrong, refused},
		"wrong template":  {request(t, "resourceclaimtemplates", newTemplate("a", bad), nil), "spec.spec.devices" + wrong, refused},
		"wrong class":     {request(t, "deviceclasses", newClass("a", bad), nil), "spec" + wrong, refused},
		"admin access":    {request(t, "resourceclaims", watches, nil), "", allowed},
		"alternatives":    {request(t, "resourceclaims", alternatives, nil), "spec.devices" + wrong, refused},
		"too long":        {request(t, "resourceclaims", long, nil), "", unknown},
		"another driver":  {request(t, "resourceclaims", newClaim("a", others), nil), "", allowed},
		"no parameters":   {request(t, "deviceclasses", newClass("a"), nil), "", allowed},
		"changed class":   {request(t, "deviceclasses", newClass("a", bad), newClass("a", good)), "spec" + wrong, refused},
		"unchanged class": {request(t, "deviceclasses", labelled, newClass("a", bad)), "", allowed},
		"mended class":    {request(t, "deviceclasses", newClass("a", good), newClass("a", bad)), "", allowed},
		"leaving class":   {request(t, "deviceclasses", leaving, newClass("a", good)), "", allowed},
		"deletion":        {deletion, "", allowed},
		"another version": {beta, "", unknown},
		"a status":        {status, "", unknown},
		"another kind":    {request(t, "pods", newClaim("a", bad), nil), "", unknown},
		"broken":          {broken, "", unknown},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReviewer(prometheus.NewRegistry())
			answer := r.Handle(t.Context(), test.request)
			if answer.Allowed != (test.refusal == "") {
				t.Fatalf("answer %+v", answer)
			}
			if !answer.Allowed && (answer.Result.Message != test.refusal || answer.Result.Code != 422) {
				t.Errorf("refused with %+v, want %q", answer.Result, test.refusal)
			}

			resource := known(test.request.Resource.Resource)
			if got := testutil.ToFloat64(r.reviews.WithLabelValues(resource, test.result)); got != 1 {
				t.Errorf("%v reviews of %s with result %s", got, resource, test.result)
			}
		})
	}
}

// TestMessageIsBounded checks that an object cannot make the answer long.
func TestMessageIsBounded(t *testing.T) {
	fields := `"addresses":["` + strings.Repeat("x", 4000) + strings.Repeat(`","x`, 900) + `"]`
	answer := newReviewer(prometheus.NewRegistry()).Handle(t.Context(), request(t, "resourceclaims",
		newClaim("a", parameters(v1alpha1.GroupName, fields)), nil))
	if answer.Allowed || len(answer.Result.Message) > (maxLines+1)*(maxLine+10) ||
		!strings.HasSuffix(answer.Result.Message, "\nand more") {
		t.Errorf("answer of %d bytes: %.2000s", len(answer.Result.Message), answer.Result.Message)
	}
}
