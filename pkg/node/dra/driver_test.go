// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	nodecdi "github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// node has what a driver needs of a node and a cluster.
type node struct {
	t         *testing.T
	functions map[function.ID]function.Function
	specs     map[string]v1alpha1.DevicePoolSpec
	journal   *journal.Journal
	cdiDir    string

	mutex   sync.Mutex
	ports   map[function.ID]*v1alpha1.XPUPort
	waits   int
	release error
	// freed, if set, is called when a Function is free.
	freed func()
}

func newNode(t *testing.T) *node {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })

	n := &node{
		t: t, journal: j, cdiDir: t.TempDir(),
		functions: map[function.ID]function.Function{},
		specs: map[string]v1alpha1.DevicePoolSpec{
			"fast":  {Network: "lab", Allow: v1alpha1.PrivilegedFields()},
			"plain": {Allow: v1alpha1.PrivilegedFields()},
		},
		ports: map[function.ID]*v1alpha1.XPUPort{},
	}

	for _, f := range pooltest.VFs(0x3b, 4) {
		f.IOMMUGroup = "42"
		n.functions[f.ID] = f
		n.ports[f.ID] = &v1alpha1.XPUPort{Spec: v1alpha1.XPUPortSpec{
			MAC: "02:00:00:00:00:0" + f.ID.DeviceName()[11:], MTU: 1500,
			Addresses: []string{"10.1.0.2/24"},
		}}
	}

	return n
}

func (n *node) Get(id function.ID) (function.Function, bool) {
	f, ok := n.functions[id]
	return f, ok
}

func (n *node) DevicePool(name string) (v1alpha1.DevicePoolSpec, bool) {
	spec, ok := n.specs[name]
	return spec, ok
}

func (n *node) Wait(
	ctx context.Context, _ *resourceapi.ResourceClaim, id function.ID,
) (*v1alpha1.XPUPort, error) {
	n.mutex.Lock()
	n.waits++
	port := n.ports[id]
	n.mutex.Unlock()
	if port != nil {
		return port, nil
	}

	<-ctx.Done()
	return nil, errors.New("the xPU is not provisioned")
}

// life is the node's lifecycle. Tests may replace parts of it.
type life struct {
	*lifecycle.Manager
	node *node
}

// Unprepare deletes the records, as the lifecycle does once the Functions are back.
func (l life) Unprepare(ctx context.Context, claim types.UID) error {
	if l.node.release != nil {
		return l.node.release
	}
	return l.Manager.Unprepare(ctx, claim)
}

func (l life) Admit(ctx context.Context, want journal.Attachment) (journal.Attachment, error) {
	have, err := l.Manager.Admit(ctx, want)
	if l.node.freed != nil {
		l.node.freed()
	}
	return have, err
}

// lifecycle returns a lifecycle that works on the journal only.
func (n *node) lifecycle(options lifecycle.Options) life {
	options.BootID, options.Hooks = "boot-1", hooks{}
	return life{lifecycle.New(n.journal, nil, nil, options, logr.Discard()), n}
}

// hooks is a queue that does nothing.
type hooks struct{}

func (hooks) First(journal.Attachment) string { return "" }
func (hooks) Add(function.ID)                 {}

func (n *node) driver() *Driver {
	n.t.Helper()
	files, err := nodecdi.Open(n.cdiDir)
	if err != nil {
		n.t.Fatal(err)
	}

	return &Driver{
		Function: n.Get, DevicePool: n.DevicePool, WaitForPort: n.Wait, Journal: n.journal,
		CDI: &CDIFiles{
			Dir: files, Journal: n.journal, Function: n.Get, DevicePool: n.DevicePool,
			DeviceNodes: &devnode.Finder{SysRoot: n.t.TempDir(), DevRoot: n.t.TempDir()},
			Log:         testr.New(n.t),
		},
		Lifecycle:        n.lifecycle(lifecycle.Options{}),
		RuntimeConnected: func(context.Context) error { return nil },
		PodTerminating:   func(context.Context, journal.Pod) (bool, error) { return false, nil },
		Metrics:          NewMetrics(prometheus.NewRegistry()), Log: testr.New(n.t),
		ProvisionTimeout: time.Minute,
	}
}

// attach plays the lifecycle that attaches reserved Functions for claims.
func (n *node) attach(d *Driver) {
	n.t.Helper()
	for _, a := range n.journal.All() {
		if a.Claim.UID == "" || a.State == journal.Releasing {
			continue
		}

		a.State, a.Sandbox = journal.Attached, "s-"+string(a.Pod.UID)
		a.Before, a.Observed = &netdev.Snapshot{}, &netdev.Observed{Name: a.Interface.Name}
		a.Place.NetNS = "/run/netns/" + a.Sandbox
		if err := n.journal.Put(a); err != nil {
			n.t.Fatal(err)
		}
		if err := d.CDI.Expose(a); err != nil {
			n.t.Fatal(err)
		}
	}
}

// prepare prepares the claims with one call, as the kubelet does for a pod.
func prepare(
	t *testing.T, d *Driver, claims ...*resourceapi.ResourceClaim,
) map[types.UID]kubeletplugin.PrepareResult {
	t.Helper()
	results, err := d.PrepareResourceClaims(t.Context(), claims)
	if err != nil || len(results) != len(claims) {
		t.Fatalf("PrepareResourceClaims = %v, %v; want %d results", results, err, len(claims))
	}
	return results
}

func (n *node) wantPrepared(claims ...*resourceapi.ResourceClaim) {
	n.t.Helper()
	for uid, result := range prepare(n.t, n.driver(), claims...) {
		if result.Err != nil {
			n.t.Errorf("claim %s: %v", uid, result.Err)
		}
	}
}

func (n *node) wantRefused(c *resourceapi.ResourceClaim, texts ...string) {
	n.t.Helper()
	err := prepare(n.t, n.driver(), c)[c.UID].Err
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			n.t.Errorf("error %v, want one with %q", err, text)
		}
	}
}

// interfaces returns the names that Functions have in pods, by device name.
func (n *node) interfaces() map[string]string {
	out := map[string]string{}
	for _, a := range n.journal.All() {
		out[a.Claim.Device] = a.Interface.Name
	}
	return out
}

func (n *node) wantInterfaces(want map[string]string) {
	n.t.Helper()
	if diff := gocmp.Diff(want, n.interfaces()); diff != "" {
		n.t.Errorf("interfaces: -want +got\n%s", diff)
	}
}

const (
	fastPool  = "node1/0000-3b-00-0/fast"
	plainPool = "node1/0000-3b-00-0/plain"
)

// of returns a claim of the pod.
func of(pod, name string, options ...claimtest.Option) *resourceapi.ResourceClaim {
	return claimtest.Allocated(name, append(options, claimtest.ReservedFor(pod))...)
}

func TestPrepare(t *testing.T) {
	n := newNode(t)
	c := of("pod1", "net",
		claimtest.Result("blue", fastPool, "0000-3b-00-2"),
		claimtest.Result("red/vf", fastPool, "0000-3b-00-3"),
		claimtest.FromClass(`"routes": [{"to": "10.9.0.0/16", "via": "10.1.0.1"}]`),
		claimtest.FromClaim(
			`"mtu": 9000, "mac": "02:00:00:00:00:99", "addresses": ["10.1.0.77/24"]`, "blue",
		))

	got := prepare(t, n.driver(), c)[c.UID]
	if got.Err != nil {
		t.Fatal(got.Err)
	}

	want := []kubeletplugin.Device{
		{
			Requests: []string{"blue"}, PoolName: fastPool, DeviceName: "0000-3b-00-2",
			CDIDeviceIDs: []string{"xpu.opiproject.org/function=net-uid-0000-3b-00-2"},
			Metadata: &kubeletplugin.DeviceMetadata{
				Attributes: map[string]resourceapi.DeviceAttribute{
					"resource.kubernetes.io/pciBusID": {StringValue: new("0000:3b:00.2")},
					"pf":                              {StringValue: new("0000:3b:00.0")},
				},
				// These are the values of the Port, because the xPU relies on them.
				NetworkData: &resourceapi.NetworkDeviceData{
					InterfaceName: "net1", HardwareAddress: "02:00:00:00:00:02",
					IPs: []string{"10.1.0.2/24"},
				},
			},
		},
		{
			Requests: []string{"red/vf"}, PoolName: fastPool, DeviceName: "0000-3b-00-3",
			CDIDeviceIDs: []string{"xpu.opiproject.org/function=net-uid-0000-3b-00-3"},
			Metadata: &kubeletplugin.DeviceMetadata{
				Attributes: map[string]resourceapi.DeviceAttribute{
					"resource.kubernetes.io/pciBusID": {StringValue: new("0000:3b:00.3")},
					"pf":                              {StringValue: new("0000:3b:00.0")},
				},
				NetworkData: &resourceapi.NetworkDeviceData{
					InterfaceName: "net2", HardwareAddress: "02:00:00:00:00:03",
					IPs: []string{"10.1.0.2/24"},
				},
			},
		},
	}

	if diff := gocmp.Diff(want, got.Devices); diff != "" {
		t.Errorf("devices: -want +got\n%s", diff)
	}

	record, _ := n.journal.Get(function.ID{Address: "0000:3b:00.2"})
	wantRecord := journal.Attachment{
		Function: function.ID{Address: "0000:3b:00.2"}, PF: "0000:3b:00.0", PFName: "ens59f0",
		VFIndex: 0,
		Claim: journal.Claim{Namespace: "default", Name: "net", UID: "net-uid", Request: "blue",
			Pool: fastPool, Device: "0000-3b-00-2"},
		Pod: journal.Pod{Namespace: "default", Name: "pod1", UID: "pod1-uid"},
		Interface: function.Interface{
			Name: "net1", MTU: 1500, MAC: "02:00:00:00:00:02",
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.2/24")},
			Routes: []function.Route{
				{To: netip.MustParsePrefix("10.9.0.0/16"), Via: netip.MustParseAddr("10.1.0.1")},
			},
		},
		AnyName: true,
		Devices: &journal.Devices{},
		State:   journal.Reserved,
	}

	options := gocmp.Options{cmpopts.IgnoreFields(journal.Attachment{}, "ReservedAt", "Made"),
		cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})}
	if diff := gocmp.Diff(wantRecord, record, options); diff != "" {
		t.Errorf("journal: -want +got\n%s", diff)
	}
}

func TestPrepareIsTraced(t *testing.T) {
	n := newNode(t)
	exporter := tracetest.NewInMemoryExporter()
	tracer, err := tracing.New(sdktrace.NewSimpleSpanProcessor(exporter), "xpu-agent",
		logr.Discard())
	if err != nil {
		t.Fatal(err)
	}

	d := n.driver()
	d.Tracer = tracer
	c := of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-7"))
	c.UID = "4b1a7e9c-52d3-4c1e-9f00-0123456789ab"
	result := prepare(t, d, c)[c.UID]
	spans := exporter.GetSpans()
	if result.Err == nil || len(spans) != 1 || spans[0].Name != "prepare claim" ||
		spans[0].Status.Description != result.Err.Error() ||
		spans[0].SpanContext.TraceID().String() != "4b1a7e9c52d34c1e9f000123456789ab" {
		t.Errorf("error %v, spans %v; want a failed prepare claim of the claim's trace",
			result.Err, spans)
	}
}

func TestNetwork(t *testing.T) {
	for _, test := range []struct {
		name   string
		claim  *resourceapi.ResourceClaim
		waits  int
		wanted function.MAC
	}{
		{"of the pool", of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2")),
			1, "02:00:00:00:00:02"},
		{"of the claim", of("pod1", "net", claimtest.Result("blue", plainPool, "0000-3b-00-2"),
			claimtest.FromClaim(`"network": "lab"`)), 1, "02:00:00:00:00:02"},
		{"none, hence no Port",
			of("pod1", "net", claimtest.Result("blue", plainPool, "0000-3b-00-2"),
				claimtest.FromClaim(`"mac": "02:00:00:00:00:99"`)), 0, "02:00:00:00:00:99"},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := newNode(t)
			n.wantPrepared(test.claim)
			if record := n.journal.All()[0]; n.waits != test.waits ||
				record.Interface.MAC != test.wanted {
				t.Errorf("waited for %d Ports and reserved with MAC %q, want %d and %q", n.waits,
					record.Interface.MAC, test.waits, test.wanted)
			}
		})
	}
}

func TestPrepareRefuses(t *testing.T) {
	shared := of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2"),
		claimtest.ReservedFor("pod2"))
	unused := claimtest.Allocated("net", claimtest.Result("blue", fastPool, "0000-3b-00-2"))
	notAPod := of("group1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2"))
	notAPod.Status.ReservedFor[0].APIGroup, notAPod.Status.ReservedFor[0].Resource = "scheduling.k8s.io", "podgroups"
	for _, test := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
		want  []string
	}{
		{"shared", shared,
			[]string{"claim default/net", "2 pods share it", "ResourceClaimTemplate"}},
		{"reserved for nobody", unused, []string{"claim default/net", "0 pods"}},
		{"reserved for something else", notAPod, []string{"podgroups group1", "its own claim"}},
		{"bad parameters", of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2"),
			claimtest.FromClaim(`"mtu": 1`)),
			[]string{"claim default/net", "request blue", "Function 0000:3b:00.2",
				"mtu 1: must be 68-9216"}},
		{"unknown Function", of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-1f-7")),
			[]string{"Function 0000:3b:1f.7", "gone from this node"}},
		{"two of one name", of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2"),
			claimtest.Result("red", fastPool, "0000-3b-00-3"),
			claimtest.FromClaim(`"interfaceName": "fast0"`)),
			[]string{"request red", `interfaceName "fast0"`, "choose another"}},
	} {
		t.Run(test.name, func(t *testing.T) { newNode(t).wantRefused(test.claim, test.want...) })
	}
}

func TestPortMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.ports = nil
		d := n.driver()
		d.ProvisionTimeout = 20 * time.Second
		first := of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2"),
			claimtest.Result("red", fastPool, "0000-3b-00-3"))
		second := of("pod1", "other", claimtest.Result("blue", fastPool, "0000-3b-00-4"))
		begin := time.Now()

		for uid, result := range prepare(t, d, first, second) {
			if result.Err == nil ||
				!strings.Contains(result.Err.Error(), "the xPU is not provisioned") {
				t.Errorf("claim %s: error %v, want what is missing", uid, result.Err)
			}
		}

		if waited := time.Since(begin); waited != d.ProvisionTimeout {
			t.Errorf("Prepare took %s, want %s however many Functions and claims there are",
				waited, d.ProvisionTimeout)
		}
		if all := n.journal.All(); len(all) != 0 {
			t.Errorf("%v were reserved although the xPU does not serve them", all)
		}

		n.wantNoCDI()
	})
}

func TestPortNotUnderstood(t *testing.T) {
	for _, test := range []struct {
		change func(*v1alpha1.XPUPortSpec)
		want   string
	}{
		{func(s *v1alpha1.XPUPortSpec) { s.MAC = "x" }, "spec.mac"},
		{func(s *v1alpha1.XPUPortSpec) {
			s.Addresses = []string{"10.1.0.2/24", "x"}
		}, "spec.addresses[1]"},
	} {
		n := newNode(t)
		for _, port := range n.ports {
			port.Namespace, port.Name = "default", "node1-0000-3b-00-2"
			test.change(&port.Spec)
		}
		n.wantRefused(of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2")),
			"XPUPort default/node1-0000-3b-00-2", test.want)
	}
}

func TestInterfaceNames(t *testing.T) {
	n := newNode(t)
	one := of("pod1", "one", claimtest.Result("blue", plainPool, "0000-3b-00-2"),
		claimtest.FromClaim(`"interfaceName": "net2"`))
	two := of("pod1", "two", claimtest.Result("a", plainPool, "0000-3b-00-3"),
		claimtest.Result("b", plainPool, "0000-3b-00-4"))
	n.wantPrepared(one)
	n.wantPrepared(two)
	names := map[string]string{
		"0000-3b-00-2": "net2", "0000-3b-00-3": "net1", "0000-3b-00-4": "net3",
	}
	n.wantInterfaces(names)

	// The kubelet prepares again, after its restart or the agent's. Nothing changes, even though a
	// name is free.
	if err := n.journal.Delete(function.ID{Address: "0000:3b:00.3"}); err != nil {
		t.Fatal(err)
	}

	n.wantPrepared(two)
	n.wantPrepared(one)
	n.wantInterfaces(names)

	n.wantRefused(of("pod1", "three", claimtest.Result("a", plainPool, "0000-3b-00-5"),
		claimtest.FromClaim(`"interfaceName": "net3"`)),
		"claim default/three", `interfaceName "net3"`, "claim two")
	n.wantPrepared(of("pod2", "three", claimtest.Result("a", plainPool, "0000-3b-00-5"),
		claimtest.FromClaim(`"interfaceName": "net3"`)))
}

// TestClaimsOfAPodTogether: names are chosen one after the other although the claims are prepared
// at the same time.
func TestClaimsOfAPodTogether(t *testing.T) {
	n := newNode(t)
	n.wantPrepared(
		of("pod1", "one", claimtest.Result("a", fastPool, "0000-3b-00-2")),
		of("pod1", "two", claimtest.Result("a", fastPool, "0000-3b-00-3")),
		of("pod1", "three", claimtest.Result("a", fastPool, "0000-3b-00-4")),
		of("pod2", "four", claimtest.Result("a", fastPool, "0000-3b-00-5")))

	got := n.interfaces()
	if got["0000-3b-00-5"] != "net1" {
		t.Errorf("the other pod's interface is %q, want net1", got["0000-3b-00-5"])
	}

	delete(got, "0000-3b-00-5")
	if names := slices.Sorted(maps.Values(got)); !slices.Equal(names,
		[]string{"net1", "net2", "net3"}) {
		t.Errorf("interfaces are %q, want net1, net2 and net3", names)
	}
}

func TestFunctionOfAnotherClaim(t *testing.T) {
	n := newNode(t)
	n.wantPrepared(of("pod1", "one", claimtest.Result("a", fastPool, "0000-3b-00-2")))
	for _, pod := range []string{"pod2", "pod1"} {
		n.wantRefused(of(pod, "two", claimtest.Result("a", fastPool, "0000-3b-00-2")),
			"claim default/two", "belongs to claim default/one")
	}
}

// TestLastUserIsAwaited: Prepare waits for a Function whose last owner's hooks are not done yet, as
// long as for the xPU.
func TestLastUserIsAwaited(t *testing.T) {
	last := journal.Attachment{
		Function: function.ID{Address: "0000:3b:00.2"}, PF: "0000:3b:00.0",
		State: journal.Releasing, RestoredAt: time.Unix(1e9, 0),
		Resource: "xpu.opiproject.org/fast", Pod: journal.Pod{Namespace: "default", Name: "before"},
		Hooks: &journal.Hooks{Next: "port", Error: "xPU xpu-1 is away"},
	}

	next := of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2"))
	t.Run("and becomes free", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t)
			if err := n.journal.Put(last); err != nil {
				t.Fatal(err)
			}

			time.AfterFunc(20*time.Second, func() { n.journal.Delete(last.Function) })
			begin := time.Now()
			n.wantPrepared(next)
			if took := time.Since(begin); took != 20*time.Second {
				t.Errorf("Prepare took %s, want until the hooks are done", took)
			}

			n.wantInterfaces(map[string]string{"0000-3b-00-2": "net1"})
		})
	})

	t.Run("in vain", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t)
			if err := n.journal.Put(last); err != nil {
				t.Fatal(err)
			}

			n.wantRefused(next, "claim default/net", "0000:3b:00.2", "pod default/before",
				"post-delete hook port", "xPU xpu-1 is away")
			if n.waits > 0 {
				t.Error("the xPU was waited for")
			}
		})
	})
}

func TestUnprepare(t *testing.T) {
	n := newNode(t)
	d := n.driver()
	n.wantPrepared(of("pod1", "one", claimtest.Result("a", fastPool, "0000-3b-00-2"),
		claimtest.Result("b", fastPool, "0000-3b-00-3")))
	n.wantPrepared(of("pod1", "two", claimtest.Result("a", fastPool, "0000-3b-00-4")))

	unprepare := func(names ...string) map[types.UID]error {
		t.Helper()
		var claims []kubeletplugin.NamespacedObject
		for _, name := range names {
			claims = append(claims,
				kubeletplugin.NamespacedObject{
					NamespacedName: types.NamespacedName{Namespace: "default", Name: name},
					UID:            types.UID(name + "-uid"),
				})
		}

		results, err := d.UnprepareResourceClaims(t.Context(), claims)
		if err != nil || len(results) != len(names) {
			t.Fatalf("UnprepareResourceClaims = %v, %v; want %d results", results, err, len(names))
		}

		return results
	}

	n.wantNoCDI() // a container that starts now would not have the Functions
	n.attach(d)
	n.release = errors.New("Function 0000:3b:00.2: netdev is in another namespace")
	if err := unprepare("one")["one-uid"]; !errors.Is(err, n.release) ||
		!strings.Contains(err.Error(), "claim default/one") {
		t.Errorf("error %v, want %v with the claim's name", err, n.release)
	}
	if got := len(n.devicesInCDI()); got != 3 {
		t.Errorf("%d devices in CDI files, want all 3: the runtime may need them until the "+
			"Functions are back", got)
	}

	n.release = nil
	for _, again := range []bool{false, true} {
		for uid, err := range unprepare("one", "unknown") {
			if err != nil {
				t.Errorf("claim %s, again %t: %v", uid, again, err)
			}
		}

		if diff := gocmp.Diff([]string{"xpu.opiproject.org/function=two-uid-0000-3b-00-4"},
			n.devicesInCDI()); diff != "" {
			t.Errorf("devices in CDI files: -want +got\n%s", diff)
		}

		n.wantInterfaces(map[string]string{"0000-3b-00-4": "net3"})
	}
}

// devicesInCDI reads the CDI directory as a runtime does.
func (n *node) devicesInCDI() []string {
	n.t.Helper()
	cache := n.runtime()
	return cache.ListDevices()
}

func (n *node) runtime() *cdi.Cache {
	n.t.Helper()
	cache, err := cdi.NewCache(cdi.WithSpecDirs(n.cdiDir), cdi.WithAutoRefresh(false))
	if err != nil {
		n.t.Fatal(err)
	}

	for path, errs := range cache.GetErrors() {
		n.t.Errorf("a runtime refuses %s: %v", path, errs)
	}
	return cache
}

func (n *node) wantNoCDI() {
	n.t.Helper()
	files, err := os.ReadDir(n.cdiDir)
	if err != nil || len(files) != 0 {
		n.t.Errorf("CDI directory has %v, %v; want nothing", files, err)
	}
}

func TestCDI(t *testing.T) {
	n := newNode(t)
	n.wantPrepared(of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2"),
		claimtest.Result("red-one/vf", fastPool, "0000-3b-00-3")))

	want := map[string][]string{
		"xpu.opiproject.org/function=net-uid-0000-3b-00-2": {
			"XPU_FUNCTION_BLUE=0000:3b:00.2", "XPU_INTERFACE_BLUE=net1",
		},
		"xpu.opiproject.org/function=net-uid-0000-3b-00-3": {
			"XPU_FUNCTION_RED_ONE_VF=0000:3b:00.3", "XPU_INTERFACE_RED_ONE_VF=net2",
		},
	}

	n.wantNoCDI()
	n.attach(n.driver())

	environment := func() map[string][]string {
		out := map[string][]string{}
		cache := n.runtime()
		for _, name := range cache.ListDevices() {
			out[name] = cache.GetDevice(name).ContainerEdits.Env
		}
		return out
	}

	if diff := gocmp.Diff(want, environment()); diff != "" {
		t.Errorf("environment: -want +got\n%s", diff)
	}

	// A container of a later sandbox does not start, because this namespace is gone by then.
	mounts := n.runtime().GetDevice("xpu.opiproject.org/function=net-uid-0000-3b-00-2").
		ContainerEdits.Mounts
	if len(mounts) != 1 || mounts[0].HostPath != "/run/netns/s-pod1-uid" ||
		mounts[0].ContainerPath != "/run/xpu.opiproject.org/netns/0000-3b-00-2" {
		t.Errorf("mounts %+v", mounts)
	}

	// The directory is on a tmpfs, which a reboot empties.
	if err := os.RemoveAll(n.cdiDir); err != nil {
		t.Fatal(err)
	}

	n.driver().CDI.Recover(n.journal.All())
	if diff := gocmp.Diff(want, environment()); diff != "" {
		t.Errorf("environment after Recover: -want +got\n%s", diff)
	}

	files, err := filepath.Glob(filepath.Join(n.cdiDir, "*.yaml"))
	must.Succeed(t, err)
	for _, file := range files { // somebody has broken them
		must.Succeed(t, os.WriteFile(file, []byte("cdiVersion: ["), 0o644))
	}

	n.driver().CDI.Recover(n.journal.All())
	if diff := gocmp.Diff(want, environment()); diff != "" {
		t.Errorf("environment after Recover from broken files: -want +got\n%s", diff)
	}

	// A pod has lost a Function, and the journal is written next.
	lost := n.journal.All()[0]
	lost.State, lost.Before, lost.Observed = journal.Lost, &netdev.Snapshot{}, &netdev.Observed{}
	attached := n.journal.All()[0]
	must.Succeed(t, n.driver().CDI.Expose(lost))
	if got := environment(); len(got) != 1 ||
		got["xpu.opiproject.org/function=net-uid-0000-3b-00-3"] == nil {
		t.Errorf("environment of a claim that loses one of its Functions: %v", got)
	}

	must.Succeed(t, n.driver().CDI.Expose(attached))

	// The agent ended after it recorded that a pod lost a Function, and before it withdrew the
	// Function from containers.
	if err := n.journal.Put(lost); err != nil {
		t.Fatal(err)
	}

	n.driver().CDI.Recover(n.journal.All())
	if got := environment(); len(got) != 1 ||
		got["xpu.opiproject.org/function=net-uid-0000-3b-00-3"] == nil {
		t.Errorf("environment of a claim that lost one of its Functions: %v", got)
	}
	if err := n.journal.Put(attached); err != nil {
		t.Fatal(err)
	}

	// Functions of the device plugin have no file, and Functions that wait for hooks have none any
	// more.
	all := n.journal.All()
	all[0].Claim, all[0].Resource = journal.Claim{}, "xpu.opiproject.org/fast"
	all[1].State, all[1].RestoredAt = journal.Releasing, time.Now()
	if err := os.RemoveAll(n.cdiDir); err != nil {
		t.Fatal(err)
	}

	n.driver().CDI.Recover(all)
	if files, err := os.ReadDir(n.cdiDir); err == nil && len(files) > 0 {
		t.Errorf("CDI directory has %v, want nothing", files)
	}
}

func TestHandleError(t *testing.T) {
	registry := prometheus.NewRegistry()
	d := &Driver{Metrics: NewMetrics(registry), Log: testr.New(t)}
	d.HandleError(t.Context(), &resourceslice.DroppedFieldsError{
		PoolName: fastPool, DesiredSlice: &resourceapi.ResourceSlice{},
		ActualSlice: &resourceapi.ResourceSlice{},
	}, "pool")

	d.HandleError(t.Context(), errors.New("refused"), "pool")
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, family := range families {
		if family.GetName() == "xpu_dra_background_errors_total" {
			if got := family.GetMetric()[0].GetCounter().GetValue(); got != 1 {
				t.Errorf("%v errors were counted, want 1: what an older cluster ignores is none",
					got)
			}
			return
		}
	}

	t.Error("xpu_dra_background_errors_total is missing")
}

// TestAskedNameFirst: a name that a later claim asks for is not given to an earlier claim that asks
// for none.
func TestAskedNameFirst(t *testing.T) {
	n := newNode(t)
	n.wantPrepared(
		of("pod1", "any", claimtest.Result("a", plainPool, "0000-3b-00-2")),
		of("pod1", "net1", claimtest.Result("a", plainPool, "0000-3b-00-3"),
			claimtest.FromClaim(`"interfaceName": "net1"`)))
	n.wantInterfaces(map[string]string{"0000-3b-00-2": "net2", "0000-3b-00-3": "net1"})
}

// binder binds drivers to the node's Functions.
type binder struct{ *node }

func (o binder) Plan(_ context.Context, want journal.Attachment) (*journal.Setup, error) {
	planned := *want.Setup
	planned.Own = o.functions[want.Function].Driver
	return &planned, nil
}

func (o binder) TearDown(context.Context, journal.Attachment) error { return nil }

func (o binder) SetUp(_ context.Context, a journal.Attachment) error {
	f := o.functions[a.Function]
	f.Driver, f.IOMMUGroup, f.Netdev, f.RDMA = a.Setup.Driver, "42", "", false
	o.functions[a.Function] = f
	return nil
}

// fitting returns a driver whose Functions get what claims and pools ask for.
func (n *node) fitting() *Driver {
	d := n.driver()
	d.Lifecycle = n.lifecycle(lifecycle.Options{Setup: binder{n}})
	return d
}

// TestVFIO: the container gets the device nodes that the Function has with the driver that was
// bound for it.
func TestVFIO(t *testing.T) {
	vfio := v1alpha1.DriverVFIO
	for _, test := range []struct {
		name, parameters string
		pool             v1alpha1.DevicePoolSpec
	}{
		{"claim asks", `"driver": "vfio-pci"`, v1alpha1.DevicePoolSpec{
			Network: "lab", Allow: v1alpha1.PrivilegedFields(),
		}},
		{"pool asks", `"vf": {"vlan": 5}`, v1alpha1.DevicePoolSpec{
			Network: "lab", Driver: vfio, Allow: v1alpha1.PrivilegedFields(),
		}},
		{"what goes with the own driver is not there", `"driver": "vfio-pci"`,
			v1alpha1.DevicePoolSpec{
				Network: "lab", Selectors: []v1alpha1.FunctionSelector{{IsRdma: true}},
				Allow: v1alpha1.PrivilegedFields(),
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := newNode(t)
			n.specs["fast"] = test.pool
			d := n.fitting()
			c := of("pod1", "net", claimtest.Result("blue", fastPool, "0000-3b-00-2"),
				claimtest.FromClaim(test.parameters))
			for range 2 { // the kubelet repeats a Prepare
				if err := prepare(t, d, c)[c.UID].Err; err != nil {
					t.Fatal(err)
				}
			}

			record := n.journal.All()[0]
			if o := record.Setup; o == nil || o.Driver != "vfio-pci" ||
				!record.Interface.Userspace || record.Interface.MTU != 0 ||
				len(record.Interface.Addresses) != 1 {
				t.Errorf("record %+v with setup %+v", record, o)
			}

			n.attach(d)
			n.wantNodes([]string{"/dev/vfio/vfio", "/dev/vfio/42"}, "XPU_VFIO_BLUE=/dev/vfio/42")

			// After a reboot the Function has its own driver until the claim is prepared again.
			if err := os.RemoveAll(n.cdiDir); err != nil {
				t.Fatal(err)
			}

			d.CDI.Recover(n.journal.All())
			n.wantNodes([]string{"/dev/vfio/vfio", "/dev/vfio/42"}, "XPU_VFIO_BLUE=/dev/vfio/42")
			if err := n.driver().CDI.remove(c.UID); err != nil {
				t.Fatal(err)
			}

			n.functions[record.Function] = pooltest.VFs(0x3b, 4)[0]
			d.CDI.Recover(n.journal.All())
			n.wantNoCDI()
		})
	}
}

// TestIOMMUFD: beside the nodes of the group the container gets those of iommufd, where the kernel
// has them.
func TestIOMMUFD(t *testing.T) {
	n := newNode(t)
	n.specs["plain"] = v1alpha1.DevicePoolSpec{Driver: v1alpha1.DriverVFIO}
	c := of("pod1", "net", claimtest.Result("blue", plainPool, "0000-3b-00-2"))
	d := n.fitting()
	sys, dev := t.TempDir(), t.TempDir()
	for _, dir := range []string{
		sys + "/bus/pci/devices/0000:3b:00.2/vfio-dev/vfio7", dev + "/vfio/devices/vfio7",
		dev + "/vfio/42", dev + "/iommu",
	} {
		must.Succeed(t, os.MkdirAll(dir, 0o755))
	}

	d.CDI.DeviceNodes = &devnode.Finder{SysRoot: sys, DevRoot: dev}
	must.Succeed(t, prepare(t, d, c)[c.UID].Err)
	n.attach(d)
	n.wantNodes([]string{
		"/dev/vfio/vfio", "/dev/vfio/42", "/dev/iommu", "/dev/vfio/devices/vfio7",
	}, "XPU_IOMMUFD_BLUE=/dev/vfio/devices/vfio7")
}

// TestDriverOfTheLastOwner: the driver that was bound for the last owner does not matter to the
// next owner.
func TestDriverOfTheLastOwner(t *testing.T) {
	n := newNode(t)
	id := function.ID{Address: "0000:3b:00.2"}
	own := n.functions[id]
	bound := own
	bound.Driver, bound.Netdev, bound.IOMMUGroup = "vfio-pci", "", "42"
	n.functions[id] = bound
	n.freed = func() { n.functions[id] = own }
	n.wantPrepared(of("pod1", "net", claimtest.Result("blue", plainPool, "0000-3b-00-2"),
		claimtest.FromClaim(`"mtu": 1400`)))
	if a, _ := n.journal.Get(id); a.Interface.Userspace || a.Interface.MTU != 1400 {
		t.Errorf("interface %+v, want one of the kernel's with MTU 1400", a.Interface)
	}

	n.attach(n.driver())
	n.wantNodes(nil, "XPU_INTERFACE_BLUE=net1")
}

// TestDriverOfThePoolBefore: a claim keeps its driver until it is released, even if it is prepared
// again after the pool became a pool of netdevs and the node was rebooted.
func TestDriverOfThePoolBefore(t *testing.T) {
	n := newNode(t)
	n.specs["plain"] = v1alpha1.DevicePoolSpec{Driver: v1alpha1.DriverVFIO}
	d := n.fitting()
	c := of("pod1", "net", claimtest.Result("blue", plainPool, "0000-3b-00-2"))
	id := function.ID{Address: "0000:3b:00.2"}
	own := n.functions[id]
	for range 2 {
		if err := prepare(t, d, c)[c.UID].Err; err != nil {
			t.Fatal(err)
		}

		a, _ := n.journal.Get(id)
		if !a.Interface.Userspace || a.Setup == nil || a.Setup.Driver != "vfio-pci" {
			t.Errorf("interface %+v with setup %+v, want one for a program", a.Interface, a.Setup)
		}

		n.attach(d)
		n.wantNodes([]string{"/dev/vfio/vfio", "/dev/vfio/42"}, "XPU_VFIO_BLUE=/dev/vfio/42")
		if err := n.journal.Put(a); err != nil { // the sandbox ended with the reboot
			t.Fatal(err)
		}

		n.specs["plain"] = v1alpha1.DevicePoolSpec{}
		n.functions[id] = own
	}
}

// TestVFIOWithoutIOMMU: only the administrator may give a pod access to all of the node's memory.
func TestVFIOWithoutIOMMU(t *testing.T) {
	n := newNode(t)
	f := n.functions[function.ID{Address: "0000:3b:00.2"}]
	f.IOMMUGroup = ""
	n.functions[f.ID] = f
	c := of("pod1", "net", claimtest.Result("blue", plainPool, "0000-3b-00-2"),
		claimtest.FromClaim(`"driver": "vfio-pci"`))
	n.wantRefused(c, "driver vfio-pci: there is no IOMMU")
	n.specs["plain"] = v1alpha1.DevicePoolSpec{
		Driver: v1alpha1.DriverVFIO, Allow: []v1alpha1.PrivilegedField{v1alpha1.FieldDriver},
	}
	if err := prepare(t, n.fitting(), c)[c.UID].Err; err != nil {
		t.Error(err)
	}
}

// TestInfiniBand: a Function is not asked for what its link type does not have.
func TestInfiniBand(t *testing.T) {
	n := newNode(t)
	f := n.functions[function.ID{Address: "0000:3b:00.2"}]
	allow := []v1alpha1.PrivilegedField{v1alpha1.FieldMAC, v1alpha1.FieldPortGUID}
	n.specs["plain"] = v1alpha1.DevicePoolSpec{Allow: allow}
	claimed := func(fields string) *resourceapi.ResourceClaim {
		return of("pod1", "net", claimtest.Result("blue", plainPool, "0000-3b-00-2"),
			claimtest.FromClaim(fields))
	}

	const guid = `"vf": {"portGUID": "00:11:22:33:44:55:66:77"}`
	f.LinkType = function.Ethernet
	n.functions[f.ID] = f
	n.wantRefused(claimed(guid), "vf.nodeGUID, vf.portGUID: must be absent: Function "+
		"0000:3b:00.2 is Ethernet")

	f.LinkType = function.InfiniBand
	n.functions[f.ID] = f
	n.wantRefused(claimed(`"mac": "02:00:00:00:00:01"`), "an InfiniBand interface has no MAC")
	n.wantRefused(claimed(`"network": "blue"`), `network "blue": must be absent: Function `+
		"0000:3b:00.2 is InfiniBand")
	c := claimed(guid)
	if err := prepare(t, n.driver(), c)[c.UID].Err; err != nil {
		t.Error(err)
	}
}

func TestPoolOfVFIORefusesMTU(t *testing.T) {
	n := newNode(t)
	n.specs["plain"] = v1alpha1.DevicePoolSpec{Driver: v1alpha1.DriverVFIO}
	n.wantRefused(of("pod1", "net", claimtest.Result("blue", plainPool, "0000-3b-00-2"),
		claimtest.FromClaim(`"mtu": 1400`)),
		"mtu 1400: must be absent")
}

// TestRDMAAndVDPA: containers get the devices that the pool's selector asks for.
func TestRDMAAndVDPA(t *testing.T) {
	n := newNode(t)
	id := function.ID{Address: "0000:3b:00.2"}
	f := n.functions[id]
	f.RDMA, f.RDMADevices = true, []string{"mlx5_2"}
	f.VDPA = function.VDPA{Name: "vdpa0", Driver: "vhost_vdpa", CharDevice: "vhost-vdpa-0"}
	n.functions[id] = f
	sys := t.TempDir()
	if err := os.MkdirAll(filepath.Join(sys,
		"bus/pci/devices/0000:3b:00.2/infiniband_verbs/uverbs2"), 0o755); err != nil {
		t.Fatal(err)
	}

	c := of("pod1", "net", claimtest.Result("blue", plainPool, "0000-3b-00-2"))
	for _, test := range []struct {
		selector v1alpha1.FunctionSelector
		nodes    []string
		env      string
	}{
		{v1alpha1.FunctionSelector{IsRdma: true}, []string{"/dev/infiniband/uverbs2"},
			"XPU_RDMA_BLUE=mlx5_2"},
		{v1alpha1.FunctionSelector{VDPAType: "vhost"}, []string{"/dev/vhost-vdpa-0"},
			"XPU_VDPA_BLUE=/dev/vhost-vdpa-0"},
		{v1alpha1.FunctionSelector{}, nil, "XPU_INTERFACE_BLUE=net1"},
	} {
		n := newNode(t)
		n.functions[id] = f
		n.specs["plain"] = v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{test.selector},
		}
		d := n.driver()
		d.CDI.DeviceNodes = &devnode.Finder{SysRoot: sys, DevRoot: t.TempDir()}
		if err := prepare(t, d, c)[c.UID].Err; err != nil {
			t.Fatal(err)
		}

		// What was promised stays, although the pool is deleted before the pod has its interface.
		delete(n.specs, "plain")
		n.attach(d)
		n.wantNodes(test.nodes, test.env)
	}

	f.RDMADevices = nil
	n.functions[id] = f
	n.specs["plain"] = v1alpha1.DevicePoolSpec{
		Selectors: []v1alpha1.FunctionSelector{{IsRdma: true}},
	}
	n.wantRefused(c, "request blue, Function 0000:3b:00.2: has no RDMA device")
}

// wantNodes compares the device nodes of the only CDI device, and the last variable of its
// environment.
func (n *node) wantNodes(want []string, env string) {
	n.t.Helper()
	cache := n.runtime()
	names := cache.ListDevices()
	if len(names) != 1 {
		n.t.Fatalf("CDI devices %q, want one", names)
	}

	edits := cache.GetDevice(names[0]).ContainerEdits
	var got []string
	for _, d := range edits.DeviceNodes {
		got = append(got, d.Path)
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		n.t.Errorf("device nodes: -want +got\n%s", diff)
	}
	if last := edits.Env[len(edits.Env)-1]; last != env {
		n.t.Errorf("the last of the environment is %s, want %s", last, env)
	}
}
