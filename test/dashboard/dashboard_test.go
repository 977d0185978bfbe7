// SPDX-License-Identifier: Apache-2.0

// Package dashboard tests the page of xpuctl dashboard in a browser.
package dashboard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/dashboard"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/dashboard/dashboardtest"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/browser"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// Sizes of windows in CSS pixels: a notebook and a telephone.
const (
	wide, wideHeight     = 1440, 900
	narrow, narrowHeight = 390, 844
)

// markup is what an attacker might call things.
const markup = "<img src=x onerror=alert(1)>"

// page is the dashboard in a browser.
type page struct {
	*browser.Page
	t *testing.T
}

func start(t *testing.T) page {
	t.Helper()
	return page{browser.Start(t, "../../bin/dashboard"), t}
}

func serve(t *testing.T, cluster *dashboardtest.Cluster) (d *dashboard.Dashboard, stop func(), address string) {
	t.Helper()
	d = dashboard.New(dashboard.Options{
		Client: cluster, Cluster: "demo", AgentNamespace: dashboardtest.Namespace,
		State: func(_ context.Context, node string) (*nodestate.State, error) {
			return state(node), nil
		},
		Explain: func(_ context.Context, pod types.NamespacedName) (*explain.Pod, error) {
			return explanation(pod), nil
		},
		Now: dashboardtest.Start, Pause: dashboard.DefaultPause,
	})
	l, err := dashboard.Listen(0)
	must.Succeed(t, err)
	stop = must.Run(t, func(ctx context.Context) error { return d.Serve(ctx, l) })
	return d, stop, d.URL(l)
}

// state is what an agent says: 64 VFs, of which pods have some, and one is broken.
func state(node string) *nodestate.State {
	s := &nodestate.State{Node: node, Agent: "v0.1.0", Time: dashboardtest.Start()}
	pf := nodestate.Function{ID: function.ID{Address: "0000:3b:00.0"}, Kind: function.PF,
		PF: "0000:3b:00.0", PFName: "ens1f0", Netdev: "ens1f0", Driver: "mlx5_core", LinkUp: true,
		Vendor: "15b3", Device: "a2dc", NumVFs: 64, TotalVFs: 64, PCIeRoot: "pci0000:3a"}
	s.Functions = append(s.Functions, pf)
	for i := range 64 {
		vf := nodestate.Function{ID: function.ID{Address: dashboardtest.VF(i)}, Kind: function.VF,
			PF: pf.PF, PFName: pf.PFName, Index: i, Driver: "mlx5_core", Pool: "fast"}
		switch {
		case i == 0:
			vf.Problems = []nodestate.Problem{{Taint: "fault", Message: "the driver does not answer"}}
		case i%4 == 1:
			vf.Attachment = &nodestate.Attachment{State: "Attached",
				Interface: nodestate.Interface{Name: "net1"},
				Pod:       nodestate.Pod{Namespace: "shop", Name: fmt.Sprintf("web-%s-%d", node, i)}}
		case i == 2:
			vf.Attachment = &nodestate.Attachment{State: "Releasing",
				Pod: nodestate.Pod{Namespace: "shop", Name: "cache"}}
		case i == 63:
			vf.Pool = ""
		}
		s.Functions = append(s.Functions, vf)
	}
	return s
}

// explanation is what is said of each pod.
func explanation(pod types.NamespacedName) *explain.Pod {
	at := dashboardtest.Start()
	text := "XPUPort shop/node1-0000-3b-01-1 at XPU xpu-1: XPUUnavailable: 10.77.0.101:50151 " +
		"refuses connections"
	return &explain.Pod{Namespace: pod.Namespace, Name: pod.Name, Node: "node1", Phase: "Pending",
		Verdict: "request nic of claim web is not Provisioned: " + text,
		Interfaces: []explain.Interface{{Claim: "web", Request: "nic", Pool: "fast",
			Function: "0000:3b:01.1", Network: "blue", XPU: "xpu-1",
			Stages: []explain.Stage{
				{Name: explain.Requested, Status: explain.Done, Time: at},
				{Name: explain.Allocated, Status: explain.Done, Time: at.Add(time.Second),
					Text: "Function 0000:3b:01.1 of pool fast on node node1"},
				{Name: explain.Bound, Status: explain.Done, Time: at.Add(time.Second),
					Text: "node node1"},
				{Name: explain.Provisioned, Status: explain.Failed, Text: text},
				{Name: explain.Prepared, Status: explain.Waiting,
					Text: "the kubelet has not asked xpu-agent for the claim yet"},
				{Name: explain.Attached, Status: explain.Unknown},
				{Name: explain.Running, Status: explain.Skipped},
			},
			Card: &explain.Side{MAC: "02:00:00:00:00:01", VLAN: 10, MTU: 1400,
				Addresses: []string{"10.10.0.2/16"}, State: "XPUUnavailable"}}},
		Events: []explain.Event{{Time: at, Object: "Pod/web", Reason: "Scheduled",
			Message: "assigned to node1"}},
		Unknown: []string{"what the agent knows: " + markup},
	}
}

// TestPage shows a large cluster in both widths and colours, and looks into a pod and a node.
func TestPage(t *testing.T) {
	b := start(t)
	cluster := dashboardtest.NewCluster(dashboardtest.Objects(500, 64)...)
	_, _, address := serve(t, cluster)

	for _, colours := range []string{"light", "dark"} {
		for _, size := range []struct {
			name          string
			width, height int
		}{{"wide", wide, wideHeight}, {"narrow", narrow, narrowHeight}} {
			b.Look(size.width, size.height, colours)
			b.Visit(address)
			b.Eventually(`document.querySelector("#connection").dataset.state === "live"`)
			for _, view := range []struct{ name, hash, wants string }{
				{"wrong", "wrong", "10.77.0.101:50151 refuses connections"},
				{"nodes", "node", "node2"},
				{"pods", "pod", "shop/web-node1-1"},
				{"pools", "pool", "fast"},
				{"node", "node/node1", "the driver does not answer"},
				{"pod", "pod/shop/web-node1-1", "not asked xpu-agent for the claim yet"},
			} {
				b.Is(fmt.Sprintf("location.hash = %q", view.hash))
				b.Eventually(fmt.Sprintf("document.body.innerText.includes(%q)", view.wants))
				if b.Is("document.documentElement.scrollWidth > innerWidth") {
					t.Errorf("%s, %s: the page is wider than the window", view.name, size.name)
				}
				b.Screenshot(view.name + "-" + size.name + "-" + colours)
			}
		}
		b.checkContrast(colours)
	}

	b.checkTimeline()
	if b.Is(`document.querySelector("img")`) {
		t.Error("text of the cluster became markup")
	}
	if all := b.Complaints(); len(all) > 0 {
		t.Errorf("the page complains:\n%s", strings.Join(all, "\n"))
	}
}

// checkTimeline checks that each stage has its mark, so that its status is not shown by colour
// alone.
func (b page) checkTimeline() {
	b.t.Helper()
	var got []string
	b.Evaluate(&got, `[...document.querySelectorAll(".timeline li")].map((li) =>
		li.querySelector(".mark").innerText + li.querySelector(".name").innerText)`)
	want := "✓Requested ✓Allocated ✓Bound ✗Provisioned …Prepared ?Attached -Running"
	if strings.Join(got, " ") != want {
		b.t.Errorf("%v, want %s", got, want)
	}
}

// checkContrast checks that texts have the contrast of WCAG 2.2, success criterion 1.4.3 (4.5:1), and
// that the colours are those that the user prefers.
func (b page) checkContrast(colours string) {
	b.t.Helper()
	var got map[string]float64
	b.Evaluate(&got, `(() => {
		const style = getComputedStyle(document.documentElement);
		const light = (name) => {
			const hex = style.getPropertyValue(name).trim().slice(1);
			const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
				.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
			return 0.2126 * r + 0.7152 * g + 0.0722 * b;
		};
		const out = {back: light("--back")};
		for (const text of ["--text", "--faint", "--accent", "--good", "--bad", "--warn"]) {
			for (const back of ["--back", "--panel", "--chosen"]) {
				const [low, high] = [light(text), light(back)].sort((x, y) => x - y);
				out[text + " on " + back] = (high + 0.05) / (low + 0.05);
			}
		}
		return out;
	})()`)

	if isDark := got["back"] < 0.2; isDark != (colours == "dark") {
		b.t.Errorf("%s: the background has lightness %.2f", colours, got["back"])
	}
	delete(got, "back")
	for name, ratio := range got {
		if ratio < 4.5 {
			b.t.Errorf("%s: %s has a contrast of %.1f:1", colours, name, ratio)
		}
	}
}

// TestKeyboard uses the page without a mouse.
func TestKeyboard(t *testing.T) {
	b := start(t)
	_, _, address := serve(t, dashboardtest.NewCluster(dashboardtest.Objects(30, 8)...))
	b.Look(wide, wideHeight, "light")
	b.Visit(address + "#node")
	b.Eventually(`document.querySelectorAll(".row.node").length > 5`)

	b.Is(`(document.querySelector("#list").focus(), true)`)
	for _, key := range []string{"ArrowDown", "ArrowDown", "Enter"} {
		b.Press(key)
	}
	b.Eventually(`location.hash === "#node/node3" && !document.querySelector("#detail").hidden`)
	b.Eventually(`document.activeElement.id === "detail-heading"`)
	b.Press("Escape")
	b.Eventually(`document.querySelector("#detail").hidden && document.activeElement.id === "list"`)
	b.Press("End")
	b.Eventually(`document.querySelector("[aria-selected=true]").innerText.includes("node30")`)
	b.Eventually(`document.getElementById(document.querySelector("#list")
		.getAttribute("aria-activedescendant")).innerText.includes("node30")`)
	b.Press("/")
	b.Eventually(`document.activeElement.id === "filter"`)
	b.Press("7")
	b.Eventually(`document.querySelector("#heading").innerText.startsWith("Nodes: 3 of 30")`)
}

// TestLive checks that the page follows the cluster, says what is stale, and connects again.
func TestLive(t *testing.T) {
	b := start(t)
	cluster := dashboardtest.NewCluster(dashboardtest.Objects(3, 8)...)
	cluster.Refuse("DevicePool", "", apierrors.NewForbidden(schema.GroupResource{}, "",
		errors.New("no")))
	d, stop, address := serve(t, cluster)
	b.Look(wide, wideHeight, "light")
	b.Visit(address)
	b.Eventually(`document.querySelector("#connection").dataset.state === "live"`)
	b.Eventually(`document.querySelector("#notices").innerText.includes("ClusterRole xpu-view")`)
	b.Screenshot("rights")

	cluster.Put(dashboardtest.Pending("stuck", markup)...)
	b.Eventually(`document.querySelector("#list").innerText.includes("onerror")`)

	cluster.Down(errors.New("connection refused"))
	b.Eventually(`document.querySelector("#connection").innerText.includes(
		"the cluster does not answer: what is shown is of 2026-11-23 12:00:00")`)
	b.Screenshot("stale")
	if !strings.Contains(b.Text("#list"), "onerror") {
		t.Error("what is known is not shown any more")
	}
	cluster.Down(nil)
	b.Eventually(`document.querySelector("#connection").innerText.includes("live")`)

	stop()
	b.Eventually(`document.querySelector("#connection").innerText.includes("xpuctl does not answer")`)
	l, err := net.Listen("tcp4", strings.Split(address, "/")[2])
	must.Succeed(t, err)
	must.Run(t, func(ctx context.Context) error { return d.Serve(ctx, l) })
	b.Eventually(`document.querySelector("#connection").innerText.includes("live")`)
}

// mostElements bounds the elements of the page, whatever the size of the cluster.
const mostElements = 1500

// longTask is what the Long Tasks API calls long, in ms (https://www.w3.org/TR/longtasks-1/).
const longTask = 50

// TestScrolling scrolls through 500 nodes with 64 VFs and through their pods while others come. No
// task of the page is long, and the page has few elements.
func TestScrolling(t *testing.T) {
	b := start(t)
	cluster := dashboardtest.NewCluster(dashboardtest.Objects(500, 64)...)
	_, _, address := serve(t, cluster)
	b.Look(wide, wideHeight, "light")
	b.Visit(address)
	b.Eventually(`document.querySelector("#views").innerText.includes("Pods 8000")`)

	must.Run(t, func(ctx context.Context) error { // while pods come
		for i := 0; ctx.Err() == nil; i++ {
			cluster.Put(dashboardtest.Pending(fmt.Sprint("new-", i), "no node")...)
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
		return nil
	})

	for _, view := range []string{"node", "pod"} {
		b.Is(fmt.Sprintf("location.hash = %q", view))
		b.Eventually(fmt.Sprintf(`document.querySelectorAll(".row.%s").length > 5`, view))
		var m measurement
		longest := b.LongestTask(func() { m = b.scroll() })
		t.Logf("%ss: %d frames, the longest %.0f ms; the longest task %.1f ms; at most %d elements",
			view, m.Frames, m.LongestFrame, longest, m.Elements)
		if longest >= longTask {
			t.Errorf("%ss: a task of %.0f ms, want less than %d", view, longest, longTask)
		}
		if m.Elements > mostElements {
			t.Errorf("%d elements, want at most %d", m.Elements, mostElements)
		}
		if m.Blank > 0 {
			t.Errorf("%d frames without rows", m.Blank)
		}
	}
}

// measurement is what a page does while it is scrolled.
type measurement struct {
	Frames       int     `json:"frames"`
	LongestFrame float64 `json:"longestFrame"` // in ms
	Elements     int     `json:"elements"`
	Blank        int     `json:"blank"` // frames in which no row can be seen
}

// scroll scrolls down by half a window in each of 200 frames, and back to the top.
func (b page) scroll() (m measurement) {
	b.t.Helper()
	b.Evaluate(&m, `new Promise((done) => {
		const m = {frames: 0, longestFrame: 0, elements: 0, blank: 0};
		const list = document.querySelector("#list");
		let last = performance.now();
		const frame = (now) => {
			m.longestFrame = Math.max(m.longestFrame, now - last);
			last = now;
			m.elements = Math.max(m.elements, document.getElementsByTagName("*").length);
			if (!list.querySelector(".row")) m.blank++;
			if (m.frames++ === 200) {
				list.scrollTop = 0;
				return requestAnimationFrame(() => done(m));
			}
			list.scrollTop += list.clientHeight / 2;
			requestAnimationFrame(frame);
		};
		requestAnimationFrame(frame);
	})`)
	return m
}
