// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

const twoClusters = `apiVersion: v1
kind: Config
current-context: first
contexts:
- {name: first, context: {cluster: one, user: alice, namespace: red}}
- {name: second, context: {cluster: two, user: bob}}
clusters:
- {name: one, cluster: {server: "https://one.example"}}
- {name: two, cluster: {server: "https://two.example"}}
users:
- {name: alice, user: {token: alices}}
- {name: bob, user: {token: bobs}}
`

func TestClusterFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config")
	must.Succeed(t, os.WriteFile(file, []byte(twoClusters), 0o600))
	t.Setenv("KUBECONFIG", file)

	for name, test := range map[string]struct {
		args      []string
		want      rest.Config
		namespace string
	}{
		"none": {nil, rest.Config{Host: "https://one.example", BearerToken: "alices"}, "red"},
		"context": {
			[]string{"--context", "second"},
			rest.Config{Host: "https://two.example", BearerToken: "bobs"}, "default",
		},
		"cluster, user and namespace": {
			[]string{"--cluster=two", "--user=bob", "-n", "blue"},
			rest.Config{Host: "https://two.example", BearerToken: "bobs"}, "blue",
		},
		"server and how it is reached": {
			[]string{"-s", "https://three.example", "--tls-server-name", "name",
				"--insecure-skip-tls-verify", "--disable-compression", "--request-timeout=5s"},
			rest.Config{Host: "https://three.example", BearerToken: "alices", Timeout: 5 * time.Second,
				DisableCompression: true,
				TLSClientConfig:    rest.TLSClientConfig{Insecure: true, ServerName: "name"}}, "red",
		},
		"token": {
			[]string{"--token", "mine"},
			rest.Config{Host: "https://one.example", BearerToken: "mine"}, "red",
		},
		"another user": {
			[]string{"--as=carol", "--as-uid=7", "--as-group=a", "--as-group=b",
				"--as-user-extra=k=v=1", "--as-user-extra=k=w"},
			rest.Config{Host: "https://one.example", BearerToken: "alices",
				Impersonate: rest.ImpersonationConfig{UserName: "carol", UID: "7",
					Groups: []string{"a", "b"},
					Extra:  map[string][]string{"k": {"v=1", "w"}}}}, "red",
		},
	} {
		var f clusterFlags
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		f.addTo(flags)
		f.addNamespaceTo(flags, "")
		must.Succeed(t, flags.Parse(test.args))

		config, err := f.restConfig()
		must.Succeed(t, err)
		test.want.QPS, test.want.Burst = 50, 300
		if diff := cmp.Diff(&test.want, config, cmpopts.IgnoreUnexported(rest.Config{}),
			cmpopts.IgnoreFields(rest.Config{}, "Proxy"), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}

		namespace, err := f.namespace()
		if err != nil || namespace != test.namespace {
			t.Errorf("%s: namespace %q, %v, want %q", name, namespace, err, test.namespace)
		}
	}
}

func TestClusterFlagsErrors(t *testing.T) {
	for want, f := range map[string]clusterFlags{
		`--as-user-extra "k": must be name=value`: {userExtra: []string{"k"}},
		"missing: no such file":                   {kubeconfig: "/missing"},
	} {
		if _, err := f.restConfig(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
