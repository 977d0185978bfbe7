// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// started serves until the test ends, on an address that it returns.
func started(t *testing.T, certDir string) (*Server, string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	s := New(Options{CertDir: certDir, Registerer: prometheus.NewRegistry(), Log: testr.New(t)})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.serve(ctx, listener) }()

	t.Cleanup(func() {
		cancel()
		must.Succeed(t, <-ended)
	})

	return s, listener.Addr().String()
}

func issue(t *testing.T, dir string, authority *opitest.Authority) {
	t.Helper()
	cert, key := authority.Issue(t, "localhost")
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "tls.crt"), cert, 0o600))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "tls.key"), key, 0o600))
}

// clientOf trusts the authority and connects for each request.
func clientOf(authority *opitest.Authority) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, ExpectContinueTimeout: time.Minute,
		TLSClientConfig: &tls.Config{RootCAs: authority.Pool(), ServerName: "localhost"},
	}}
}

func review(t *testing.T) []byte {
	t.Helper()
	wrong := request(t, "resourceclaims", newClaim("a", parameters(v1alpha1.GroupName, `"mtu":9`)), nil)
	text, err := json.Marshal(admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request:  &wrong.AdmissionRequest,
	})
	must.Succeed(t, err)
	return text
}

// TestCertificates checks that the server starts without a certificate, uses new ones at once, and
// goes on with the last one while the files are wrong.
func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	_, address := started(t, dir)
	first, second := opitest.NewAuthority(t), opitest.NewAuthority(t)
	ask := func(authority *opitest.Authority) error {
		answer, err := clientOf(authority).Post("https://"+address+Path, "application/json",
			bytes.NewReader(review(t)))
		if err != nil {
			return err
		}
		defer answer.Body.Close()

		var r admissionv1.AdmissionReview
		must.Succeed(t, json.NewDecoder(answer.Body).Decode(&r))
		if r.Response == nil || r.Response.Allowed || r.Response.UID != "review" {
			t.Errorf("answer %+v", r.Response)
		}
		return nil
	}

	if err := ask(first); err == nil {
		t.Fatal("is answered without a certificate")
	}

	issue(t, dir, first)
	must.Succeed(t, ask(first))
	issue(t, dir, second)
	must.Succeed(t, ask(second))
	if err := ask(first); err == nil {
		t.Error("the old certificate is still used")
	}

	must.Succeed(t, os.WriteFile(filepath.Join(dir, "tls.key"), []byte("nonsense"), 0o600))
	must.Succeed(t, ask(second))
}

// TestBounds checks what the server takes of clients, who may be anyone.
func TestBounds(t *testing.T) {
	dir, authority := t.TempDir(), opitest.NewAuthority(t)
	issue(t, dir, authority)
	s, address := started(t, dir)
	c := clientOf(authority)

	for length, want := range map[int64]int{
		maxBody + 1: http.StatusRequestEntityTooLarge, -1: http.StatusLengthRequired,
		0: http.StatusBadRequest,
	} {
		large, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+address+Path,
			io.LimitReader(endless{}, max(length, 1)))
		must.Succeed(t, err)
		if large.ContentLength = length; length == 0 {
			large.Body = http.NoBody
		}
		// Otherwise the server may end the connection before the client has read the answer.
		large.Header.Set("Expect", "100-continue")
		answer, err := c.Do(large)
		if err != nil {
			t.Errorf("a body with length %d: %v", length, err)
			continue
		}
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("a body with length %d: %s, want %d", length, answer.Status, want)
		}
	}

	answer, err := c.Get("https://" + address + Path)
	must.Succeed(t, err)
	answer.Body.Close()
	if answer.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("GET: %s", answer.Status)
	}

	// All turns are taken: the next waits, and goes when its client does.
	for range maxReviews {
		s.turns <- struct{}{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	waits, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+address+Path,
		bytes.NewReader(review(t)))
	must.Succeed(t, err)
	waits.Header.Set("Content-Type", "application/json")
	result := make(chan error, 1)
	go func() {
		answer, err := c.Do(waits)
		if err == nil {
			answer.Body.Close()
		}
		result <- err
	}()

	select {
	case err := <-result:
		t.Fatalf("is answered out of turn: %v", err)
	default:
	}
	cancel()
	if err := <-result; err == nil {
		t.Error("is answered though its client went")
	}

	<-s.turns
	answer, err = c.Post("https://"+address+Path, "application/json", bytes.NewReader(review(t)))
	must.Succeed(t, err)
	answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Errorf("in turn again: %s", answer.Status)
	}
}

// endless is a reader without end.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}
