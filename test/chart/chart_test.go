// SPDX-License-Identifier: Apache-2.0

// Package chart tests that the Helm chart renders the same objects as the kustomizations of
// deploy/, and that it refuses wrong values.
package chart

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	strict "sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

const (
	root      = "../.."
	chartDir  = root + "/deploy/chart"
	namespace = "xpu-system"
)

// helm runs the helm that make tools installed.
func helm(t testing.TB, args ...string) (string, error) {
	t.Helper()
	program := filepath.Join(root, "bin", "helm")
	needs.Built(t, program, "tools")
	return run(exec.Command(program, args...))
}

// kustomize renders a directory as kubectl apply -k does.
func kustomize(t testing.TB, dir string) []unstructured.Unstructured {
	t.Helper()
	assets := needs.Kubernetes(t)
	out, err := run(exec.Command(filepath.Join(assets, "kubectl"), "kustomize", dir))
	must.Succeed(t, err)
	return objects(t, out)
}

func run(cmd *exec.Cmd) (string, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, &stderr)
	}
	return string(out), err
}

func render(t testing.TB, namespace string, set ...string) ([]unstructured.Unstructured, error) {
	t.Helper()
	args := []string{"template", "xpu", chartDir, "--namespace", namespace}
	for _, value := range set {
		args = append(args, "--set", value)
	}

	out, err := helm(t, args...)
	if err != nil {
		return nil, err
	}

	return objects(t, out), nil
}

func objects(t testing.TB, manifests string) (all []unstructured.Unstructured) {
	t.Helper()
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifests), 4096)
	for {
		var object unstructured.Unstructured
		err := decoder.Decode(&object.Object)
		if err == io.EOF {
			return all
		}

		must.Succeed(t, err)
		if len(object.Object) > 0 {
			all = append(all, object)
		}
	}
}

// byName returns the objects by kind, namespace and name. It removes what only Helm adds, and sorts
// lists whose order has no meaning.
func byName(all []unstructured.Unstructured) map[string]any {
	found := map[string]any{}
	for _, o := range all {
		// Only Helm sets these labels, except the last, which kustomizations set on workloads.
		o.SetLabels(without(o.GetLabels(), "app.kubernetes.io/instance",
			"app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart",
			"app.kubernetes.io/part-of"))
		o.SetAnnotations(without(o.GetAnnotations(), "helm.sh/resource-policy"))

		if pod, ok, _ := unstructured.NestedMap(o.Object, "spec", "template", "spec"); ok {
			order(pod["volumes"], "name")
			for _, c := range pod["containers"].([]any) {
				order(c.(map[string]any)["volumeMounts"], "mountPath")
			}
			o.Object["spec"].(map[string]any)["template"].(map[string]any)["spec"] = pod
		}

		found[fmt.Sprintf("%s %s/%s", o.GetKind(), o.GetNamespace(), o.GetName())] = o.Object
	}

	return found
}

func without(all map[string]string, keys ...string) map[string]string {
	maps.DeleteFunc(all, func(key, _ string) bool { return slices.Contains(keys, key) })
	if len(all) == 0 {
		return nil
	}
	return all
}

// order sorts a list of objects, whose order means nothing, by a field.
func order(list any, by string) {
	all, _ := list.([]any)
	slices.SortFunc(all, func(a, b any) int {
		return strings.Compare(a.(map[string]any)[by].(string), b.(map[string]any)[by].(string))
	})
}

// TestSameAsKustomize checks that each mode renders the same as one of the kustomizations.
func TestSameAsKustomize(t *testing.T) {
	for mode, dirs := range map[string][]string{
		"cluster": {"deploy"},
		"tenant":  {"deploy/tenant"},
		"infra":   {"deploy/infra"},
		"direct":  {"deploy/direct"},
	} {
		for _, bridge := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, opi-bridge %t", mode, bridge), func(t *testing.T) {
				if bridge {
					dirs = append(dirs, "deploy/opi-bridge")
				}

				var all []unstructured.Unstructured
				for _, dir := range dirs {
					all = append(all, kustomize(t, filepath.Join(root, dir))...)
				}

				checkSame(t, all, "mode="+mode, fmt.Sprintf("opiBridge.enabled=%t", bridge))
			})
		}
	}
}

// checkSame checks that the chart renders these objects with the values.
func checkSame(t *testing.T, all []unstructured.Unstructured, set ...string) {
	t.Helper()
	want := byName(all)
	// The user creates the namespace of a release.
	delete(want, "Namespace /"+namespace)
	rendered, err := render(t, namespace, set...)
	must.Succeed(t, err)

	got := byName(rendered)
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if diff := cmp.Diff(want[name], got[name]); diff != "" {
			t.Errorf("%s: -kustomize +chart:\n%s", name, diff)
		}
		delete(got, name)
	}

	for name := range got {
		t.Errorf("the chart alone has %s", name)
	}
}

// TestSameWebhook checks that the chart renders the webhook as the component of deploy/webhook adds
// it.
func TestSameWebhook(t *testing.T) {
	for mode, dir := range map[string]string{"cluster": "deploy", "tenant": "deploy/tenant"} {
		t.Run(mode, func(t *testing.T) {
			overlay := t.TempDir()
			relative := func(dir string) string {
				absolute, err := filepath.Abs(filepath.Join(root, dir))
				must.Succeed(t, err)
				path, err := filepath.Rel(overlay, absolute)
				must.Succeed(t, err)
				return path
			}
			text := fmt.Sprintf("resources: [%s]\ncomponents: [%s]\n", relative(dir),
				relative("deploy/webhook"))
			must.Succeed(t, os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), []byte(text),
				0o600))

			checkSame(t, kustomize(t, overlay), "mode="+mode, "admission.webhook.enabled=true")
		})
	}
}

// TestOwnAccounts checks that no pod runs as the namespace's ServiceAccount default, and that parts
// without rights at the API server get no token.
func TestOwnAccounts(t *testing.T) {
	for _, mode := range []string{"cluster", "infra", "direct"} {
		rendered, err := render(t, namespace, "mode="+mode, "opiBridge.enabled=true")
		must.Succeed(t, err)

		tokens := map[string]bool{} // by ServiceAccount, whether its pods get one
		for _, o := range rendered {
			if o.GetKind() == "ServiceAccount" {
				mounts, found, _ := unstructured.NestedBool(o.Object, "automountServiceAccountToken")
				tokens[o.GetName()] = !found || mounts
			}
		}
		for name, pod := range pods(t, rendered) {
			token, exists := tokens[pod.Spec.ServiceAccountName]
			if !exists {
				t.Errorf("mode %s: %s runs as %q, which is not the chart's", mode, name,
					pod.Spec.ServiceAccountName)
			}
			if want := name != "opi-bridge" && mode != "direct"; token != want {
				t.Errorf("mode %s: the account of %s has a token: %t, want %t", mode, name, token, want)
			}
		}
	}
}

// TestLabelsOnce checks that no label is rendered twice, which strict readers refuse: a part's label
// has priority over the common one, and the chart's over both.
func TestLabelsOnce(t *testing.T) {
	parts := []string{"agent", "controller", "opiBridge"}
	args := []string{"template", "xpu", chartDir, "--namespace", namespace, "--set",
		"opiBridge.enabled=true,monitoring.enabled=true,commonLabels.team=all," +
			"commonLabels.grafana_dashboard=mine"}
	for _, part := range parts {
		args = append(args, "--set", part+`.podLabels.team=net,`+part+
			`.podLabels.app\.kubernetes\.io/name=other`)
	}
	args = append(args, "--set", `commonLabels.xpu\.opiproject\.org/opi-agents=some`)
	out, err := helm(t, args...)
	must.Succeed(t, err)

	for document := range strings.SplitSeq(out, "\n---\n") {
		var object unstructured.Unstructured
		if err := strict.UnmarshalStrict([]byte(document), &object.Object); err != nil {
			t.Errorf("%v:\n%.300s", err, document)
		}
		labels := object.GetLabels()
		if object.GetKind() == "ConfigMap" && labels["grafana_dashboard"] != "1" {
			t.Errorf("%s has the labels %v: Grafana does not find it", object.GetName(), labels)
		}
		if object.GetKind() == "Service" && labels["xpu.opiproject.org/opi-agents"] != "" {
			t.Errorf("%s has the labels %v", object.GetName(), labels)
		}
	}
	for name, pod := range pods(t, objects(t, out)) {
		if pod.Labels["team"] != "net" {
			t.Errorf("%s has the labels %v, want the part's team", name, pod.Labels)
		}
	}
}

// TestReusedValues checks that values of the version before, which helm upgrade --reuse-values takes,
// leave the init container its requests and limits, and that those of the user have priority.
func TestReusedValues(t *testing.T) {
	for name, test := range map[string]struct {
		set  string
		want map[string]any
	}{
		"of the version before": {"agent.initResources=null", map[string]any{
			"requests": map[string]any{"cpu": "10m", "memory": "16Mi"},
			"limits":   map[string]any{"memory": "64Mi"},
		}},
		"default": {"mode=cluster", map[string]any{
			"requests": map[string]any{"cpu": "10m", "memory": "16Mi"},
			"limits":   map[string]any{"memory": "64Mi"},
		}},
		"of the user": {
			"agent.initResources.requests=null,agent.initResources.limits.memory=1Gi",
			map[string]any{"limits": map[string]any{"memory": "1Gi"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			rendered, err := render(t, namespace, test.set)
			must.Succeed(t, err)

			for _, o := range rendered {
				containers, found, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec",
					"initContainers")
				if !found {
					continue
				}
				got := containers[0].(map[string]any)["resources"]
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("resources (-want +got):\n%s", diff)
				}
			}
		})
	}
}

// TestNamespaceIsFree checks that a release contains no namespace of the manifests but its own.
func TestNamespaceIsFree(t *testing.T) {
	for _, mode := range []string{"cluster", "tenant", "infra", "direct"} {
		webhook := mode == "cluster" || mode == "tenant"
		rendered, err := render(t, "network", "mode="+mode, "broker.namespace=customers",
			"opiBridge.enabled=true", "networkPolicies.enabled=true",
			fmt.Sprintf("admission.webhook.enabled=%t", webhook))
		must.Succeed(t, err)

		for _, o := range rendered {
			text, err := o.MarshalJSON()
			must.Succeed(t, err)

			for _, wrong := range []string{namespace, "xpu-tenants"} {
				// descriptions of CRDs mention the default namespace
				if o.GetKind() != "CustomResourceDefinition" &&
					bytes.Contains(text, []byte(wrong)) {
					t.Errorf("mode %s: %s %s has %s: %s", mode, o.GetKind(), o.GetName(),
						wrong, text)
				}
			}
		}
	}
}

// TestParts checks that each part can be left out, and that values other than defaults reach the
// objects.
func TestParts(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0a", 32)
	for name, test := range map[string]struct {
		set     []string
		present []string // texts that the objects must contain
		absent  []string
	}{
		"no agent": {[]string{"agent.enabled=false"}, []string{"name: xpu-controller"},
			[]string{"kind: DaemonSet", "name: xpu-agent\n"}},
		"no controller": {[]string{"controller.enabled=false"}, []string{"name: xpu-agent"},
			[]string{"kind: Deployment", "name: xpu-controller\n"}},
		"no broker": {
			[]string{"mode=infra", "broker.enabled=false"}, []string{"name: xpu-controller"},
			[]string{"name: xpu-broker"},
		},
		"no CRDs": {
			[]string{"crds.install=false"}, nil, []string{"kind: CustomResourceDefinition"},
		},
		"the broker is scraped": {
			[]string{"mode=infra", "monitoring.enabled=true", "broker.namespace=tenants"},
			[]string{"    - tenants\n"}, nil,
		},
		"metrics of opi-bridge": {
			[]string{"opiBridge.enabled=true", "opiBridge.metricsSecretName=scrape",
				"monitoring.enabled=true"},
			[]string{"--metrics-listen=:9811", "--metrics-tls", "portNumber: 9811",
				"secret: {name: scrape, key: ca.crt}"}, nil,
		},
		"metrics of opi-bridge for the xPU": {
			[]string{"opiBridge.enabled=true", "monitoring.enabled=true"},
			[]string{"--metrics-listen=127.0.0.1:9811"}, []string{"portNumber: 9811"},
		},
		"secure metrics": {
			[]string{"monitoring.secure=true", "monitoring.enabled=true",
				"monitoring.tokenSecretName=scrape"},
			[]string{"--metrics-secure", "scheme: HTTPS", "scheme: https", "name: scrape",
				"name: system:auth-delegator"}, nil,
		},
		"open metrics": {
			[]string{"monitoring.enabled=true"}, nil,
			[]string{"--metrics-secure", "scheme: ", "system:auth-delegator"},
		},
		"CRDs that go": {[]string{"crds.keep=false"}, []string{"kind: CustomResourceDefinition"},
			[]string{"helm.sh/resource-policy"}},
		"CRDs that stay": {
			nil, []string{"helm.sh/resource-policy: keep"}, []string{"helm.sh/hook"},
		},
		"what was declared goes before CRDs": {
			[]string{"crds.keep=false"},
			[]string{"helm.sh/hook: pre-delete", "ghcr.io/opiproject/xpuctl:", "--namespace=" +
				namespace}, nil,
		},
		"the uninstall Job by digest": {
			[]string{"crds.keep=false", "controller.digest=" +
				digest, "uninstall.digest=" + digest},
			[]string{"ghcr.io/opiproject/xpuctl@" + digest}, []string{"ghcr.io/opiproject/xpuctl:"},
		},
		"DeviceTaintRules": {
			[]string{"controller.deviceTaintRulesAfter=5m"},
			[]string{"--device-taint-rules-after=5m", "name: xpu-controller-taint-rules",
				"devicetaintrules", "name: xpu-controller-devicetaintrules"}, nil,
		},
		"DeviceTaintRules that are turned off": {
			[]string{"controller.deviceTaintRulesAfter=0s"},
			[]string{"--device-taint-rules-after=0s", "name: xpu-controller-taint-rules"}, nil,
		},
		"no rights for DeviceTaintRules": {nil, nil, []string{"taint-rules", "devicetaintrules"}},
		"DeviceTaintRules of a tenant": {
			[]string{"mode=tenant", "controller.deviceTaintRulesAfter=5m"},
			[]string{"--device-taint-rules-after=5m", "name: xpu-controller-taint-rules"}, nil,
		},
		"no DeviceTaintRules of an infra cluster": {
			[]string{"mode=infra", "controller.deviceTaintRulesAfter=5m"}, nil,
			[]string{"taint-rules", "devicetaintrules"},
		},
		"nothing declared by CRDs": {
			[]string{"crds.keep=false", "mode=direct"}, nil, []string{"helm.sh/hook"},
		},
		"images": {
			[]string{"image.registry=registry.example/xpu", "image.tag=v9", "agent.digest=" +
				digest, "image.pullSecrets={mine}"},
			[]string{"registry.example/xpu/xpu-agent@" + digest,
				"registry.example/xpu/xpu-controller:v9", "imagePullSecrets:\n      - name: mine"},
			[]string{"ghcr.io"},
		},
		"paths": {
			[]string{"agent.hostPaths.kubelet=/data/kubelet",
				"agent.hostPaths.cniBin=/usr/libexec/cni"},
			[]string{"--kubelet-dir=/data/kubelet", "mountPath: /data/kubelet/plugins_registry",
				"path: /data/kubelet/plugins,", "path: /usr/libexec/cni,"},
			[]string{"/var/lib/kubelet", "path: /opt/cni/bin"},
		},
		"placement": {
			[]string{"agent.nodeSelector.xpu=yes", "controller.tolerations[0].key=infra",
				"controller.extraArgs={--log-format=json}", "controller.replicas=3"},
			[]string{"nodeSelector:\n        xpu: \"yes\"", "tolerations:\n        - key: infra",
				"- --log-format=json", "replicas: 3"},
			nil,
		},
		"direct": {
			[]string{"mode=direct", "direct.pools=kind: DevicePool",
				"direct.nodes.node1.networks.blue.vlan=10", "direct.clientSecretName=opi-client"},
			[]string{"pools.yaml: |\n    kind: DevicePool", "node1.yaml: |\n    networks:\n      " +
				"blue:\n        vlan: 10", "secretName: opi-client"},
			[]string{"kind: Deployment", "kind: ClusterRole", "CustomResourceDefinition",
				"/etc/xpu-agent/opi-client, type"},
		},
		"monitoring": {
			[]string{"monitoring.enabled=true", "monitoring.labels.release=prometheus"},
			[]string{"kind: PodMonitor", "kind: PrometheusRule", "release: prometheus",
				"alert: XPUControllerAbsent", "dashboard.json: |"},
			nil,
		},
		"monitoring without a controller": {
			[]string{"mode=direct", "monitoring.enabled=true"}, []string{"alert: XPUDirectAway"},
			[]string{"alert: XPUControllerAbsent"},
		},
		"network policies": {
			[]string{"mode=infra"},
			[]string{"kind: NetworkPolicy", "policyTypes: [Ingress]",
				"{port: metrics, protocol: TCP}"},
			[]string{"egress:", "port: 6443"},
		},
		"webhook": {
			[]string{"admission.webhook.enabled=true", "admission.webhook.secretName=mine",
				"admission.webhook.caBundle=PEM"},
			[]string{"kind: ValidatingWebhookConfiguration", "--webhook-bind-address=:9443",
				"secretName: mine, optional: true", "caBundle: UEVN", "{port: webhook, protocol: TCP}"},
			[]string{"inject-ca-from"},
		},
		"no policy": {
			[]string{"admission.policy=false"}, []string{"name: xpuports"}, []string{"name: xpu-parameters"},
		},
		"values of a version before admission": {
			[]string{"admission=null"}, []string{"name: xpu-parameters"},
			[]string{"ValidatingWebhookConfiguration"},
		},
		"no webhook": {
			nil, []string{"name: xpu-controller"},
			[]string{"ValidatingWebhookConfiguration", "--webhook", "port: webhook", "volumeMounts:\n" +
				"        - {name: webhook"},
		},
		"no network policies": {
			[]string{"networkPolicies.enabled=false"}, []string{"kind: Deployment"},
			[]string{"kind: NetworkPolicy"},
		},
		"network policies for what may be reached": {
			[]string{"mode=infra", "networkPolicies.egress=true", "networkPolicies.opiPorts={9}"},
			[]string{"kind: NetworkPolicy", "policyTypes: [Ingress, Egress]",
				"{port: 9, protocol: TCP}", "{port: 6443, protocol: TCP}"},
			[]string{"port: 50051"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			args := []string{"template", "xpu", chartDir, "--namespace", namespace}
			for _, value := range test.set {
				args = append(args, "--set", value)
			}

			out, err := helm(t, args...)
			must.Succeed(t, err)

			for _, text := range test.present {
				if !strings.Contains(out, text) {
					t.Errorf("%q is not there", text)
				}
			}

			for _, text := range test.absent {
				if strings.Contains(out, text) {
					t.Errorf("%q is there", text)
				}
			}
		})
	}
}

// TestRefuses checks that the error names the wrong value.
func TestRefuses(t *testing.T) {
	for set, want := range map[string]string{
		"agent.enabld=true": "'enabld' not allowed",
		"mode=all": "/mode': value must be one of 'cluster', 'tenant', " +
			"'infra', 'direct'",
		"agent.digest=latest":                                                  "/agent/digest",
		"commonLabels.app\\.kubernetes\\.io/name=mine":                         "invalid propertyName",
		"agent.hostPaths.cniBin=opt/":                                          "/agent/hostPaths/cniBin",
		"controller.extraArgs={verbose}":                                       "/controller/extraArgs/0",
		"controller.goMemLimit=210M":                                           "/controller/goMemLimit",
		"uninstall.digest=latest":                                              "/uninstall/digest",
		"crds.keep=false,controller.digest=sha256:" + strings.Repeat("0a", 32): "uninstall.digest: must be the digest of the image xpuctl",
		"networkPolicies.opiPorts={0}":                                         "/networkPolicies/opiPorts/0",
		"broker.namespace=xpu-system":                                          "broker.namespace: must not be the release's namespace",
		"mode=direct,monitoring.secure=true":                                   "monitoring.secure: agents of mode direct have no API server",
		"admission.webhook.enabled=true":                                       "admission.webhook: needs a controller of mode cluster or tenant",
		"mode=tenant,controller.enabled=false,admission.webhook.enabled=true":  "admission.webhook: needs a controller of mode cluster or tenant",
		"admission.webhook.secretName=A B":                                     "/admission/webhook/secretName",
		"monitoring.secure=true,monitoring.enabled=true":                       "monitoring.tokenSecretName: must name a Secret",
	} {
		_, err := render(t, namespace, "mode=infra", set)
		if strings.HasPrefix(set, "mode=") {
			_, err = render(t, namespace, set)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", set, err, want)
		}
	}
}

func TestLint(t *testing.T) {
	if out, err := helm(t, "lint", "--strict", chartDir); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestVersion checks that the chart has the version of the file VERSION.
func TestVersion(t *testing.T) {
	version, err := os.ReadFile(filepath.Join(root, "VERSION"))
	must.Succeed(t, err)
	chart, err := os.ReadFile(filepath.Join(chartDir, "Chart.yaml"))
	must.Succeed(t, err)
	v := strings.TrimSpace(string(version))
	for _, line := range []string{"version: " + strings.TrimPrefix(v, "v"), "appVersion: " + v} {
		if !strings.Contains(string(chart), "\n"+line+"\n") {
			t.Errorf("Chart.yaml has no line %q", line)
		}
	}
}
