// SPDX-License-Identifier: Apache-2.0

package secure_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
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

// token creates a ServiceAccount and returns a token for it.
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

// allowMetrics allows a ServiceAccount to read metrics.
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

// TestHandler: a real API server decides which tokens can read metrics.
func TestHandler(t *testing.T) {
	cluster.Need(t)
	api, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)
	prometheus, stranger := token(t, api, "prometheus"), token(t, api, "stranger")
	gone := token(t, api, "gone")
	allowMetrics(t, api, "prometheus")
	allowMetrics(t, api, "gone")
	must.Succeed(t, api.Delete(t.Context(), &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "gone"},
	}))

	handler, err := secure.Handler(cluster.Admin(),
		monitoring.Handler(monitoring.NewRegistry("xpu-test")), testr.New(t))
	must.Succeed(t, err)
	must.Eventually(t, "the token that may is let in", func() bool {
		return status(handler, "/metrics", "Bearer "+prometheus) == http.StatusOK
	})

	for name, test := range map[string]struct {
		path, authorization string
		want                int
	}{
		"may":             {"/metrics", "Bearer " + prometheus, http.StatusOK},
		"scheme in lower": {"/metrics", "bearer " + prometheus, http.StatusOK},
		"no token":        {"/metrics", "", http.StatusUnauthorized},
		"empty token":     {"/metrics", "Bearer ", http.StatusUnauthorized},
		"another scheme":  {"/metrics", "Basic " + prometheus, http.StatusUnauthorized},
		"no scheme":       {"/metrics", prometheus, http.StatusUnauthorized},
		"no such token":   {"/metrics", "Bearer nonsense", http.StatusUnauthorized},
		"cut off": {
			"/metrics", "Bearer " + prometheus[:len(prometheus)-9], http.StatusUnauthorized,
		},
		"account is gone": {"/metrics", "Bearer " + gone, http.StatusUnauthorized},
		"may not":         {"/metrics", "Bearer " + stranger, http.StatusForbidden},
		"another path":    {"/metrics/more", "Bearer " + prometheus, http.StatusForbidden},
	} {
		if got := status(handler, test.path, test.authorization); got != test.want {
			t.Errorf("%s: status %d, want %d", name, got, test.want)
		}
	}
}

// TestReviewsRefused: no client can read metrics if the API server refuses the reviews.
func TestReviewsRefused(t *testing.T) {
	cluster.Need(t)
	api, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)
	reader := token(t, api, "reader")
	allowMetrics(t, api, "reader")
	config := rest.AnonymousClientConfig(cluster.Admin())
	config.BearerToken = token(t, api, "undelegated")

	handler, err := secure.Handler(config, http.NotFoundHandler(), testr.New(t))
	must.Succeed(t, err)
	if got := status(handler, "/metrics", "Bearer "+reader); got != http.StatusInternalServerError {
		t.Errorf("status %d, want %d", got, http.StatusInternalServerError)
	}
}

// status returns the status of the answer to a GET with this Authorization header.
func status(handler http.Handler, path, authorization string) int {
	request := httptest.NewRequest(http.MethodGet, path, nil)
	if authorization != "" {
		request.Header.Set("Authorization", authorization)
	}
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, request)
	return answer.Code
}

// TestCertificate checks that files of a directory are used, and reloaded after they change.
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
	address := serve(t, dir)
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

// serve answers every request with 404, with the certificate of a directory.
func serve(t *testing.T, dir string) (address string) {
	t.Helper()
	certificate, err := secure.OpenCertificate(dir)
	must.Succeed(t, err)
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	t.Cleanup(must.Run(t, certificate.Follow))
	t.Cleanup(must.Run(t, func(ctx context.Context) error {
		return monitoring.Serve(ctx, certificate.Listener(inner), http.NotFoundHandler(),
			logr.Discard())
	}))
	return inner.Addr().String()
}
