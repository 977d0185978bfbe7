// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestMemory checks that no request makes the server allocate much, because its memory is limited
// (deploy/controller/deployment.yaml) and anyone who reaches the port may send requests.
func TestMemory(t *testing.T) {
	// In bytes, garbage included. What the API takes has to be judged, and makes garbage.
	const most, mostOfFull = 16 << 20, 192 << 20
	many := func(front, entry, end string) string { // as long as a body may be
		n := (maxBody - len(front) - len(end) - 500) / (len(entry) + 1)
		return front + strings.Repeat(entry+",", n-1) + entry + end
	}
	longest := func(list, entry string) string { // parameters as long as the API takes them
		n := (resourceapi.OpaqueParametersMaxLength - 200) / (len(entry) + 1)
		return fmt.Sprintf(`{"apiVersion":%q,"kind":"InterfaceConfig",%q:[%s]}`,
			v1alpha1.SchemeGroupVersion, list, strings.Repeat(entry+",", n-1)+entry)
	}
	full := func(parameters string) string { // a claim with as much as the API takes
		config := fmt.Sprintf(`{"opaque":{"driver":%q,"parameters":%s}}`, v1alpha1.GroupName, parameters)
		var requests []string
		for i := range resourceapi.DeviceRequestsMaxSize {
			requests = append(requests, fmt.Sprintf(`{"name":"r%d","exactly":{}}`, i))
		}
		return `{"spec":{"devices":{"requests":[` + strings.Join(requests, ",") + `],"config":[` +
			strings.Repeat(config+",", resourceapi.DeviceConfigMaxSize-1) + config + `]}}}`
	}

	object := func(text string) string {
		return `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"a",` +
			`"operation":"CREATE","resource":{"group":"resource.k8s.io","version":"v1",` +
			`"resource":"resourceclaims"},"object":` + text + `}}`
	}
	for name, body := range map[string]string{
		"configs":      object(many(`{"spec":{"devices":{"config":[`, `{}`, `]}}}`)),
		"requests":     object(many(`{"spec":{"devices":{"requests":[`, `{}`, `]}}}`)),
		"nulls":        object(many(`{"spec":{"devices":{"requests":[`, `0`, `]}}}`)),
		"constraints":  object(many(`{"spec":{"devices":{"constraints":[`, `{}`, `]}}}`)),
		"names":        object(many(`{"spec":{"devices":{"config":[{"requests":[`, `""`, `]}]}}}`)),
		"alternatives": object(many(`{"spec":{"devices":{"requests":[{"firstAvailable":[`, `{}`, `]}]}}}`)),
		"class":        object(many(`{"spec":{"config":[`, `{}`, `]}}`)),
		"owners":       object(many(`{"metadata":{"ownerReferences":[`, `{}`, `]}}`)),
		"parameters": object(many(`{"spec":{"devices":{"requests":[{"name":"a","exactly":{}}],"config":[{"opaque":`+
			`{"driver":"xpu.opiproject.org","parameters":{"routes":[`, `{}`, `]}}}]}}}`)),
		"nested": object(strings.Repeat("[", maxBody/3) + strings.Repeat("]", maxBody/3)),
		"groups": many(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"a",`+
			`"userInfo":{"groups":[`, `""`, `]}}}`),
		"uid":    many(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"`, `a`, `"}}`),
		"yaml":   many(`apiVersion: admission.k8s.io/v1, kind: [`, `{}`, `]`),
		"routes": object(full(longest("routes", `{}`))), "neighbors": object(full(longest("neighbors", `{}`))),
		"rules": object(full(longest("rules", `{}`))), "networks": object(full(longest("networks", `{}`))),
		"addresses": object(full(longest("addresses", `""`))),
		"unknown fields": object(full(fmt.Sprintf(
			`{"apiVersion":%q,"kind":"InterfaceConfig"%s}`, v1alpha1.SchemeGroupVersion,
			strings.Repeat(`,"a":1`, 1500)))),
	} {
		t.Run(name, func(t *testing.T) {
			if len(body) > maxBody {
				t.Fatalf("the body has %d bytes", len(body))
			}
			s := New(Options{Registerer: prometheus.NewRegistry(), Log: testr.New(t)})
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, Path, strings.NewReader(body))
			r.Header.Set("Content-Type", "application/json")

			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			answer := httptest.NewRecorder()
			s.handler.ServeHTTP(answer, r)
			runtime.ReadMemStats(&after)
			bound := uint64(most)
			if len(body) < maxBody/2 { // what the API takes
				bound = mostOfFull
			}
			if used := after.TotalAlloc - before.TotalAlloc; used > bound {
				t.Errorf("allocates %d MiB for %d KiB", used>>20, len(body)>>10)
			}
		})
	}
}

// TestSlowClients checks that clients who do not end their requests do not keep others waiting.
func TestSlowClients(t *testing.T) {
	dir, authority := t.TempDir(), opitest.NewAuthority(t)
	issue(t, dir, authority)
	_, address := started(t, dir)

	for range maxReviews {
		conn, err := tls.Dial("tcp", address,
			&tls.Config{RootCAs: authority.Pool(), ServerName: "localhost"})
		must.Succeed(t, err)
		defer conn.Close()
		_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"+
			"Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n", Path)
		must.Succeed(t, err)
		// The server says so when it begins to read.
		line, err := bufio.NewReader(conn).ReadString('\n')
		must.Succeed(t, err)
		if line != "HTTP/1.1 100 Continue\r\n" {
			t.Fatalf("answer %q", line)
		}
	}

	c := clientOf(authority)
	c.Timeout = patience - 2*time.Second // they hold out longer
	answer, err := c.Post("https://"+address+Path, "application/json", bytes.NewReader(review(t)))
	must.Succeed(t, err)
	answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Errorf("answer %s", answer.Status)
	}
}

// TestTurnAfterPanic checks that a review that panics gives its turn back.
func TestTurnAfterPanic(t *testing.T) {
	s := New(Options{Registerer: prometheus.NewRegistry(), Log: testr.New(t)})
	s.reviewer = nil // panics
	panics := func() (panicked bool) {
		defer func() { panicked = recover() != nil }()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		request := httptest.NewRequestWithContext(ctx, http.MethodPost, Path,
			bytes.NewReader(review(t)))
		s.answer(httptest.NewRecorder(), request)
		return false
	}

	for n := range maxReviews + 1 {
		if !panics() {
			t.Fatalf("review %d had no turn", n+1)
		}
	}
}
