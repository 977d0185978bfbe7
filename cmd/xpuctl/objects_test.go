// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
)

// TestObjectsOfDirectMode: where the cluster has none of our kinds, the commands say what that means,
// and nothing of how they found it out.
func TestObjectsOfDirectMode(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch r.URL.Path {
		case "/api":
			fmt.Fprint(w, `{"kind": "APIVersions", "versions": ["v1"]}`)
		case "/apis":
			fmt.Fprint(w, `{"kind": "APIGroupList", "apiVersion": "v1", "groups": []}`)
		default:
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, `+
				`"reason": "NotFound"}`)
		}
	}))
	defer server.Close()
	file := kubeconfig(t, &rest.Config{Host: server.URL})

	for _, name := range []string{"pools", "ports", "networks", "xpus"} {
		var out bytes.Buffer
		c := command("xpuctl")
		c.SetArgs([]string{name, "--kubeconfig", file})
		err := execute(t.Context(), c, strings.NewReader(""), &out, &out)
		if err == nil || !strings.HasPrefix(err.Error(), "this cluster has no custom resources") ||
			!strings.Contains(err.Error(), "xpuctl discover --node NODE") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
