// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	"sigs.k8s.io/multicluster-runtime/pkg/multicluster"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// hostile is a tenant's API server without objects. A test can override its answers. Safe for
// concurrent use.
type hostile struct {
	*httptest.Server
	requests, lists, watches, leases atomic.Int64
}

// handlerOverride answers a request, or returns false to leave it to the server.
type handlerOverride func(http.ResponseWriter, *http.Request) (answered bool)

func newHostile(t *testing.T, instead handlerOverride) *hostile {
	t.Helper()
	h := &hostile{}
	h.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.requests.Add(1)
		switch {
		case isLease(r):
			h.leases.Add(1)
		case isWatch(r):
			h.watches.Add(1)
		case r.Method == http.MethodGet:
			h.lists.Add(1)
		}

		if instead != nil && instead(w, r) {
			return
		}

		w.Header().Set("Content-Type", "application/json")
		switch {
		case isLease(r):
			lease := coordinationv1.Lease{
				TypeMeta: metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"},
			}
			lease.Namespace, lease.Name, lease.ResourceVersion = systemNamespace, v1alpha1.BrokerLease, "1"
			_ = json.NewEncoder(w).Encode(lease)
		case isWatch(r):
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			_, _ = io.WriteString(w, emptyList(r))
		}
	}))

	t.Cleanup(func() {
		h.CloseClientConnections()
		h.Close()
	})

	return h
}

func isWatch(r *http.Request) bool { return r.URL.Query().Get("watch") != "" }

// kindAt returns the kind that a list or watch requests.
func kindAt(r *http.Request) string {
	plural := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	return map[string]string{
		"xpuports": "XPUPort", "xpunetworks": "XPUNetwork", "xpunodes": "XPUNode", "xpus": "XPU",
	}[plural]
}

func emptyList(r *http.Request) string { return listHead(r) + "]}" }

// listHead returns the JSON of a list up to its first item.
func listHead(r *http.Request) string {
	return fmt.Sprintf(
		`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"%sList","metadata":{"resourceVersion":"1"},"items":[`, kindAt(r),
	)
}

// item returns the n-th object of the requested kind, with additional fields of metadata.
func item(r *http.Request, n int, more string) string {
	namespace := ""
	if kindAt(r) == "XPUPort" {
		namespace = `"namespace":"default",`
	}
	return fmt.Sprintf(`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"%s","metadata":{%s"name":"o%d","uid":"u%d","resourceVersion":"%d"%s}}`,
		kindAt(r), namespace, n, n, n+2, more)
}

// secret returns a kubeconfig for the server.
func (h *hostile) secret(t testing.TB, tenant string) []byte {
	t.Helper()
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.Certificate().Raw})
	s := memberSecret(t, tenant, &rest.Config{
		Host: h.URL, BearerToken: "the-token-of-the-broker",
		TLSClientConfig: rest.TLSClientConfig{CAData: authority},
	})
	return s.Data["kubeconfig"]
}

// standaloneMembers are Members of an infra cluster without an API server.
type standaloneMembers struct {
	*Members
	logs *texts
}

// texts collects log messages. Safe for concurrent use.
type texts struct {
	mu  sync.Mutex
	all []string
}

func (l *texts) add(prefix, args string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, prefix+args)
}

// longest returns the length of the longest message.
func (l *texts) longest() (most int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, text := range l.all {
		most = max(most, len(text))
	}
	return most
}

type noopAware struct{}

func (noopAware) Engage(context.Context, multicluster.ClusterName, cluster.Cluster) error {
	return nil
}

// hostileRenewPeriod is the RenewPeriod of standalone members. The pause between two renewals is at
// least nine tenths of it.
const hostileRenewPeriod = 100 * time.Millisecond

func newStandaloneMembers(t *testing.T, o Options) *standaloneMembers {
	t.Helper()
	m := &standaloneMembers{Members: NewMembers(), logs: &texts{}}
	o.RenewPeriod, o.JoinTimeout, o.RequestTimeout = hostileRenewPeriod, 5*time.Second, 2*time.Second
	o.setDefaults()
	m.Options, m.scheme, m.metrics = o, brokerScheme(t), newMetrics(prometheus.NewRegistry())
	m.log = funcr.New(m.logs.add, funcr.Options{Verbosity: 1})
	m.onJoin, m.onChange = func(string) {}, func(string) {}
	ctx, cancel := context.WithCancel(context.Background())
	m.ctx, m.aware = ctx, noopAware{}
	t.Cleanup(func() {
		cancel()
		m.mu.Lock()
		all := slices.Collect(maps.Values(m.byTenant))
		m.mu.Unlock()
		for _, known := range all {
			<-known.stopped
		}
	})

	return m
}

// joinServer makes the server the tenant's cluster.
func (m *standaloneMembers) joinServer(t testing.TB, tenant string, h *hostile) {
	t.Helper()
	content := h.secret(t, tenant)
	m.join(tenant, credentials{
		origin: "the kubeconfig of Secret " + tenant, content: content,
		config: func() (*rest.Config, string, error) { return clientConfig(content) },
	}, "")
}

// waitFor waits until the state of a tenant's cluster has the reason.
func (m *standaloneMembers) waitFor(t testing.TB, tenant, reason string) memberState {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		state := m.state(tenant)
		if state.reason == reason {
			if len(state.message) > maxText {
				t.Errorf("the message has %d bytes", len(state.message))
			}
			return state
		}

		if time.Now().After(end) {
			t.Fatalf("tenant %s is %+v, want %s", tenant, state, reason)
		}
	}
}

// TestNoMetricsOfTenantThatLeft: a tenant leaves while its API server does not answer. The call
// that ends then brings no series of the tenant back.
func TestNoMetricsOfTenantThatLeft(t *testing.T) {
	m := newStandaloneMembers(t, Options{})
	asked := make(chan struct{}, 1)
	h := newHostile(t, func(_ http.ResponseWriter, r *http.Request) bool {
		select {
		case asked <- struct{}{}:
		default:
		}
		<-r.Context().Done()
		return true
	})

	m.joinServer(t, "a", h)
	<-asked
	m.mu.Lock()
	known := m.byTenant["a"]
	m.mu.Unlock()
	m.leave("a")
	<-known.stopped

	for name, metric := range map[string]prometheus.Collector{
		"renewal": m.metrics.renewal, "connected": m.metrics.connected,
	} {
		if n := testutil.CollectAndCount(metric); n != 0 {
			t.Errorf("%s has %d series", name, n)
		}
	}
}

// TestOrdinaryServer checks that a correct API server is joined.
func TestOrdinaryServer(t *testing.T) {
	m := newStandaloneMembers(t, Options{})
	asked := make(chan string, 1000)
	h := newHostile(t, func(_ http.ResponseWriter, r *http.Request) bool {
		select {
		case asked <- r.URL.String():
		default:
		}
		return false
	})

	m.joinServer(t, "a", h)
	m.waitFor(t, "a", v1alpha1.ReasonConnected)

	for range len(asked) {
		url := <-asked
		known := strings.Contains(url, "/leases") ||
			strings.HasPrefix(url, "/apis/xpu.opiproject.org/v1alpha1/xpu")
		if !known || strings.Contains(url, "sendInitialEvents") {
			t.Errorf("it was asked for %s", url)
		}
	}
}

// TestRedirectedMember checks that the broker follows no redirect, which would send its token
// elsewhere.
func TestRedirectedMember(t *testing.T) {
	var reached atomic.Int64
	inside := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		reached.Add(1)
	}))
	defer inside.Close()

	for _, code := range []int{301, 302, 303, 307, 308} {
		for what, when := range map[string]func(*http.Request) bool{
			"Lease": isLease, "list": func(r *http.Request) bool {
				return !isLease(r) &&
					!isWatch(r)
			}, "watch": isWatch,
		} {
			t.Run(fmt.Sprint(code, what), func(t *testing.T) {
				t.Parallel()
				h := newHostile(t, func(w http.ResponseWriter, r *http.Request) bool {
					if when(r) {
						http.Redirect(w, r, inside.URL+"/latest/meta-data", code)
					}
					return when(r)
				})

				m := newStandaloneMembers(t, Options{})
				m.joinServer(t, "a", h)
				state := m.waitFor(t, "a", v1alpha1.ReasonInvalidAnswer)
				if !strings.Contains(state.message, "tenant a") ||
					!strings.Contains(state.message, "redirect") {
					t.Errorf("message %q", state.message)
				}
				if n := reached.Load(); n > 0 {
					t.Errorf("%d requests went where the API server sent them", n)
				}
			})
		}
	}
}

// TestEndlessMember checks that the broker stops reading an endless answer, and that the XPUTenant
// names the limit.
func TestEndlessMember(t *testing.T) {
	endless := func(w io.Writer, r *http.Request, head string, next func(n int) string) {
		_, _ = io.WriteString(w, head)
		for n := 0; r.Context().Err() == nil; n++ {
			if _, err := io.WriteString(w, next(n)); err != nil {
				return
			}
		}
	}

	isList := func(r *http.Request) bool { return !isLease(r) && !isWatch(r) }
	blank := strings.Repeat(" ", 1<<16)
	for name, test := range map[string]struct {
		when func(*http.Request) bool
		do   func(http.ResponseWriter, *http.Request)
		text string
	}{
		"list": {isList, func(w http.ResponseWriter, r *http.Request) {
			endless(w, r, listHead(r), func(n int) string { return item(r, n, "") + "," })
		}, "more than 200 objects"},
		"list of nothing": {isList, func(w http.ResponseWriter, r *http.Request) {
			endless(w, r, listHead(r), func(int) string { return "{}," })
		}, "more than 200 objects"},
		"objects in an object": {isList, func(w http.ResponseWriter, r *http.Request) {
			endless(w, r, listHead(r)+`{"status":{"pfs":[`, func(int) string { return "{}," })
		}, "JSON objects"},
		"text": {isList, func(w http.ResponseWriter, r *http.Request) {
			endless(w, r, listHead(r)+`{"metadata":{"name":"`, func(int) string { return blank })
		}, "more than 1048576 bytes"},
		"length": {isList, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "99999999999")
		}, "more than 1048576 bytes"},
		"pages": {isList, func(w http.ResponseWriter, r *http.Request) {
			var from int
			_, _ = fmt.Sscan(r.URL.Query().Get("continue"), &from)
			var items []string
			for n := range 50 {
				items = append(items, item(r, from+n, ""))
			}

			head := strings.Replace(listHead(r), `"1"`, fmt.Sprintf(`"1","continue":"%d"`, from+50),
				1)
			_, _ = io.WriteString(w, head+strings.Join(items, ",")+"]}")
		}, "more than 300 XPU"},
		"empty pages": {isList, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w,
				strings.Replace(emptyList(r), `"1"`, `"1","continue":"more"`, 1))
		}, "empty page"},
		"event": {isWatch, func(w http.ResponseWriter, r *http.Request) {
			endless(w, r, `{"type":"ADDED","object":{"metadata":{"name":"`, func(int) string {
				return blank
			})
		}, "more than 1048576 bytes"},
		"events": {isWatch, func(w http.ResponseWriter, r *http.Request) {
			endless(w, r, "", func(n int) string {
				return `{"type":"ADDED","object":` +
					item(r, n, "") + "}\n"
			})
		}, "more than 300 XPU"},
		"Lease": {isLease, func(w http.ResponseWriter, r *http.Request) {
			endless(w, r,
				`{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"`,
				func(int) string { return blank })
		}, "more than 1048576 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHostile(t, func(w http.ResponseWriter, r *http.Request) bool {
				if !test.when(r) {
					return false
				}
				w.Header().Set("Content-Type", "application/json")
				test.do(w, r)
				return true
			})

			before := heap()
			m := newStandaloneMembers(t,
				Options{Limits: Limits{Objects: 300, AnswerBytes: 1 << 20}})
			m.joinServer(t, "a", h)

			state := m.waitFor(t, "a",
				map[bool]string{
					true: v1alpha1.ReasonInvalidAnswer, false: v1alpha1.ReasonLimitExceeded,
				}[name == "empty pages"])
			if !strings.Contains(state.message, "tenant a") ||
				!strings.Contains(state.message, test.text) {
				t.Errorf("message %q, want %q", state.message, test.text)
			}
			if used := heap() - before; used > 64<<20 {
				t.Errorf("it took %d MB", used>>20)
			}
		})
	}
}

// heap returns how many bytes of heap are in use.
func heap() int64 {
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// TestMemberEndsWithItsTenant checks that requests end with the membership, even if an answer is
// still arriving.
func TestMemberEndsWithItsTenant(t *testing.T) {
	var open atomic.Int64
	h := newHostile(t, func(w http.ResponseWriter, r *http.Request) bool {
		if isLease(r) {
			return false
		}

		open.Add(1)
		defer open.Add(-1)

		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, listHead(r))

		for r.Context().Err() == nil {
			_, _ = io.WriteString(w, " ")
			w.(http.Flusher).Flush()
			time.Sleep(time.Millisecond)
		}

		return true
	})

	m := newStandaloneMembers(t, Options{})
	m.joinServer(t, "a", h)

	for open.Load() == 0 {
		time.Sleep(time.Millisecond)
	}

	m.leave("a")
	for end := time.Now().Add(5 * time.Second); open.Load() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d requests go on", open.Load())
		}
	}
}

// TestRestlessMember checks that an API server which makes the broker retry is asked at a limited
// rate.
func TestRestlessMember(t *testing.T) {
	conflict := func(w http.ResponseWriter, retry string) {
		w.Header().Set("Content-Type", "application/json")
		if retry != "" {
			w.Header().Set("Retry-After", retry)
		}
		w.WriteHeader(http.StatusConflict)
		_, _ = io.WriteString(w,
			`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Conflict","code":409,"message":"again"}`)
	}
	for name, test := range map[string]struct {
		do   handlerOverride
		most func(h *hostile, elapsed time.Duration) (asked, most int64)
	}{
		"Lease conflicts": {func(w http.ResponseWriter, r *http.Request) bool {
			if isLease(r) && r.Method != http.MethodGet {
				conflict(w, "")
				return true
			}
			return false
		}, func(h *hostile, elapsed time.Duration) (int64, int64) {
			return h.leases.Load(), int64(elapsed/(hostileRenewPeriod*9/10)+2) * 2 * leaseAttempts
		}},
		"watches that end at once": {func(w http.ResponseWriter, r *http.Request) bool {
			if isWatch(r) {
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, `{"type":"BOOKMARK","object":`+item(r, 1, "")+"}\n")
			}
			return isWatch(r)
		}, func(h *hostile, elapsed time.Duration) (int64, int64) {
			return h.watches.Load(), 4 * (watchBurst + int64(elapsed/watchPace) + 2)
		}},
		"watches that are too old": {func(w http.ResponseWriter, r *http.Request) bool {
			if isWatch(r) {
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(http.StatusGone)
				_, _ = io.WriteString(w,
					`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}`)
			}
			return isWatch(r)
		}, func(h *hostile, elapsed time.Duration) (int64, int64) {
			return h.watches.Load() + h.lists.Load(),
				4 * 2 * (watchBurst + int64(elapsed/watchPace) + 2)
		}},
		"again at once": {func(w http.ResponseWriter, r *http.Request) bool {
			if !isLease(r) {
				w.Header().Set("Retry-After", "0")
				w.WriteHeader(http.StatusTooManyRequests)
			}
			return !isLease(r)
		}, func(h *hostile, elapsed time.Duration) (int64, int64) {
			return h.watches.Load() + h.lists.Load(), 4 * 3 * int64(elapsed/time.Second+1)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHostile(t, test.do)
			m := newStandaloneMembers(t, Options{})
			begin := time.Now()
			m.joinServer(t, "a", h)
			time.Sleep(2 * time.Second) // the time for which requests are counted
			asked, _ := test.most(h, 0)
			elapsed := time.Since(begin)
			if _, most := test.most(h, elapsed); asked == 0 || asked > most {
				t.Errorf("it was asked %d times in %s, want %d at most", asked, elapsed, most)
			}
		})
	}
}

// TestLongTextsOfMember checks that texts of a tenant's API server are shortened in statuses and
// logs.
func TestLongTextsOfMember(t *testing.T) {
	long := strings.Repeat("x\x1b[2J\n", 8000)
	quoted, err := json.Marshal(long)
	if err != nil {
		t.Fatal(err)
	}

	failure := fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%s,"code":403,"message":%s,`+
		`"details":{"name":%s,"kind":%s,"causes":[{"message":%s}]}}`, quoted, quoted, quoted,
		quoted, quoted)
	for name, test := range map[string]struct {
		reason string
		do     handlerOverride
	}{
		"failure": {v1alpha1.ReasonUnauthorized, func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(w, failure)
			return true
		}},
		"failure that is no JSON": {v1alpha1.ReasonUnreachable,
			func(w http.ResponseWriter, r *http.Request) bool {
				w.Header().Set("Content-Type", "text/html")
				w.WriteHeader(http.StatusInternalServerError)
				_, _ = io.WriteString(w, long)
				return true
			}},
		"failure that is answered as success": {v1alpha1.ReasonUnauthorized,
			func(w http.ResponseWriter, r *http.Request) bool {
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w,
					strings.Replace(failure, `"reason":`+string(quoted), `"reason":"Forbidden"`, 1))
				return true
			}},
		"kind": {v1alpha1.ReasonUnreachable, func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprintf(w, `{"kind":%s,"apiVersion":%s}`, quoted, quoted)
			return true
		}},
		"holder": {v1alpha1.ReasonConflict, func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprintf(w,
				`{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"xpu-broker",`+
					`"resourceVersion":"1"},"spec":{"holderIdentity":%s}}`, quoted)
			return true
		}},
		"content type": {v1alpha1.ReasonInvalidAnswer,
			func(w http.ResponseWriter, r *http.Request) bool {
				w.Header().Set("Content-Type", strings.Repeat("x", 40000))
				_, _ = io.WriteString(w, "{}")
				return true
			}},
		"warning": {v1alpha1.ReasonConnected, func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Warning", `299 - "`+strings.Repeat("x", 40000)+`"`)
			return false
		}},
		"name": {v1alpha1.ReasonInvalidAnswer, func(w http.ResponseWriter, r *http.Request) bool {
			if isLease(r) || isWatch(r) {
				return false
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w,
				listHead(r)+strings.Replace(item(r, 1, ""), `"o1"`, string(quoted), 1)+"]}")
			return true
		}},
		"event": {v1alpha1.ReasonConnected, func(w http.ResponseWriter, r *http.Request) bool {
			if isWatch(r) {
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, `{"type":"ERROR","object":`+failure+`}`)
			}
			return isWatch(r)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newStandaloneMembers(t, Options{})
			m.joinServer(t, "a", newHostile(t, test.do))
			state := m.waitFor(t, "a", test.reason)
			if strings.ContainsAny(state.message, "\x1b\n") {
				t.Errorf("message %q", state.message)
			}
			if n := m.logs.longest(); n > 2*maxText {
				t.Errorf("a line of the log has %d bytes", n)
			}
		})
	}
}
