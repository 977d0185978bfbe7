// SPDX-License-Identifier: Apache-2.0

package inspect_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
)

// TestSilentAgent: an agent that does not answer is named, and keeps nobody waiting.
func TestSilentAgent(t *testing.T) {
	kubelet := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
	}))
	t.Cleanup(kubelet.Close)
	t.Cleanup(kubelet.CloseClientConnections)

	pod := &corev1.Pod{ObjectMeta: named(inspect.AgentNamespace, "xpu-agent-1"),
		Spec:   corev1.PodSpec{NodeName: "node1"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	pod.Labels = map[string]string{"app.kubernetes.io/name": "xpu-agent"}
	agents := inspect.Agents{Config: &rest.Config{Host: kubelet.URL}, Reader: reader(t, pod),
		Namespace: inspect.AgentNamespace, Patience: 10 * time.Millisecond}

	failed := make(chan error, 1)
	go func() {
		_, err := agents.State(t.Context(), "node1")
		failed <- err
	}()
	select {
	case err := <-failed:
		const want = "agent of node node1: it has not answered within 10ms"
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	case <-time.After(20 * time.Second):
		t.Error("the agent is still waited for")
	}
}
