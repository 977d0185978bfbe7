// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// criticalOnlyByQuota is the configuration of the API servers of GKE: in a namespace without a
// ResourceQuota for them, pods of these priority classes are refused.
const criticalOnlyByQuota = `apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- name: ResourceQuota
  configuration:
    apiVersion: apiserver.config.k8s.io/v1
    kind: ResourceQuotaConfiguration
    limitedResources:
    - resource: pods
      matchScopes:
      - scopeName: PriorityClass
        operator: In
        values: [system-node-critical, system-cluster-critical]
`

// guest is a cluster whose administrator has rules for guests.
type guest struct {
	client.Client
}

// TestGuests installs the parts of the chart in a cluster with the rules of others.
func TestGuests(t *testing.T) {
	needs.Kubernetes(t)
	config := filepath.Join(t.TempDir(), "admission.yaml")
	must.Succeed(t, os.WriteFile(config, []byte(criticalOnlyByQuota), 0o600))
	environment := &envtest.Environment{ControlPlaneStartTimeout: time.Minute}
	environment.ControlPlane.GetAPIServer().Configure().Append("admission-control-config-file", config)

	rest, err := environment.Start()
	must.Succeed(t, err)
	t.Cleanup(func() {
		if err := environment.Stop(); err != nil {
			t.Error(err)
		}
	})

	scheme := runtime.NewScheme()
	must.Succeed(t, errors.Join(clientgoscheme.AddToScheme(scheme),
		apiextensionsv1.AddToScheme(scheme)))
	admin, err := client.New(rest, client.Options{Scheme: scheme})
	must.Succeed(t, err)

	g := guest{admin}
	t.Run("critical priority needs a quota", g.criticalPriority)
	t.Run("Pod Security", g.podSecurity)
	t.Run("labels, limits and tags", g.policies)
	t.Run("OpenShift", g.openShift)
}

// criticalPriority: with the quota of the chart, and only with it, the API server takes pods.
func (g guest) criticalPriority(t *testing.T) {
	for mode, set := range map[string][]string{
		"cluster": {"opiBridge.enabled=true", "crds.keep=false"}, "infra": nil, "direct": nil,
	} {
		t.Run(mode, func(t *testing.T) {
			release, tenants := "quota-"+mode, "quota-tenants-"+mode
			rendered, err := render(t, release, append(set, "mode="+mode, "broker.namespace="+tenants)...)
			must.Succeed(t, err)
			for _, namespace := range []string{release, tenants} {
				g.namespace(t, namespace, nil)
			}

			for name, pod := range pods(t, rendered) {
				err := g.admit(t, pod)
				if err == nil || !strings.Contains(err.Error(), "insufficient quota to match") {
					t.Errorf("%s without a quota: %v", name, err)
				}
			}

			for _, o := range rendered {
				if o.GetKind() == "ResourceQuota" {
					g.quota(t, o)
				}
			}

			for name, pod := range pods(t, rendered) {
				must.EventuallySucceed(t, name, func() error { return g.admit(t, pod) })
			}
		})
	}
}

// quota makes the ResourceQuota and does what the controller of quotas does in a cluster.
func (g guest) quota(t *testing.T, o unstructured.Unstructured) {
	t.Helper()
	var quota corev1.ResourceQuota
	must.Succeed(t, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &quota))
	must.Succeed(t, g.Create(t.Context(), &quota))

	quota.Status.Hard, quota.Status.Used = quota.Spec.Hard, corev1.ResourceList{}
	for name := range quota.Spec.Hard {
		quota.Status.Used[name] = apiresource.MustParse("0")
	}
	must.Succeed(t, g.Status().Update(t.Context(), &quota))
}

// TestQuotaElsewhere: in a cluster that asks for no quota, the API server takes the pods with the
// chart's quota as without it, also before the controller of quotas has written its status.
func TestQuotaElsewhere(t *testing.T) {
	needs.Kubernetes(t)
	environment := &envtest.Environment{ControlPlaneStartTimeout: time.Minute}
	rest, err := environment.Start()
	must.Succeed(t, err)
	t.Cleanup(func() {
		if err := environment.Stop(); err != nil {
			t.Error(err)
		}
	})
	admin, err := client.New(rest, client.Options{Scheme: clientgoscheme.Scheme})
	must.Succeed(t, err)

	g := guest{admin}
	rendered, err := render(t, "elsewhere")
	must.Succeed(t, err)
	g.namespace(t, "elsewhere", nil)
	quota := corev1.ResourceQuota{}
	for _, o := range rendered {
		if o.GetKind() == "ResourceQuota" {
			must.Succeed(t, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &quota))
		}
	}
	must.Succeed(t, g.Create(t.Context(), quota.DeepCopy()))

	// A quota that allows no pod shows when the API server knows the quotas made before it.
	zero := quota.DeepCopy()
	zero.Name, zero.Spec.ScopeSelector = "zero", nil
	zero.Spec.Hard = corev1.ResourceList{"pods": apiresource.MustParse("0")}
	must.Succeed(t, g.Create(t.Context(), zero))
	zero.Status.Hard, zero.Status.Used = zero.Spec.Hard, zero.Spec.Hard
	must.Succeed(t, g.Status().Update(t.Context(), zero))
	for name, pod := range pods(t, rendered) {
		must.Eventually(t, name+" is refused by quota zero", func() bool {
			err := g.admit(t, pod)
			return err != nil && strings.Contains(err.Error(), "exceeded quota: zero")
		})
	}
	must.Succeed(t, g.Delete(t.Context(), zero))

	for name, pod := range pods(t, rendered) {
		must.EventuallySucceed(t, name, func() error {
			err := g.admit(t, pod)
			if err != nil && !strings.Contains(err.Error(), "exceeded quota: zero") {
				t.Fatal(err)
			}
			return err
		})
	}
}

// TestQuotaFollowsClasses: the quota has the classes that the values name, and there is none where
// it is turned off.
func TestQuotaFollowsClasses(t *testing.T) {
	critical := []string{"system-cluster-critical", "system-node-critical"}
	for name, test := range map[string]struct {
		set  []string
		want []string
	}{
		"default": {nil, critical},
		"of the administrator": {
			[]string{"agent.priorityClassName=network", "controller.priorityClassName="},
			[]string{"network", "system-cluster-critical", "system-node-critical"},
		},
		"off":                        {[]string{"priorityQuota.enabled=false"}, nil},
		"values of an older version": {[]string{"priorityQuota=null"}, critical},
	} {
		t.Run(name, func(t *testing.T) {
			rendered, err := render(t, namespace, test.set...)
			must.Succeed(t, err)

			var got []string
			for _, o := range rendered {
				if o.GetKind() == "ResourceQuota" {
					expressions, _, _ := unstructured.NestedSlice(o.Object, "spec",
						"scopeSelector", "matchExpressions")
					values := expressions[0].(map[string]any)["values"].([]any)
					for _, value := range values {
						got = append(got, value.(string))
					}
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("classes of the quota (-want +got):\n%s", diff)
			}
		})
	}
}

// podSecurity: what needs no rights on the machine passes the level restricted, and the others are
// refused for what security.md says that they need.
func (g guest) podSecurity(t *testing.T) {
	want := map[string][]string{
		"xpu-controller": nil, "xpu-broker": nil, "xpuctl": nil,
		"xpu-agent": {"host namespaces", "probe or lifecycle host", "restricted volume types",
			"runAsNonRoot != true", "unrestricted capabilities"},
		"opi-bridge": {"host namespaces", "hostPort", "restricted volume types",
			"runAsNonRoot != true", "unrestricted capabilities"},
	}
	text, err := os.ReadFile(filepath.Join(root, "docs/explanation/security.md"))
	must.Succeed(t, err)

	level := map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}
	got := map[string][]string{}
	for _, set := range [][]string{
		{"mode=cluster", "opiBridge.enabled=true", "crds.keep=false", "admission.webhook.enabled=true"},
		{"mode=infra"}, {"mode=tenant"}, {"mode=direct"},
	} {
		release := "security-" + strings.TrimPrefix(set[0], "mode=")
		tenants := release + "-tenants"
		g.namespace(t, release, level)
		g.namespace(t, tenants, level)
		rendered, err := render(t, release, append(set, "broker.namespace="+tenants,
			"agent.priorityClassName=", "controller.priorityClassName=",
			"broker.priorityClassName=", "opiBridge.priorityClassName=")...)
		must.Succeed(t, err)

		for name, pod := range pods(t, rendered) {
			got[name] = violations(t, g.admit(t, pod))
			for _, reason := range got[name] {
				if !strings.Contains(string(text), reason) {
					t.Errorf("security.md does not say of %s: %s", name, reason)
				}
			}
		}
	}

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("why restricted refuses (-want +got):\n%s", diff)
	}
}

// violations returns the names of the checks of Pod Security that a pod does not pass.
func violations(t *testing.T, err error) (all []string) {
	t.Helper()
	if err == nil {
		return nil
	}

	_, list, ok := strings.Cut(err.Error(), `violates PodSecurity "restricted:latest": `)
	if !ok {
		t.Fatal(err)
	}

	// Each is a name with its details in parentheses.
	depth, name := 0, ""
	for _, c := range list + "," {
		switch {
		case c == '(':
			depth++
		case c == ')':
			depth--
		case c == ',' && depth == 0:
			all = append(all, strings.TrimSpace(name))
			name = ""
		case depth == 0:
			name += string(c)
		}
	}
	slices.Sort(all)
	return all
}

// policies: rules as the library of Gatekeeper has them are kept by the values of policyValues, and
// some of them not by the defaults.
func (g guest) policies(t *testing.T) {
	const containers = "(variables.pod.containers + " +
		"(has(variables.pod.initContainers) ? variables.pod.initContainers : []))"
	rules := map[string]string{
		"owner": `has(object.metadata.labels) && 'owner' in object.metadata.labels`,
		"limits": containers + `.all(c, has(c.resources.limits) && ` +
			`['cpu', 'memory'].all(r, r in c.resources.limits))`,
		"request": containers + `.all(c, has(c.resources.requests) && ` +
			`['cpu', 'memory'].all(r, r in c.resources.requests))`,
		"tag": containers + `.all(c, c.image.contains('@sha256:') || ` +
			`(c.image.contains(':') && !c.image.endsWith(':latest')))`,
		"digest": containers + `.all(c, c.image.contains('@sha256:'))`,
		"repo":   containers + `.all(c, c.image.startsWith('registry.example/'))`,
		"root": containers + `.all(c, c.securityContext.readOnlyRootFilesystem && ` +
			`!c.securityContext.allowPrivilegeEscalation)`,
		"probes": `variables.pod.restartPolicy == 'Never' || ` +
			`variables.pod.containers.all(c, has(c.livenessProbe) && has(c.readinessProbe))`,
	}
	for name, rule := range rules {
		g.rule(t, name, rule)
	}

	digest := "sha256:" + strings.Repeat("0a", 32)
	for _, mode := range []string{"mode=cluster", "mode=infra", "mode=direct"} {
		classes := []string{mode, "broker.namespace=policies-tenants", "agent.priorityClassName=",
			"controller.priorityClassName=", "broker.priorityClassName=", "opiBridge.priorityClassName="}
		if mode != "mode=direct" {
			classes = append(classes, "opiBridge.enabled=true", "crds.keep=false")
		}

		refused := g.refusals(t, classes, rules)
		for rule := range refused {
			if !slices.Contains([]string{"owner", "limits", "digest", "repo"}, rule) {
				t.Errorf("%s: the defaults break rule %s", mode, rule)
			}
		}
		if !refused["owner"] || !refused["limits"] {
			t.Errorf("%s: the rules judge nothing: %v", mode, refused)
		}

		values := append(classes, "commonLabels.owner=network", "image.registry=registry.example/xpu",
			"agent.resources.limits.cpu=1", "agent.initResources.limits.cpu=1",
			"controller.resources.limits.cpu=1", "broker.resources.limits.cpu=1",
			"opiBridge.resources.limits.cpu=1", "agent.digest="+digest, "controller.digest="+digest,
			"opiBridge.digest="+digest, "uninstall.digest="+digest)
		if refused := g.refusals(t, values, rules); len(refused) > 0 {
			t.Errorf("%s: with values: %v", mode, refused)
		}
	}
}

// rule makes a namespace in which the API server refuses what breaks the rule.
func (g guest) rule(t *testing.T, name, expression string) {
	t.Helper()
	g.namespace(t, "rule-"+name, map[string]string{"rule": name})
	rules := []admissionv1.NamedRuleWithOperations{}
	for group, resources := range map[string][]string{
		"": {"pods"}, "apps": {"deployments", "daemonsets"}, "batch": {"jobs"},
	} {
		rules = append(rules, admissionv1.NamedRuleWithOperations{
			RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule: admissionv1.Rule{
					APIGroups: []string{group}, APIVersions: []string{"v1"}, Resources: resources,
				},
			},
		})
	}

	meta := metav1.ObjectMeta{Name: "rule-" + name}
	must.Succeed(t, g.Create(t.Context(), &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: meta,
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: rules},
			Variables: []admissionv1.Variable{{
				Name: "pod", Expression: "has(object.spec.template) ? object.spec.template.spec : object.spec",
			}},
			Validations: []admissionv1.Validation{{
				Expression: expression, Message: "breaks rule " + name,
			}},
		},
	}))
	must.Succeed(t, g.Create(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: meta,
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName:        meta.Name,
			ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
			MatchResources: &admissionv1.MatchResources{NamespaceSelector: &metav1.LabelSelector{
				MatchLabels: map[string]string{"rule": name},
			}},
		},
	}))

	// A pod that breaks every rule shows when the API server knows this one.
	bad := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: meta.Name, Name: "bad"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "bad", Image: "bad:latest", SecurityContext: &corev1.SecurityContext{
				ReadOnlyRootFilesystem: new(false), AllowPrivilegeEscalation: new(true),
			},
		}}},
	}
	must.Eventually(t, "rule "+name, func() bool {
		err := g.Create(t.Context(), bad.DeepCopy(), client.DryRunAll)
		return err != nil && strings.Contains(err.Error(), "breaks rule "+name)
	})
}

// refusals returns which rules refuse a pod or workload of the chart with these values.
func (g guest) refusals(t *testing.T, set []string, rules map[string]string) map[string]bool {
	t.Helper()
	rendered, err := render(t, "policies", set...)
	must.Succeed(t, err)

	refused := map[string]bool{}
	for rule := range rules {
		note := func(err error) {
			if err != nil && strings.Contains(err.Error(), "breaks rule "+rule) {
				refused[rule] = true
			} else if err != nil {
				t.Error(err)
			}
		}

		for _, pod := range pods(t, rendered) {
			pod.Namespace = "rule-" + rule
			note(g.admit(t, pod))
		}
		for _, o := range rendered {
			if slices.Contains([]string{"Deployment", "DaemonSet", "Job"}, o.GetKind()) {
				o.SetNamespace("rule-" + rule)
				note(g.Create(t.Context(), o.DeepCopy(), client.DryRunAll))
			}
		}
	}
	return refused
}

// openShift: the SecurityContextConstraints are taken, and allow what the pods of their users have.
// Their users are ServiceAccounts of the chart, so that no other pod gets what they allow.
func (g guest) openShift(t *testing.T) {
	crd := constraintsCRD()
	must.Succeed(t, g.Create(t.Context(), crd))
	for mode, set := range map[string][]string{
		"cluster": {"opiBridge.enabled=true"}, "direct": nil, "infra": nil,
	} {
		t.Run(mode, func(t *testing.T) {
			rendered, err := render(t, "openshift-"+mode, append(set, "mode="+mode,
				"openshift.enabled=true", "broker.namespace=tenants")...)
			must.Succeed(t, err)

			allowed := map[string]map[string]any{} // by ServiceAccount
			accounts := map[string]bool{}
			for _, o := range rendered {
				if o.GetKind() == "ServiceAccount" {
					accounts["system:serviceaccount:"+o.GetNamespace()+":"+o.GetName()] = true
				}
			}
			for _, o := range rendered {
				if o.GetKind() != "SecurityContextConstraints" {
					continue
				}
				must.EventuallySucceed(t, o.GetName(), func() error {
					return g.Create(t.Context(), o.DeepCopy(), client.DryRunAll,
						client.FieldValidation("Strict"))
				})
				for _, user := range o.Object["users"].([]any) {
					allowed[user.(string)] = o.Object
					if !accounts[user.(string)] {
						t.Errorf("%s is for %s, which is not the chart's", o.GetName(), user)
					}
				}
			}

			for name, pod := range pods(t, rendered) {
				if err := constrained(pod, allowed); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
}

// constrained reports what of a pod OpenShift would refuse by the constraints that its
// ServiceAccount may use. Without any of its own it may use restricted-v2: no user of its choice,
// and nothing of the host.
// The rules are in OpenShift's documentation, Managing security context constraints.
func constrained(pod *corev1.Pod, allowed map[string]map[string]any) error {
	scc := allowed["system:serviceaccount:"+pod.Namespace+":"+pod.Spec.ServiceAccountName]
	may := func(field string) bool { value, _ := scc[field].(bool); return value }
	list := func(field string) []any { value, _ := scc[field].([]any); return value }

	var all []error
	if pod.Spec.HostNetwork && !may("allowHostNetwork") {
		all = append(all, errors.New("the host's network"))
	}
	for _, volume := range pod.Spec.Volumes {
		if volume.HostPath != nil && !(may("allowHostDirVolumePlugin") &&
			slices.Contains(list("volumes"), any("hostPath"))) {
			all = append(all, fmt.Errorf("volume %s", volume.Name))
		}
	}

	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for _, capability := range c.SecurityContext.Capabilities.Add {
			if !slices.Contains(list("allowedCapabilities"), any(string(capability))) {
				all = append(all, fmt.Errorf("capability %s of %s", capability, c.Name))
			}
		}
		for _, port := range c.Ports {
			// The API server sets hostPort where a pod has the host's network.
			if pod.Spec.HostNetwork && !may("allowHostPorts") {
				all = append(all, fmt.Errorf("port %d", port.ContainerPort))
			}
		}
		if scc == nil && c.SecurityContext.RunAsUser != nil {
			all = append(all, fmt.Errorf("user %d of %s", *c.SecurityContext.RunAsUser, c.Name))
		}
		if scc != nil && (c.SecurityContext.SELinuxOptions == nil ||
			c.SecurityContext.SELinuxOptions.Type != "spc_t") {
			all = append(all, fmt.Errorf("%s may not use files of the host with SELinux", c.Name))
		}
	}
	return errors.Join(all...)
}

// constraintsCRD has the fields of SecurityContextConstraints that the chart may use, and requires
// what OpenShift's definition requires.
func constraintsCRD() *apiextensionsv1.CustomResourceDefinition {
	field := func(kind string) apiextensionsv1.JSONSchemaProps {
		return apiextensionsv1.JSONSchemaProps{Type: kind, Nullable: kind != "boolean"}
	}
	texts := field("array")
	texts.Items = &apiextensionsv1.JSONSchemaPropsOrArray{
		Schema: &apiextensionsv1.JSONSchemaProps{Type: "string"},
	}
	strategy := field("object")
	strategy.Properties = map[string]apiextensionsv1.JSONSchemaProps{"type": {Type: "string"}}

	properties := map[string]apiextensionsv1.JSONSchemaProps{
		"priority": field("integer"), "allowPrivilegeEscalation": field("boolean"),
		"users": texts, "groups": texts, "seccompProfiles": texts, "runAsUser": strategy,
		"seLinuxContext": strategy, "fsGroup": strategy, "supplementalGroups": strategy,
	}
	required := []string{"priority"}
	for _, name := range []string{
		"allowHostDirVolumePlugin", "allowHostIPC", "allowHostNetwork", "allowHostPID",
		"allowHostPorts", "allowPrivilegedContainer", "readOnlyRootFilesystem",
	} {
		properties[name] = field("boolean")
		required = append(required, name)
	}
	for _, name := range []string{
		"allowedCapabilities", "defaultAddCapabilities", "requiredDropCapabilities", "volumes",
	} {
		properties[name] = texts
		required = append(required, name)
	}

	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{
			Name: "securitycontextconstraints.security.openshift.io",
		},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "security.openshift.io", Scope: apiextensionsv1.ClusterScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{
				Kind: "SecurityContextConstraints", ListKind: "SecurityContextConstraintsList",
				Plural: "securitycontextconstraints", Singular: "securitycontextconstraints",
			},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{
					OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
						Type: "object", Properties: properties, Required: required,
					},
				},
			}},
		},
	}
}

// namespace makes a namespace.
func (g guest) namespace(t *testing.T, name string, labels map[string]string) {
	t.Helper()
	must.Succeed(t, g.Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
	}))
}

// admit asks the API server whether it would take the pod.
func (g guest) admit(t *testing.T, pod *corev1.Pod) error {
	t.Helper()
	return g.Create(context.WithoutCancel(t.Context()), pod.DeepCopy(), client.DryRunAll)
}

// pods returns a pod of each workload, by the name of its part.
func pods(t *testing.T, rendered []unstructured.Unstructured) map[string]*corev1.Pod {
	t.Helper()
	all := map[string]*corev1.Pod{}
	for _, o := range rendered {
		template, ok, err := unstructured.NestedMap(o.Object, "spec", "template")
		must.Succeed(t, err)
		if !ok || o.GroupVersionKind().GroupKind() == (schema.GroupKind{}) {
			continue
		}

		pod := &corev1.Pod{}
		must.Succeed(t, runtime.DefaultUnstructuredConverter.FromUnstructured(template, pod))
		part := pod.Labels["app.kubernetes.io/name"]
		pod.Namespace, pod.Name = o.GetNamespace(), part
		all[part] = pod
	}
	if len(all) == 0 {
		t.Fatal("no pods")
	}
	return all
}
