// SPDX-License-Identifier: Apache-2.0

package dashboard_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/dashboard"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/dashboard/dashboardtest"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/scripted"
)

// options returns the options for a cluster whose agents do not answer.
func options(cluster client.WithWatch) dashboard.Options {
	return dashboard.Options{
		Client: cluster, Cluster: "demo", AgentNamespace: dashboardtest.Namespace,
		State: func(context.Context, string) (*nodestate.State, error) {
			return nil, errors.New("no agent")
		},
		Explain: func(context.Context, types.NamespacedName) (*explain.Pod, error) {
			return &explain.Pod{Namespace: "shop", Name: "web", OK: true, Verdict: "nothing is wrong",
				Interfaces: []explain.Interface{{Claim: "web", Stages: []explain.Stage{}}}}, nil
		},
		Now:   dashboardtest.Start,
		Pause: time.Millisecond,
	}
}

// serve serves a page until the test ends, and returns its address with the token.
func serve(t *testing.T, o dashboard.Options) string {
	t.Helper()
	l, err := dashboard.Listen(0)
	must.Succeed(t, err)
	d := dashboard.New(o)
	must.Run(t, func(ctx context.Context) error { return d.Serve(ctx, l) })
	return d.URL(l)
}

// page is what a page has got.
type page struct {
	body    io.Closer
	lines   *bufio.Reader
	records map[string]json.RawMessage
}

func open(t *testing.T, address string) *page {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address+"events", nil)
	must.Succeed(t, err)
	answer, err := http.DefaultClient.Do(request)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = answer.Body.Close() })
	if answer.StatusCode != http.StatusOK {
		t.Fatal(answer.Status)
	}
	return &page{answer.Body, bufio.NewReader(answer.Body), map[string]json.RawMessage{}}
}

// next takes one event.
func (p *page) next(t *testing.T) string {
	t.Helper()
	event, err := p.lines.ReadString('\n')
	must.Succeed(t, err)
	data, err := p.lines.ReadString('\n')
	must.Succeed(t, err)
	_, err = p.lines.ReadString('\n')
	must.Succeed(t, err)

	var all struct {
		Set  map[string]json.RawMessage `json:"set"`
		Gone []string                   `json:"gone"`
	}
	must.Succeed(t, json.Unmarshal([]byte(strings.TrimPrefix(data, "data: ")), &all))
	for key, record := range all.Set {
		p.records[key] = record
	}
	for _, key := range all.Gone {
		delete(p.records, key)
	}
	return strings.TrimSpace(strings.TrimPrefix(event, "event: "))
}

// until takes events until a condition holds.
func (p *page) until(t *testing.T, condition func() bool) {
	t.Helper()
	patience := time.AfterFunc(time.Minute, func() { _ = p.body.Close() })
	defer patience.Stop()
	for !condition() {
		p.next(t)
	}
}

func (p *page) overview(t *testing.T) (o dashboard.Overview) {
	t.Helper()
	if text := p.records["overview"]; text != nil {
		must.Succeed(t, json.Unmarshal(text, &o))
	}
	return o
}

// untilRead takes events until all kinds have been asked for.
func (p *page) untilRead(t *testing.T) {
	t.Helper()
	p.until(t, func() bool { return p.records["overview"] != nil && !p.overview(t).Reading })
}

// TestRecords compares what the page gets of a cluster with testdata/records.json.
func TestRecords(t *testing.T) {
	cluster := dashboardtest.NewCluster(dashboardtest.Objects(7, 6)...)
	cluster.Put(dashboardtest.Pending("stuck", "0/7 nodes are available")...)
	p := open(t, serve(t, options(cluster)))
	p.untilRead(t)

	for key := range p.records { // the others are alike
		if strings.HasPrefix(key, "node/") && key != "node/node1" && key != "node/node7" ||
			strings.HasPrefix(key, "pod/") && !strings.HasSuffix(key, "node1-1") &&
				!strings.HasSuffix(key, "stuck") {
			delete(p.records, key)
		}
	}
	text, err := json.Marshal(p.records)
	must.Succeed(t, err)
	var got bytes.Buffer
	must.Succeed(t, json.Indent(&got, text, "", "  "))
	got.WriteByte('\n')

	golden := filepath.Join("testdata", "records.json")
	if scripted.Updating() {
		must.Succeed(t, os.WriteFile(golden, got.Bytes(), 0o644))
	}
	want, err := os.ReadFile(golden)
	must.Succeed(t, err)
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestChanges checks that a page hears of what is new, changed and gone, and of nothing else.
func TestChanges(t *testing.T) {
	cluster := dashboardtest.NewCluster(dashboardtest.Objects(2, 6)...)
	p := open(t, serve(t, options(cluster)))
	p.untilRead(t)

	new := dashboardtest.Pending("stuck", "no node")
	cluster.Put(new...)
	p.until(t, func() bool { return p.records["pod/shop/stuck"] != nil })
	delete(p.records, "node/node1")
	p.until(t, func() bool { return strings.Contains(string(p.records["overview"]), "no node") })
	if p.records["node/node1"] != nil {
		t.Error("a node that is as it was is sent again")
	}

	cluster.Remove(new[0])
	p.until(t, func() bool { return p.records["pod/shop/stuck"] == nil })
}

// TestRights checks that what the user may not read is said with who can mend it, and that the rest
// is shown.
func TestRights(t *testing.T) {
	cluster := dashboardtest.NewCluster(dashboardtest.Objects(1, 6)...)
	no := apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("no"))
	for _, kind := range []string{"DevicePool", "Pod", "ResourceClaim", "XPUPort"} {
		cluster.Refuse(kind, "", no)
	}
	o := options(cluster)
	o.Fallback = "shop"
	p := open(t, serve(t, o))
	p.untilRead(t)
	p.until(t, func() bool { return p.records["pod/shop/web-node1-1"] != nil })

	got := map[string]string{}
	for _, s := range p.overview(t).Sources {
		got[s.Kind] = fmt.Sprint(s.State, ": ", s.Text)
	}
	for kind, want := range map[string]string{
		"DevicePools": "Forbidden: you may not read them; an administrator can bind ClusterRole " +
			"xpu-view to you",
		"pods": "Live: you may read only those of namespace shop",
		"XPUs": "Live: ",
	} {
		if got[kind] != want {
			t.Errorf("%s: %q, want %q", kind, got[kind], want)
		}
	}

	// Networks are shown, and how many ports of others they have is not known.
	if network := string(p.records["network/blue"]); !strings.Contains(network, `16","?","1/1"`) {
		t.Error(network)
	}
	cluster.Refuse("DevicePool", "", nil)
	p.until(t, func() bool { return p.records["pool/fast"] != nil })
	if pool := string(p.records["pool/fast"]); !strings.Contains(pool, `"5","5","?","True"`) {
		t.Error(pool)
	}
}

// TestClusterGone checks that the page keeps what it knows when the cluster goes, says since when
// it is old, and is live again when the cluster is back.
func TestClusterGone(t *testing.T) {
	var clock atomic.Int64
	cluster := dashboardtest.NewCluster(dashboardtest.Objects(1, 6)...)
	o := options(cluster)
	o.Now = func() time.Time {
		return dashboardtest.Start().Add(time.Duration(clock.Load()) * time.Second)
	}
	p := open(t, serve(t, o))
	p.untilRead(t)

	clock.Store(100)
	cluster.Put(dashboardtest.Pending("stuck", "no node")...)
	p.until(t, func() bool { return p.records["pod/shop/stuck"] != nil })
	clock.Store(200)
	cluster.Down(errors.New("connection refused"))
	source := func(kind string) (found dashboard.Source) {
		for _, s := range p.overview(t).Sources {
			if s.Kind == kind {
				found = s
			}
		}
		return found
	}
	p.until(t, func() bool { return source("pods").State == "Stale" })
	pods := source("pods")
	if want := dashboardtest.Start().Add(100 * time.Second); !pods.Since.Equal(want) ||
		!strings.Contains(pods.Text, "connection refused") {
		t.Errorf("%+v, want since %s", pods, want)
	}
	if p.records["pod/shop/stuck"] == nil {
		t.Error("what is known is not shown any more")
	}

	cluster.Down(nil)
	p.until(t, func() bool { return source("pods").State == "Live" })
}

// TestNoCluster checks that a page of a cluster that has never answered does not say that nothing
// is wrong.
func TestNoCluster(t *testing.T) {
	cluster := dashboardtest.NewCluster()
	cluster.Down(errors.New("connection refused"))
	p := open(t, serve(t, options(cluster)))
	p.untilRead(t)
	for _, s := range p.overview(t).Sources {
		if s.State != "Stale" || !s.Since.IsZero() {
			t.Errorf("%+v", s)
		}
	}
}

// TestDirectMode checks that agents are asked in a cluster without the project's kinds, and again
// when pods of their node change.
func TestDirectMode(t *testing.T) {
	cluster := dashboardtest.NewCluster()
	for _, kind := range []string{"XPUNode", "DevicePool", "XPUNetwork", "XPU", "XPUPort"} {
		cluster.Refuse(kind, "", &meta.NoKindMatchError{})
	}
	agent := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: dashboardtest.Namespace,
		Name: "xpu-agent-1", Labels: map[string]string{"app.kubernetes.io/name": "xpu-agent"}},
		Spec: corev1.PodSpec{NodeName: "node1"}}
	limits := corev1.ResourceList{"vendor.com/plain": {}}
	web := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u"},
		Spec: corev1.PodSpec{NodeName: "node1", Containers: []corev1.Container{
			{Resources: corev1.ResourceRequirements{Limits: limits}}}}}
	cluster.Put(agent, web)
	for _, o := range dashboardtest.Objects(2, 4) { // of a cluster that had the kinds
		if slice, is := o.(*resourceapi.ResourceSlice); is && *slice.Spec.NodeName == "node2" {
			cluster.Put(o)
		}
	}

	o := options(cluster)
	o.State = func(context.Context, string) (*nodestate.State, error) {
		vf := nodestate.Function{ID: function.ID{Address: "0000:3b:01.0"}, Kind: function.VF,
			PF: "0000:3b:00.0", Pool: "plain", Attachment: &nodestate.Attachment{State: "Attached",
				Network: "red", Resource: "vendor.com/plain",
				Pod: nodestate.Pod{Namespace: "shop", Name: "web", UID: "u"}}}
		return &nodestate.State{Node: "node1", Agent: "v1", Functions: []nodestate.Function{vf}}, nil
	}
	p := open(t, serve(t, o))
	p.until(t, func() bool { return strings.Contains(string(p.records["pod/shop/web"]), "red") })
	if !p.overview(t).Direct {
		t.Error("the page does not say that it is direct mode")
	}
	if node := string(p.records["node/node2"]); !strings.Contains(node, `"status":"Unknown"`) ||
		!strings.Contains(node, `"0000:3b:00.0 PF","functions":["free 3"]`) {
		t.Error(node)
	}
	if text := string(p.records["overview"]); !strings.Contains(text, "is not installed in") {
		t.Error("the page does not say that no program runs")
	}
	if node := string(p.records["node/node1"]); !strings.Contains(node, `"used 1"`) {
		t.Error(node)
	}
}

// TestRefusals checks who gets nothing.
func TestRefusals(t *testing.T) {
	address := serve(t, options(dashboardtest.NewCluster()))
	host := strings.Split(address, "/")[2]
	_, port, err := net.SplitHostPort(host)
	must.Succeed(t, err)

	for _, test := range []struct {
		name, method, path, host string
		want                     int
	}{
		{"the page", "GET", address, host, http.StatusOK},
		{"localhost", "GET", address, "localhost:" + port, http.StatusOK},
		{"a script", "GET", address + "app.js", host, http.StatusOK},
		{"no token", "GET", "http://" + host + "/", host, http.StatusForbidden},
		{"no token for a script", "GET", "http://" + host + "/app.js", host, http.StatusForbidden},
		{"another token", "GET", "http://" + host + "/AAAAAAAAAAAAAAAAAAAAAAAAAA/", host,
			http.StatusForbidden},
		{"a part of the token", "GET", address[:len(address)-5] + "/", host, http.StatusForbidden},
		{"a token without its end", "GET", strings.TrimSuffix(address, "/"), host,
			http.StatusForbidden},
		{"another name for 127.0.0.1", "GET", address, "evil.example:" + port,
			http.StatusMisdirectedRequest},
		{"another port", "GET", address, "127.0.0.1:1", http.StatusMisdirectedRequest},
		{"no port", "GET", address, "127.0.0.1", http.StatusMisdirectedRequest},
		{"a write", "POST", address, host, http.StatusMethodNotAllowed},
		{"another file", "GET", address + "server.go", host, http.StatusNotFound},
		{"a way out", "GET", address + "..%2fserver.go", host, http.StatusNotFound},
		{"a name that is none", "GET", address + "node?name=a%2fb", host, http.StatusBadRequest},
		{"no pod", "GET", address + "explain", host, http.StatusBadRequest},
		{"an agent that is away", "GET", address + "node?name=node1", host, http.StatusBadGateway},
	} {
		t.Run(test.name, func(t *testing.T) {
			request, err := http.NewRequestWithContext(t.Context(), test.method, test.path, nil)
			must.Succeed(t, err)
			request.Host = test.host
			answer, err := http.DefaultClient.Do(request)
			must.Succeed(t, err)
			defer answer.Body.Close()
			if answer.StatusCode != test.want {
				t.Errorf("%s, want %d", answer.Status, test.want)
			}
			if policy := answer.Header.Get("Content-Security-Policy"); !strings.HasPrefix(policy,
				"default-src 'none'; script-src 'self';") || strings.Contains(policy, "unsafe") {
				t.Errorf("policy %q", policy)
			}
		})
	}
}

// TestExplain checks what the page gets about a pod.
func TestExplain(t *testing.T) {
	address := serve(t, options(dashboardtest.NewCluster()))
	answer, err := http.Get(address + "explain?namespace=shop&name=web")
	must.Succeed(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	must.Succeed(t, err)
	for _, want := range []string{`"verdict":"nothing is wrong"`, `"titles":["claim web"]`,
		`"Done":"✓"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s in %s", want, text)
		}
	}
}

// TestBounds checks that only some pages may be open, and that a closed one makes room.
func TestBounds(t *testing.T) {
	address := serve(t, options(dashboardtest.NewCluster()))
	var pages []*page
	for range 8 {
		pages = append(pages, open(t, address))
	}

	status := func() int {
		answer, err := http.Get(address + "events")
		must.Succeed(t, err)
		defer answer.Body.Close()
		return answer.StatusCode
	}
	if got := status(); got != http.StatusServiceUnavailable {
		t.Errorf("%d for the ninth page", got)
	}
	must.Succeed(t, pages[0].body.Close())
	must.Eventually(t, "room for a page", func() bool { return status() == http.StatusOK })
}

// pipes is a listener whose connections buffer nothing.
type pipes struct {
	connections chan net.Conn
	end         func()
}

func newPipes() pipes {
	connections := make(chan net.Conn)
	return pipes{connections, sync.OnceFunc(func() { close(connections) })}
}

func (p pipes) Accept() (net.Conn, error) {
	c, ok := <-p.connections
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}

func (p pipes) Close() error {
	p.end()
	return nil
}

func (p pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// open opens a page whose browser takes only what the test reads.
func (p pipes) open(t *testing.T, address string) (*page, net.Conn) {
	t.Helper()
	browser, server := net.Pipe()
	p.connections <- server
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address+"events", nil)
	must.Succeed(t, err)
	must.Succeed(t, request.Write(browser))
	lines := bufio.NewReader(browser)
	answer, err := http.ReadResponse(lines, request)
	must.Succeed(t, err)
	return &page{answer.Body, bufio.NewReader(answer.Body), map[string]json.RawMessage{}}, browser
}

// TestSlowPage checks that a page that takes nothing holds up neither the others nor the server,
// and is cut off, and that a page gets many changes that it has missed as one.
func TestSlowPage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := dashboardtest.NewCluster(dashboardtest.Objects(2, 6)...)
		d := dashboard.New(options(cluster))
		l := newPipes()
		must.Run(t, func(ctx context.Context) error { return d.Serve(ctx, l) })
		address := d.URL(l)
		_, stuck := l.open(t, address)
		late, _ := l.open(t, address)
		fast, _ := l.open(t, address)
		fast.untilRead(t)
		late.untilRead(t)

		for i := range 100 {
			want := fmt.Sprintf("try %d.", i)
			cluster.Put(dashboardtest.Pending("stuck", want)...)
			fast.until(t, func() bool {
				return strings.Contains(string(fast.records["pod/shop/stuck"]), want)
			})
		}

		events := 0
		late.until(t, func() bool {
			events++
			return strings.Contains(string(late.records["pod/shop/stuck"]), "try 99.")
		})
		if events > 10 {
			t.Errorf("a page that was away gets %d events for 100 changes", events)
		}

		time.Sleep(time.Minute) // of the bubble's clock
		if _, err := io.Copy(io.Discard, stuck); err != nil {
			t.Errorf("the page that takes nothing: %v, want the end of the connection", err)
		}
	})
}

// TestCordon checks that a cordoned PF is said, and is not wrong.
func TestCordon(t *testing.T) {
	objects := dashboardtest.Objects(7, 6)
	for _, o := range objects {
		if node, is := o.(*v1alpha1.XPUNode); is && node.Name == "node7" {
			node.Spec.Cordons = []v1alpha1.Cordon{{PF: "0000:3b:00.0", Reason: "new firmware"}}
		}
	}
	p := open(t, serve(t, options(dashboardtest.NewCluster(objects...))))
	p.untilRead(t)
	p.until(t, func() bool { return p.records["node/node7"] != nil })
	text := string(p.records["node/node7"])
	if !strings.Contains(text, `"status":"Done"`) ||
		!strings.Contains(text, "PF 0000:3b:00.0 is cordoned: new firmware") {
		t.Error(text)
	}
}

// TestReadyWithRemarks: what a cluster or an OPI agent cannot do is said of an object that is Ready,
// and is not wrong, as xpuctl status has it. What the object's devices lack is wrong.
func TestReadyWithRemarks(t *testing.T) {
	conditions := func(kind, text string) []metav1.Condition {
		return []metav1.Condition{
			{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Published"},
			{Type: kind, Status: metav1.ConditionFalse, Reason: "Because", Message: text},
		}
	}
	old, short := &v1alpha1.DevicePool{}, &v1alpha1.DevicePool{}
	old.Name, old.Status.Conditions = "old", conditions(v1alpha1.ConditionSupported, "a gate is off")
	short.Name, short.Status.Conditions = "short", conditions(v1alpha1.ConditionSupplied, "2 VFs less")
	xpu, failed := &v1alpha1.XPU{}, &v1alpha1.DevicePool{}
	xpu.Name, xpu.Status.Conditions = "card", conditions(v1alpha1.ConditionVerified, "blind")
	xpu.Status.Foreign = &v1alpha1.XPUForeign{Ports: 3}
	failed.Name = "failed"
	failed.Status.Conditions = conditions(v1alpha1.ConditionSupported, "nothing is offered")
	failed.Status.Conditions[0].Status = metav1.ConditionFalse
	p := open(t, serve(t, options(dashboardtest.NewCluster(old, short, failed, xpu))))
	p.untilRead(t)

	for key, want := range map[string][]string{
		"pool/old":    {`"status":"Done"`, `"remarks":["Supported Because: a gate is off"]`},
		"pool/short":  {`"status":"Failed"`, `"notes":["Supplied Because: 2 VFs less"]`},
		"pool/failed": {`"status":"Failed"`, `"Supported Because: nothing is offered"]`},
		"xpu/card":    {`"status":"Done"`, "Verified Because: blind", "also has 3 ports"},
	} {
		for _, text := range want {
			if got := string(p.records[key]); !strings.Contains(got, text) {
				t.Errorf("%s is %s, want %s", key, got, text)
			}
		}
	}
	for _, wrong := range p.overview(t).Wrong {
		if wrong.Name == "old" || wrong.Name == "card" {
			t.Errorf("%+v is wrong", wrong)
		}
	}
}

// TestXPUNodeWithoutWord checks that a node whose controller has said nothing is unknown.
func TestXPUNodeWithoutWord(t *testing.T) {
	node := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}
	p := open(t, serve(t, options(dashboardtest.NewCluster(node))))
	p.until(t, func() bool { return p.records["node/node1"] != nil })
	if text := string(p.records["node/node1"]); !strings.Contains(text, `"status":"Unknown"`) {
		t.Error(text)
	}
}

// TestXPUNodeNotCompared checks that an inventory that could not be compared is said of a node, and
// is not wrong, as xpuctl status has it.
func TestXPUNodeNotCompared(t *testing.T) {
	node := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}
	node.Status.Conditions = []metav1.Condition{
		{Type: v1alpha1.ConditionAgentReady, Status: metav1.ConditionTrue},
		{Type: v1alpha1.ConditionInventoryVerified, Status: metav1.ConditionUnknown,
			Reason: v1alpha1.ReasonNotVerified, Message: "there is no result"},
	}
	p := open(t, serve(t, options(dashboardtest.NewCluster(node))))
	p.untilRead(t)
	p.until(t, func() bool { return p.records["node/node1"] != nil })

	text := string(p.records["node/node1"])
	if !strings.Contains(text, `"status":"Done"`) ||
		!strings.Contains(text, `"remarks":["InventoryVerified NotVerified: there is no result"]`) {
		t.Error(text)
	}
	for _, wrong := range p.overview(t).Wrong {
		if wrong.Name == "node1" {
			t.Errorf("%+v is wrong", wrong)
		}
	}
}
