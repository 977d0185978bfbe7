// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const (
	deploy = "../../../deploy"
	taken  = `"interfaceName":"eth0"`
)

// configuration returns the configuration of deploy/webhook, for a server at the address.
func configuration(
	t *testing.T, address string, authority *opitest.Authority,
) *admissionregistrationv1.ValidatingWebhookConfiguration {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(deploy, "webhook", "webhook.yaml"))
	must.Succeed(t, err)
	first, _, _ := strings.Cut(string(text), "\n---\n")
	var c admissionregistrationv1.ValidatingWebhookConfiguration
	must.Succeed(t, yaml.UnmarshalStrict([]byte(first), &c))

	_, port, _ := strings.Cut(address, ":")
	url := "https://localhost:" + port + *c.Webhooks[0].ClientConfig.Service.Path
	c.Webhooks[0].ClientConfig = admissionregistrationv1.WebhookClientConfig{
		URL: &url, CABundle: authority.PEM(),
	}

	return &c
}

// inVersion returns an object of resource.k8s.io/v1 with another version.
func inVersion(t *testing.T, object any, kind, version string) *unstructured.Unstructured {
	t.Helper()
	text, err := json.Marshal(object)
	must.Succeed(t, err)
	if version == "v1beta1" { // has no "exactly"
		text = []byte(strings.Replace(string(text), `"exactly":{"deviceClassName":"fast"}`,
			`"deviceClassName":"fast"`, 1))
	}

	u := &unstructured.Unstructured{}
	must.Succeed(t, json.Unmarshal(text, &u.Object))
	u.SetAPIVersion("resource.k8s.io/" + version)
	u.SetKind(kind)
	return u
}

// TestReviewsOfAPIServer checks what an API server asks the webhook about and what it does with the
// answers, in each version of the API that it may serve.
func TestReviewsOfAPIServer(t *testing.T) {
	cluster, err := kubeapitest.StartWithoutCRDs(deploy, [2]string{"emulated-version", "1.34"},
		[2]string{"runtime-config", "resource.k8s.io/v1beta1=true,resource.k8s.io/v1beta2=true"})
	must.Succeed(t, err)
	cluster.Need(t)
	t.Cleanup(func() { must.Succeed(t, cluster.Stop()) })

	dir, authority := t.TempDir(), opitest.NewAuthority(t)
	issue(t, dir, authority)
	s, address := started(t, dir)
	admin, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)
	must.Succeed(t, admin.Create(t.Context(), configuration(t, address, authority)))

	// The policy, which is there too, does not know which names are taken.
	good, bad := parameters(v1alpha1.GroupName, `"mtu":1400`), parameters(v1alpha1.GroupName, taken)
	others := parameters("gpu.example.com", `"mtu":9`)
	must.Eventually(t, "the API server asks the webhook", func() bool {
		return admin.Create(t.Context(), newClaim("early", bad), client.DryRunAll) != nil
	})

	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		for kind, object := range map[string]any{
			"ResourceClaim":         newClaim("a-"+version, others, bad),
			"ResourceClaimTemplate": newTemplate("a-"+version, others, bad),
			"DeviceClass":           newClass("a-"+version, others, bad),
		} {
			err := admin.Create(t.Context(), inVersion(t, object, kind, version))
			if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(),
				`.config[1].opaque.parameters.interfaceName "eth0": is taken in every pod`) {
				t.Errorf("a wrong %s of %s: error %v", kind, version, err)
			}
		}
	}

	reviews := func() int {
		total := 0
		for _, resource := range []string{"resourceclaims", "resourceclaimtemplates", "deviceclasses"} {
			total += int(testutil.ToFloat64(s.reviewer.reviews.WithLabelValues(resource, allowed)))
		}
		return total
	}
	for _, object := range []client.Object{
		newClaim("good", good), newTemplate("good", good), newClass("good", good),
	} {
		must.Succeed(t, admin.Create(t.Context(), object))
	}
	before := reviews()
	if before != 3 {
		t.Errorf("%d objects were allowed, want 3", before)
	}

	// Others' objects, and changes of something else, are not even sent.
	theirs, class, mine := newClaim("theirs", others), newClass("theirs", others), newClaim("mine", good)
	class.Spec.ExtendedResourceName = new("example.com/theirs")
	must.Succeed(t, admin.Create(t.Context(), theirs))
	must.Succeed(t, admin.Create(t.Context(), class))
	must.Succeed(t, admin.Create(t.Context(), newClaim("none")))
	must.Succeed(t, admin.Create(t.Context(), mine))
	mine.Labels, mine.Finalizers = map[string]string{"a": "b"}, []string{"example.com/wait"}
	must.Succeed(t, admin.Update(t.Context(), mine))
	must.Succeed(t, admin.Delete(t.Context(), mine))
	must.Succeed(t, admin.Get(t.Context(), client.ObjectKeyFromObject(mine), mine))
	mine.Finalizers = nil
	must.Succeed(t, admin.Update(t.Context(), mine))
	if after := reviews(); after != before+1 {
		t.Errorf("%d objects were sent, want the one with parameters for this driver", after-before)
	}

	// A class can be changed, and mended. What is not its parameters is not sent.
	stored := newClass("changes", good)
	must.Succeed(t, admin.Create(t.Context(), stored))
	before = reviews()
	stored.Spec.Selectors = []resourceapi.DeviceSelector{
		{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "xpu.opiproject.org"`}},
	}
	must.Succeed(t, admin.Update(t.Context(), stored))
	if after := reviews(); after != before {
		t.Error("a class with other selectors was sent")
	}
	stored.Spec.Config[0].DeviceConfiguration = bad
	if err := admin.Update(t.Context(), stored); !apierrors.IsInvalid(err) {
		t.Errorf("a class gets wrong parameters: error %v", err)
	}
}

// TestNoAnswer checks that an API server goes on if nothing listens, or the certificate is of an
// authority that it does not trust.
func TestNoAnswer(t *testing.T) {
	cluster, err := kubeapitest.StartWithoutCRDs(deploy)
	must.Succeed(t, err)
	cluster.Need(t)
	t.Cleanup(func() { must.Succeed(t, cluster.Stop()) })

	dir, authority := t.TempDir(), opitest.NewAuthority(t)
	issue(t, dir, authority)
	_, address := started(t, dir)
	admin, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)
	c := configuration(t, address, authority)
	must.Succeed(t, admin.Create(t.Context(), c))
	bad := parameters(v1alpha1.GroupName, taken)
	create := func(name string) error { return admin.Create(t.Context(), newClaim(name, bad)) }
	must.Eventually(t, "the API server asks the webhook", func() bool { return create("a") != nil })

	c.Webhooks[0].ClientConfig.CABundle = opitest.NewAuthority(t).PEM()
	must.Succeed(t, admin.Update(t.Context(), c))
	must.Eventually(t, "a certificate that is not trusted", func() bool {
		return create("b") == nil
	})

	nowhere := "https://localhost:1" + Path
	c.Webhooks[0].ClientConfig.URL = &nowhere
	must.Succeed(t, admin.Update(t.Context(), c))
	must.Succeed(t, create("c"))
}
