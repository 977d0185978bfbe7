// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// kubeconfig writes a file with one context, "test".
func kubeconfig(t *testing.T, config *rest.Config) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	must.Succeed(t, clientcmd.WriteToFile(clientcmdapi.Config{
		CurrentContext: "test",
		Contexts:       map[string]*clientcmdapi.Context{"test": {Cluster: "test", AuthInfo: "test"}},
		Clusters: map[string]*clientcmdapi.Cluster{"test": {
			Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"test": {
			ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}},
	}, file))
	return file
}

// TestCompletion: the shell completes what the cluster has.
func TestCompletion(t *testing.T) {
	cluster, err := kubeapitest.Start("../../deploy")
	must.Succeed(t, err)
	cluster.Need(t)
	t.Cleanup(func() { must.Succeed(t, cluster.Stop()) })
	admin, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)
	named := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }
	for _, o := range []client.Object{
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: corev1.PodSpec{AutomountServiceAccountToken: new(bool),
				Containers: []corev1.Container{{Name: "web", Image: "web"}}}},
		&v1alpha1.XPUNode{ObjectMeta: named("node1"), Status: v1alpha1.XPUNodeStatus{
			PFs: []v1alpha1.XPUNodePF{{Address: "0000:3b:00.0", Serial: "MT1"}}}},
		&v1alpha1.XPU{ObjectMeta: named("dpu-1"), Spec: v1alpha1.XPUSpec{NodeName: "node1",
			Endpoint: "10.0.0.1:50151", Insecure: true}},
		&v1alpha1.XPUNetwork{ObjectMeta: named("blue"), Spec: v1alpha1.XPUNetworkSpec{VLAN: 10,
			AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll}}},
	} {
		must.Succeed(t, admin.Create(t.Context(), o))
	}

	t.Setenv("KUBECONFIG", kubeconfig(t, cluster.Admin()))
	for _, test := range []struct{ line, want string }{
		{"explain pod ", "web"},
		{"explain pod -n kube-system ", ""},
		{"explain pod -n ", "default kube-node-lease kube-public kube-system xpu-system"},
		{"explain pod web ", ""},
		{"test --network ", "blue"},
		{"test --nodes ", "node1"},
		{"discover --node ", "node1"},
		{"release ", "node1 xpu/dpu-1"},
		{"cordon ", "card node pf xpu"},
		{"cordon xpu ", "dpu-1"},
		{"cordon card ", "MT1"},
		{"uncordon pf ", "node1/0000:3b:00.0"},
		{"pools --context ", "test"},
		{"explain pod --kubeconfig /none ", ""},
	} {
		out, _, err := run("", append([]string{"__complete"}, strings.Split(test.line, " ")...)...)
		must.Succeed(t, err)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		if got := strings.Join(lines[:len(lines)-1], " "); got != test.want {
			t.Errorf("%q is completed with %q, want %q", test.line, got, test.want)
		}
	}
}
