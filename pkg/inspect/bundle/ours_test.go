// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestOurPods checks that a name alone does not make a container the project's.
func TestOurPods(t *testing.T) {
	for name, change := range map[string]func(*corev1.Pod){
		"of another namespace": func(p *corev1.Pod) { p.Namespace = "default" },
		"without part-of":      func(p *corev1.Pod) { delete(p.Labels, partOf) },
		"of another part": func(p *corev1.Pod) {
			p.Labels["app.kubernetes.io/name"] = "xpu-controller"
		},
		"of no part":           func(p *corev1.Pod) { p.Labels["app.kubernetes.io/name"] = "web" },
		"with another account": func(p *corev1.Pod) { p.Spec.ServiceAccountName = "deployer" },
		"of no owner":          func(p *corev1.Pod) { p.OwnerReferences = nil },
		"of another owner":     func(p *corev1.Pod) { p.OwnerReferences[0].Name = "web" },
		"of another kind":      func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "StatefulSet" },
		"not controlled": func(p *corev1.Pod) {
			p.OwnerReferences[0].Controller = new(false)
		},
	} {
		p := ourAgent()
		change(p)
		if isOurPod(p, p.Spec.ServiceAccountName, "xpu-system") {
			t.Errorf("a pod %s is taken for the project's", name)
		}
		if text := shownPod(t, p); strings.Contains(text, "/host/sys") {
			t.Errorf("a pod %s shows its arguments:\n%s", name, text)
		}
	}

	controller := ourAgent()
	own(controller, "xpu-controller")
	controller.OwnerReferences[0].Kind, controller.OwnerReferences[0].Name = "ReplicaSet", "xpu-controller-5d4f"
	direct := ourAgent()
	direct.Spec.ServiceAccountName = "default"
	for name, p := range map[string]*corev1.Pod{
		"agent": ourAgent(), "controller": controller, "direct mode": direct,
	} {
		if !isOurPod(p, p.Spec.ServiceAccountName, "xpu-system") {
			t.Errorf("%s: the pod is not taken for the project's", name)
		}
	}
}

func ourAgent() *corev1.Pod {
	return pod("xpu-system", "xpu-agent-1", func(p *corev1.Pod) {
		own(p, "xpu-agent")
		p.Spec.Containers[0].Name = "xpu-agent"
		p.Spec.Containers[0].Args = []string{
			"--sys-root=/host/sys", "--tracing-endpoint=https://me:" + secret + "@collector",
			"--unknown", secret,
		}
	})
}

// TestArguments checks that flags of the project's programs are shown without possible secrets.
func TestArguments(t *testing.T) {
	text := shownPod(t, ourAgent())
	for _, want := range []string{"--sys-root=/host/sys", "--tracing-endpoint=" + redacted} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}

	if strings.Contains(text, secret) {
		t.Errorf("there is a secret in\n%s", text)
	}
}

// shownPod returns the content of an archive about a pod, as JSON without escapes.
func shownPod(t *testing.T, p *corev1.Pod) string {
	t.Helper()
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(p)
	must.Succeed(t, err)
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	must.Succeed(t,
		encoder.Encode(redact("Pod", &unstructured.Unstructured{Object: object}, "xpu-system")))

	return out.String()
}

// TestHooks checks that output of the administrator's hooks appears neither in the state of a node
// nor in logs.
func TestHooks(t *testing.T) {
	attached := func(hook string) nodestate.Function {
		return nodestate.Function{
			Attachment: &nodestate.Attachment{Hook: &nodestate.Hook{Name: hook, Error: secret}},
		}
	}

	state := &nodestate.State{
		Functions:   []nodestate.Function{attached("10-wipe"), {}},
		DeadLetters: []nodestate.DeadLetter{{Hook: "10-wipe", Error: secret}},
	}

	text, err := json.Marshal(redactState(state))
	must.Succeed(t, err)
	if strings.Contains(string(text), secret) {
		t.Errorf("what a hook printed is in %s", text)
	}
	if state.DeadLetters[0].Error != secret || state.Functions[0].Attachment.Hook.Error != secret {
		t.Error("the state itself was changed")
	}

	ours, err := json.Marshal(
		redactState(&nodestate.State{
			Functions: []nodestate.Function{attached(nodestate.PortHook)},
		}),
	)

	must.Succeed(t, err)
	if !strings.Contains(string(ours), secret) {
		t.Errorf("why the Port is not gone is left out of %s", ours)
	}

	log := "2026-01-01T00:00:00Z I0101 started\n" +
		"2026-01-01T00:00:01Z I0101 Post-delete hook says output=" + secret + "\n" +
		`2026-01-01T00:00:02Z {"msg":"Post-delete hook given up","error":"` + secret + "\"}\nlast"
	want := "2026-01-01T00:00:00Z I0101 started\n2026-01-01T00:00:01Z Post-delete hook " +
		redacted + "\n" +
		"2026-01-01T00:00:02Z Post-delete hook " + redacted + "\nlast"
	if got := string(redactLog([]byte(log))); got != want {
		t.Errorf("the log is\n%s\nwant\n%s", got, want)
	}
}

// FuzzRedact puts a secret into fields that are shown of no kind, and checks that redaction removes
// it and that redacting twice changes nothing.
func FuzzRedact(f *testing.F) {
	kinds := []string{
		"DevicePool", "XPU", "XPUNetwork", "XPUNode", "XPUPort", "XPUTenant", "DeviceClass",
		"ResourceClaim",
		"ResourceClaimTemplate", "ResourceSlice", "Node", "Event", "Pod", "DaemonSet", "Deployment",
		"NetworkAttachmentDefinition", "Secret",
	}

	for i, text := range []string{
		`{"metadata": {"name": "a", "annotations": {"k8s.v1.cni.cncf.io/networks": "[{\"name\": \"a\"}]", "HIDDEN": "HIDDEN"}}}`,
		`{"metadata": [], "spec": {"config": "{\"type\": \"xpu-cni\", \"plugins\": null, \"HIDDEN\": 1}"}}`,
		`{"spec": {"containers": [{"name": "xpu-agent", "args": ["HIDDEN", 7, null]}, "HIDDEN", [[]]]}}`,
		`{"spec": {"devices": {"config": [{"opaque": {"driver": 7, "parameters": "HIDDEN"}}]}}, "status": {"devices": [{"data": {"HIDDEN": []}}]}}`,
		`{"message": "plugin type=\"xpu-cni\" x plugin type=\"b\" HIDDEN", "reportingComponent": "kubelet"}`,
	} {
		for _, kind := range kinds {
			f.Add(kind, []byte(text), i%2 == 0)
		}
	}

	f.Fuzz(func(t *testing.T, kind string, text []byte, deep bool) {
		var object map[string]any
		if json.Unmarshal(text, &object) != nil || object == nil {
			return
		}

		const hidden = "hidden-by-fuzz"
		object["data"], object["stringData"] = hidden, map[string]any{hidden: hidden}
		if spec, isMap := object["spec"].(map[string]any); isMap && deep {
			spec["password"], spec["env"] = hidden, []any{
				map[string]any{"name": hidden, "value": hidden},
			}
		}

		shown := redact(kind, &unstructured.Unstructured{Object: object}, "xpu-system")
		out, err := json.Marshal(shown)
		must.Succeed(t, err)
		if bytes.Contains(out, []byte(hidden)) {
			t.Errorf("%s shows %s of %s", kind, out, text)
		}

		again, err := json.Marshal(redact(kind, &unstructured.Unstructured{Object: shown},
			"xpu-system"))
		must.Succeed(t, err)
		if kind != "Event" && shown != nil && !bytes.Equal(out, again) {
			t.Errorf("%s shows %s, and of that %s", kind, out, again)
		}
	})
}
