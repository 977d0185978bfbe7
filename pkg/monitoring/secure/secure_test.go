// SPDX-License-Identifier: Apache-2.0

package secure_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring/secure"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var cluster *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, "../../../deploy", func(c *kubeapitest.Cluster) { cluster = c }))
}

// token makes a ServiceAccount and a token of it.
func token(t *testing.T, api client.Client, name string) string {
	t.Helper()
	account := &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
	}
	must.Succeed(t, api.Create(t.Context(), account))
	request := &authenticationv1.TokenRequest{}
	must.Succeed(t, api.SubResource("token").Create(t.Context(), account, request))
	return request.Status.Token
}

// allowMetrics lets a ServiceAccount read metrics.
func allowMetrics(t *testing.T, api client.Client, account string) {
	t.Helper()
	must.Succeed(t, api.Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		Rules: []rbacv1.PolicyRule{
			{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}},
		},
	}))

	must.Succeed(t, api.Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: account},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: account}},
	}))
}

// TestHandler: whoever may get /metrics may read them.
func TestHandler(t *testing.T) {
	cluster.Need(t)
	api, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)
	prometheus, stranger := token(t, api, "prometheus"), token(t, api, "stranger")
	allowMetrics(t, api, "prometheus")
	handler, err := secure.Handler(cluster.Admin(),
		monitoring.Handler(monitoring.NewRegistry("xpu-test")), testr.New(t))
	must.Succeed(t, err)
	address, trust := serve(t, "", handler)

	get := func(token string) int {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			"https://"+address+"/metrics", nil)
		must.Succeed(t, err)

		if token != "" {
			request.Header.Set("Authorization", "Bearer "+token)
		}

		transport := &http.Transport{TLSClientConfig: trust}
		defer transport.CloseIdleConnections()

		response, err := (&http.Client{Transport: transport}).Do(request)
		must.Succeed(t, err)
		must.Succeed(t, response.Body.Close())

		return response.StatusCode
	}

	for name, test := range map[string]struct {
		token string
		want  int
	}{
		"no token": {"", http.StatusUnauthorized},
		// as controller-runtime's filter has it
		"no such token": {"nonsense", http.StatusInternalServerError},
		"may not":       {stranger, http.StatusForbidden},
	} {
		if got := get(test.token); got != test.want {
			t.Errorf("%s: status %d, want %d", name, got, test.want)
		}
	}

	must.Eventually(t, "the token that may is let in", func() bool {
		return get(prometheus) == http.StatusOK
	})
}

// TestCertificate: the files of a directory are used, and new ones after they changed.
func TestCertificate(t *testing.T) {
	dir := t.TempDir()
	first, second := opitest.NewAuthority(t), opitest.NewAuthority(t)

	issue := func(by *opitest.Authority) {
		cert, key := by.Issue(t, "127.0.0.1")
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "tls.crt"), cert, 0o600))
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "tls.key"), key, 0o600))
	}

	if _, err := secure.OpenCertificate(dir); err == nil {
		t.Error("a directory without a certificate is no error")
	}

	issue(first)
	address, _ := serve(t, dir, http.NotFoundHandler())
	trusts := func(pool *x509.CertPool) bool {
		conn, err := tls.Dial("tcp", address, &tls.Config{RootCAs: pool})
		if err == nil {
			must.Succeed(t, conn.Close())
		}
		return err == nil
	}

	if !trusts(first.Pool()) {
		t.Error("the certificate is not that of the directory")
	}

	issue(second)
	must.Eventually(t, "the new certificate is served", func() bool {
		return trusts(second.Pool())
	})
}

// serve serves the handler. A client with the configuration that it returns trusts whatever
// certificate there is.
func serve(t *testing.T, dir string, handler http.Handler) (address string, trust *tls.Config) {
	t.Helper()
	certificate, err := secure.OpenCertificate(dir)
	must.Succeed(t, err)
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	t.Cleanup(must.Run(t, certificate.Follow))
	t.Cleanup(must.Run(t, func(ctx context.Context) error {
		return monitoring.Serve(ctx, certificate.Listener(inner), handler, logr.Discard())
	}))

	// #nosec G402 -- self-signed
	return inner.Addr().String(), &tls.Config{InsecureSkipVerify: true}
}
