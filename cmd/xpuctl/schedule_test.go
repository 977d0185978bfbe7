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

// TestFlagsBeforeTheCluster: a flag that is wrong whatever the cluster has is refused before the
// cluster is asked, which may take minutes.
func TestFlagsBeforeTheCluster(t *testing.T) {
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		(&newerCluster{}).ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	for _, test := range []struct{ says, command string }{
		{"must be like 1.37", "schedule --kubernetes abc"},
		{"the oldest is 1.34", "schedule --kubernetes 1.20"},
		{"is newer than this program", "schedule --apply --kubernetes v1.98.0"},
		{"unrecognized feature gate: Wings", "schedule --feature-gates Wings=true"},
		{"must be PLACE:KEY", "schedule --taint node1"},
		{"has no key", "schedule --taint node=node1::NoSchedule"},
		{"must be NoSchedule, PreferNoSchedule", "schedule --taint node=node1:down:Never"},
		{"must be None, NoSchedule", "schedule --taint driver=a:down:Never"},
		{`place "rack=1"`, "schedule --taint rack=1:down:NoSchedule"},
		{"the kind must be one of", "schedule --remove rack/1"},
		{"the number must be 1-1000", "schedule --template-node node1=many"},
		{"unrecognized feature gate: Wings", "explain pod web --feature-gates Wings=true"},
		{"unrecognized feature gate: Wings", "dashboard --feature-gates Wings=true"},
		{"must be card, node, pf or xpu", "cordon rack 1"},
	} {
		t.Run(test.command, func(t *testing.T) {
			_, _, err := run("", append(strings.Fields(test.command), "--server", server.URL)...)
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %v, want %q", err, test.says)
			}
			if n := asked.Swap(0); n > 0 {
				t.Errorf("the cluster was asked %d times", n)
			}
		})
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
