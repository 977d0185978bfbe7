// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// newerCluster is an API server of Kubernetes 1.99 with a node and a pod that is left to xpuctl. It
// counts bindings.
type newerCluster struct{ bound atomic.Int32 }

func (n *newerCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	lists := map[string]string{
		"nodes": "Node", "namespaces": "Namespace", "pods": "Pod", "deviceclasses": "DeviceClass",
		"resourceslices": "ResourceSlice", "devicetaintrules": "DeviceTaintRule",
		"resourceclaimtemplates": "ResourceClaimTemplate", "resourceclaims": "ResourceClaim",
	}
	items := map[string]string{
		"nodes": `{"metadata": {"name": "node1"}}`,
		"pods": `{"metadata": {"name": "web", "namespace": "default", "uid": "1"},
			"spec": {"schedulerName": "xpuctl", "containers": [{"name": "web", "image": "web"}]}}`,
	}

	w.Header().Set("Content-Type", "application/json")
	name := filepath.Base(r.URL.Path)
	group := strings.TrimPrefix(filepath.Dir(r.URL.Path), "/api")
	switch {
	case name == "version":
		fmt.Fprint(w, `{"major": "1", "minor": "99", "gitVersion": "v1.99.1"}`)
	case name == "binding":
		n.bound.Add(1)
		fmt.Fprint(w, `{"apiVersion": "v1", "kind": "Status", "status": "Success"}`)
	case lists[name] != "":
		fmt.Fprintf(w, `{"apiVersion": "%s", "kind": "%sList", "items": [%s]}`,
			strings.TrimLeft(group, "s/"), lists[name], items[name])
	default:
		http.NotFound(w, r)
	}
}

// TestApplyToNewerKubernetes: what a newer scheduler would do is unknown, so nothing is bound unless
// the user names the version as whose scheduler xpuctl is to decide.
func TestApplyToNewerKubernetes(t *testing.T) {
	cluster := &newerCluster{}
	server := httptest.NewServer(cluster)
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "config")
	must.Succeed(t, os.WriteFile(file, fmt.Appendf(nil, `{apiVersion: v1, kind: Config,
		current-context: c, contexts: [{name: c, context: {cluster: c}}],
		clusters: [{name: c, cluster: {server: %q}}]}`, server.URL), 0o600))

	for _, version := range []string{"", "v1.98.0"} {
		out, _, err := run("", "schedule", "--apply", "--kubeconfig", file, "--kubernetes", version)
		if err == nil || !strings.Contains(err.Error(), "is newer than this program") ||
			!strings.Contains(err.Error(), "--kubernetes 1.37") {
			t.Errorf("--kubernetes %q: %v", version, err)
		}
		if bound := cluster.bound.Load(); bound != 0 || out != "" {
			t.Errorf("--kubernetes %q: %d pods are bound; output %q", version, bound, out)
		}
	}

	out, _, err := run("", "schedule", "--apply", "--kubeconfig", file, "--kubernetes", "1.37")
	if bound := cluster.bound.Load(); err != nil || bound != 1 {
		t.Errorf("--kubernetes 1.37: %v, %d pods are bound, want 1; output\n%s", err, bound, out)
	}
}
