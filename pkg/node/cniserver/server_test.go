// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

func decodeResult(t *testing.T, raw json.RawMessage) *types100.Result {
	t.Helper()
	some, err := create.CreateFromBytes(raw)
	must.Succeed(t, err)
	result, err := types100.GetResult(some)
	must.Succeed(t, err)
	return result
}

// The whole life of a Function of a pool, over the socket, on a network, with addresses.
func TestAddAndDel(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	n.xpuAgent.mtu = 1450
	before := n.Snapshot(0)
	pod := netns.New(t)
	add := request(wire.Add, 0, "c1", pod, map[string]any{
		"network": "blue", "mtu": 1480,
		"runtimeConfig": map[string]any{"CNIDeviceInfoFile": "/any"},
	})

	add.IPAM = json.RawMessage(ipamResult)
	n.serve(func(r *running) {
		reply, err := r.call(add)
		must.Succeed(t, err)
		if reply.Error != nil {
			t.Fatal(reply.Error)
		}

		want := &types100.Result{
			CNIVersion: "1.1.0",
			Interfaces: []*types100.Interface{
				{Name: "net1", Mac: "02:00:00:00:00:aa", Mtu: 1450, Sandbox: pod.Path()},
			},
		}

		got := decodeResult(t, reply.Result)
		if diff := cmp.Diff(want.Interfaces, got.Interfaces); diff != "" {
			t.Errorf("interfaces (-want +got):\n%s", diff)
		}

		if len(got.IPs) != 1 || *got.IPs[0].Interface != 0 ||
			got.IPs[0].Address.String() != "10.1.0.5/24" ||
			got.IPs[0].Gateway.String() != "10.1.0.1" {
			t.Errorf("IPs %v", got.IPs)
		}

		if len(got.Routes) != 2 || len(got.DNS.Nameservers) != 1 {
			t.Errorf("routes %v, DNS %v", got.Routes, got.DNS)
		}
		// the specification cannot describe an SF, whose address is that of its PF
		if len(reply.DeviceInfo) > 0 {
			t.Errorf("device info %s, want none", reply.DeviceInfo)
		}

		port, _ := n.xpuAgent.port(lifecycletest.ID(0))
		wantPort := journal.Attachment{
			Function: lifecycletest.ID(0), PF: n.functions[lifecycletest.ID(0)].PF,
			Port: &journal.Port{DevicePool: "fast", Network: "blue", MAC: "02:00:00:00:00:aa"},
			Pod:  journal.Pod{Namespace: "default", Name: "pod-c1", UID: "uid-c1"},
		}

		if diff := cmp.Diff(wantPort, port); diff != "" {
			t.Errorf("Port (-want +got):\n%s", diff)
		}

		l := mustLink(t, pod, "net1")
		routes, err := pod.Handle().RouteList(l, netlink.FAMILY_V4)
		must.Succeed(t, err)
		if len(routes) != 3 { // the route of the address, and two others
			t.Errorf("routes %v", routes)
		}

		record, _ := r.Journal.Get(lifecycletest.ID(0))
		if record.Resource != "" || record.State != journal.Attached || record.Sandbox != "c1" {
			t.Errorf("record %+v", record)
		}

		again, err := r.call(add)
		must.Succeed(t, err)
		if !bytes.Equal(again.Result, reply.Result) || n.xpuAgent.calls != 1 {
			t.Errorf("second ADD: %s %v, want %s", again.Result, again.Error, reply.Result)
		}

		result := with(add, func(r *wire.Request) { r.Command, r.IPAM = wire.Result, nil })
		if again := r.must(result); !bytes.Equal(again.Result, reply.Result) {
			t.Errorf("RESULT: %s, want %s", again.Result, reply.Result)
		}

		r.mustFail(with(result, func(r *wire.Request) { r.ContainerID = "c2" }),
			types.ErrUnknownContainer, "of container c2")
		changed := with(add, func(r *wire.Request) {
			r.Config = bytes.Replace(r.Config, []byte("1480"), []byte("1300"), 1)
		})
		r.mustFail(changed, CodeTaken, "another configuration")

		for range 2 {
			reply, err = r.call(wire.Request{
				Command: wire.Del, ContainerID: "c1", IfName: "net1", At: time.Now(),
			})
			must.Succeed(t, err)
			if reply.Error != nil {
				t.Fatal(reply.Error)
			}
		}

		r.checkFree(0, before)
	})
}

// Without IPAM, the runtime's ips are used, and the netdev keeps all other properties.
func TestAddWithoutIPAM(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	was := n.Snapshot(0)
	pod := netns.New(t)
	n.run(func(r *running) {
		add := request(wire.Add, 0, "c1", pod, map[string]any{
			"mac": "02:00:00:00:00:01", "runtimeConfig": map[string]any{
				"ips": []string{"10.1.0.7/24"}, "mac": "02:00:00:00:00:03",
			},
			"dns": map[string]any{"nameservers": []string{"192.0.2.53"}},
		})

		add.Args += ";MAC=02:00:00:00:00:02"
		got := decodeResult(t, r.must(add).Result)
		n.pools[0].Spec.Network = "blue"
		r.must(add) // a repeated ADD; the pool's new network is for the next pod
		if len(got.IPs) != 1 || got.IPs[0].Address.String() != "10.1.0.7/24" ||
			len(got.Routes) != 0 || len(got.DNS.Nameservers) != 1 {
			t.Errorf("result %v", got)
		}
		if got.Interfaces[0].Mac != "02:00:00:00:00:03" || got.Interfaces[0].Mtu != was.MTU {
			t.Errorf("interface %v, want the runtime's MAC and the MTU of before",
				got.Interfaces[0])
		}
		if _, ok := n.xpuAgent.port(lifecycletest.ID(0)); ok {
			t.Error("a Port without a network")
		}

		r.must(request(wire.Del, 0, "c1", nil, nil))
		r.checkFree(0, was)
	})
}

func TestAddRefuses(t *testing.T) {
	t.Parallel()
	n := newNode(t, 3)
	slow := pool.Pool{Name: "slow", Spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDRA},
		Functions: []function.Function{n.functions[lifecycletest.ID(1)]}}
	n.pools[0].Functions = n.pools[0].Functions[:1]
	n.pools = append(n.pools, slow)
	pod, other := netns.New(t), netns.New(t)
	n.run(func(r *running) {
		r.must(request(wire.Add, 0, "c1", pod, nil))
		add := func(i int, config map[string]any) wire.Request {
			return request(wire.Add, i, "c2", other, config)
		}
		r.mustFail(add(9, nil), CodeNoFunction, "Function 0000:3b:00.0/sf9 is not on this node")
		r.mustFail(add(1, nil), CodeNotOffered,
			"in one that is published by DRA, the pod must have a claim")
		r.mustFail(add(2, nil), CodeNotOffered, "belongs to no DevicePool")
		r.mustFail(add(0, nil), CodeTaken, "is Attached in pod default/pod-c1 (sandbox c1)")
		r.mustFail(with(request(wire.Add, 0, "c1", pod, nil), func(r *wire.Request) {
			r.IfName = "net2"
		}), CodeTaken, "(sandbox c1) as net1")
		r.mustFail(with(add(0, nil), func(r *wire.Request) {
			r.IPAM = json.RawMessage(`{"cniVersion":"9"}`)
		}), types.ErrDecodingFailure, "IPAM")
		r.mustFail(with(add(0, nil), func(r *wire.Request) { r.Config = json.RawMessage(`{`) }),
			types.ErrDecodingFailure, "network configuration")
		r.mustFail(with(add(0, nil), func(r *wire.Request) { r.NetNS = "" }),
			types.ErrInvalidEnvironmentVariables, "CNI_NETNS")
		r.mustFail(with(add(0, nil), func(r *wire.Request) { r.ContainerID = "" }),
			types.ErrInvalidEnvironmentVariables, "CNI_CONTAINERID")
		r.mustFail(with(add(0, nil), func(r *wire.Request) { r.IfName = "a/b" }),
			types.ErrInvalidEnvironmentVariables, `interface name "a/b"`)
		r.mustFail(with(add(0, nil), func(r *wire.Request) { r.IfName = "" }),
			types.ErrInvalidEnvironmentVariables, "CNI_IFNAME")
		r.mustFail(with(add(0, nil), func(r *wire.Request) { r.Version = 2 }), CodeVersion, "not 2")
		r.mustFail(with(add(0, nil), func(r *wire.Request) { r.Command = "MOVE" }),
			types.ErrInvalidEnvironmentVariables, `"MOVE"`)
		must.Succeed(t, r.Lifecycle.EndRequest(t.Context(), "c1", "net1", nil))
		pools := n.pools
		n.pools = nil
		r.mustFail(add(0, nil), types.ErrTryAgainLater, "pools have not been read yet")
		n.pools = pools
		r.mustFail(with(add(0, nil), func(r *wire.Request) { r.NetNS += "-gone" }), CodeAttach,
			"no such file")
		if a, _ := r.Journal.Get(lifecycletest.ID(0)); a.State != journal.Reserved {
			t.Errorf("record %+v", a)
		}

		r.must(request(wire.Del, 0, "c2", nil, nil))
		if left := r.Journal.All(); len(left) > 0 {
			t.Errorf("left: %+v", left)
		}
	})
}

// A container whose DEL never came does not keep the Function once its sandbox is gone, or if it
// belongs to the same pod.
func TestTakesOver(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		gone    bool
		samePod bool
	}{"its sandbox is gone": {gone: true}, "another sandbox of the pod": {samePod: true}}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1)
			before := n.Snapshot(0)
			first, second := netns.New(t), netns.New(t)
			n.run(func(r *running) {
				r.must(request(wire.Add, 0, "c1", first, map[string]any{"network": "blue"}))
				add := request(wire.Add, 0, "c2", second, map[string]any{"network": "red"})

				// a veth would end with its namespace, so here it returns like the netdev of a card
				if test.gone {
					must.Succeed(t, first.Unmount())
					must.Succeed(t,
						first.Handle().LinkSetNsFd(mustLink(t, first, "net1"), n.Host.Fd()))
				}

				if test.samePod {
					add.Args = request(wire.Add, 0, "c1", nil, nil).Args
				}

				r.must(add)
				port, _ := n.xpuAgent.port(lifecycletest.ID(0))
				if record, _ := r.Journal.Get(lifecycletest.ID(0)); record.Sandbox != "c2" ||
					port.Port.Network != "red" {
					t.Errorf("record %+v, Port %+v", record, port)
				}

				r.must(request(wire.Del, 0, "c1", nil, nil)) // a late DEL
				if record, _ := r.Journal.Get(
					lifecycletest.ID(0),
				); record.State != journal.Attached {
					t.Errorf("record %+v after a late DEL", record)
				}

				r.must(request(wire.Del, 0, "c2", nil, nil))
				r.checkFree(0, before)
			})
		})
	}
}

func TestProvisionFails(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	pod := netns.New(t)
	n.xpuAgent.err = errRefused
	add := request(wire.Add, 0, "c1", pod, map[string]any{"network": "blue"})
	n.run(func(r *running) {
		r.mustFail(add, CodeProvision, errRefused.Error())
		if record, _ := r.Journal.Get(lifecycletest.ID(0)); record.State != journal.Reserved ||
			record.Port == nil {
			t.Errorf("record %+v", record)
		}

		n.xpuAgent.err = nil
		r.must(add) // the runtime repeats the ADD
		r.must(request(wire.Del, 0, "c1", nil, nil))
		r.checkFree(0, before)
		n.xpuAgent.err = errRefused
		r.mustFail(add, CodeProvision, "")
		r.must(request(wire.Del, 0, "c1", nil, nil))
		r.checkFree(0, before)
	})
}

// TestAddWithAnotherNetNS: an ADD is refused if the container's interface is in another namespace.
// The same namespace may have another path.
func TestAddWithAnotherNetNS(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	pod, other := netns.New(t), netns.New(t)
	n.run(func(r *running) {
		add := request(wire.Add, 0, "c1", pod, nil)
		first := r.must(add)
		r.mustFail(request(wire.Add, 0, "c1", other, nil), CodeTaken, "in network namespace "+
			pod.Path()+", and CNI_NETNS "+
			other.Path()+" is another one; DEL must come before")
		gone := with(add, func(r *wire.Request) { r.NetNS = "/run/netns/never" })
		r.mustFail(gone, CodeTaken, "CNI_NETNS /run/netns/never is another one")
		link := filepath.Join(t.TempDir(), "ns")
		must.Succeed(t, os.Symlink(pod.Path(), link))

		if again := r.must(with(add, func(r *wire.Request) {
			r.NetNS = link
		})); !bytes.Equal(again.Result, first.Result) {
			t.Errorf("result %s, want %s", again.Result, first.Result)
		}

		mustLink(t, pod, "net1")
	})
}

// A DEL ends a running ADD, and another ADD of the Function does not wait for it.
func TestDelEndsAdd(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	pod := netns.New(t)
	n.xpuAgent.entered = make(chan struct{})
	n.run(func(r *running) {
		var adding sync.WaitGroup
		adding.Go(func() {
			r.mustFail(request(wire.Add, 0, "c1", pod, map[string]any{"network": "blue"}),
				CodeProvision, errDeleted.Error())
		})

		<-n.xpuAgent.entered
		r.mustFail(request(wire.Add, 0, "c2", pod, nil), types.ErrTryAgainLater,
			"an ADD for container c1 runs already")
		r.must(request(wire.Del, 0, "c1", nil, nil))
		adding.Wait()
		r.checkFree(0, before)

		n.xpuAgent.entered = nil
		// enough time to reach the xPU agent, which does not answer
		r.AddTimeout = 2 * time.Second
		n.xpuAgent.entered = make(chan struct{}, 1)
		r.mustFail(request(wire.Add, 0, "c1", pod, map[string]any{"network": "blue"}),
			CodeProvision, "the agent waited 2s")
		r.must(request(wire.Del, 0, "c1", nil, nil))
	})
}

// TestCrash ends the agent at every point of ADD and DEL. The runtime's next request, or the next
// agent, completes the work.
func TestCrash(t *testing.T) {
	t.Parallel()
	config := map[string]any{"network": "blue", "mtu": 1400, "mac": "02:00:00:00:00:01"}
	addRequest := func(pod *netns.Namespace) wire.Request {
		return with(request(wire.Add, 0, "c1", pod, config), func(r *wire.Request) {
			r.IPAM = json.RawMessage(ipamResult)
		})
	}

	del := request(wire.Del, 0, "c1", nil, nil)
	heals := map[string]func(t *testing.T, r *running, pod *netns.Namespace){
		"DEL": func(_ *testing.T, r *running, _ *netns.Namespace) { r.must(del) },
		"ADD, DEL": func(_ *testing.T, r *running, pod *netns.Namespace) {
			other := addRequest(pod)
			other.IPAM = bytes.Replace(other.IPAM, []byte("10.1.0.5/24"), []byte("10.1.0.6/24"), 1)
			r.must(other)
			r.must(del)
		},
		"recovery, GC": func(t *testing.T, r *running, _ *netns.Namespace) {
			must.Succeed(t, r.Lifecycle.Recover(t.Context()))
			r.settled()
			r.must(wire.Request{Version: wire.Version, Command: wire.GC, At: time.Now(),
				Config: json.RawMessage(`{"name":"sriov","cni.dev/valid-attachments":[]}`)})
		},
	}

	operations := map[string]struct {
		addReply bool
		do       func(t *testing.T, r *running, pod *netns.Namespace)
		// atLeast is the least number of events.
		atLeast int
	}{
		"ADD": {false, func(_ *testing.T, r *running, pod *netns.Namespace) {
			r.must(addRequest(pod))
		}, 10},
		"DEL": {true, func(_ *testing.T, r *running, _ *netns.Namespace) { r.must(del) }, 4},
	}

	for name, operation := range operations {
		for healName, heal := range heals {
			t.Run(name+", then "+healName, func(t *testing.T) {
				t.Parallel()
				for at := 1; ; at++ {
					n := newNode(t, 1)
					before := n.Snapshot(0)
					pod := netns.New(t)
					if operation.addReply {
						n.run(func(r *running) { r.must(addRequest(pod)) })
					}

					crashed := n.crashes(at, func(r *running) { operation.do(t, r, pod) })
					n.run(func(r *running) {
						heal(t, r, pod)
						r.checkFree(0, before)
					})

					if t.Failed() {
						t.Fatalf("failed at event %d", at)
					}

					if !crashed {
						if at-1 < operation.atLeast {
							t.Errorf("only %d events", at-1)
						}
						return
					}
				}
			})
		}
	}
}

// Functions go to pods in parallel, and DELs come in between.
func TestConcurrent(t *testing.T) {
	t.Parallel()
	const functions = 64
	n := newNode(t, functions)
	pods := make([]*netns.Namespace, functions)
	var before [functions]netdev.Snapshot
	for i := range functions {
		pods[i] = netns.New(t)
		before[i] = n.Snapshot(i)
	}

	n.serve(func(r *running) {
		ask := func(command wire.Command) {
			var group sync.WaitGroup
			for i := range functions {
				group.Go(func() {
					reply, err := r.call(request(command, i, fmt.Sprint("c", i), pods[i],
						map[string]any{"network": "blue"}))
					if err != nil || reply.Error != nil {
						t.Errorf("%s %d: %v %v", command, i, err, reply.Error)
					}
				})
			}

			group.Wait()
		}

		ask(wire.Add)
		ask(wire.Check)

		for _, a := range r.Journal.All() {
			if a.State != journal.Attached {
				t.Errorf("Function %s is %s", a.Function, a.State)
			}
		}

		ask(wire.Del)
		for i := range functions {
			r.checkFree(i, before[i])
		}
	})
}

func TestGC(t *testing.T) {
	t.Parallel()
	n := newNode(t, 4)
	gc := func(at time.Time, config string) wire.Request {
		return wire.Request{
			Version: wire.Version, Command: wire.GC, At: at, Config: json.RawMessage(config),
		}
	}

	n.run(func(r *running) {
		for i := range 4 {
			config := map[string]any{}
			if i == 3 {
				config["name"] = "other"
			}
			r.must(request(wire.Add, i, fmt.Sprint("c", i), netns.New(t), config))
		}

		left := func() (containers []string) {
			for _, a := range r.Journal.All() {
				containers = append(containers, a.CNI.ContainerID)
			}
			return containers
		}

		r.mustFail(gc(time.Now(), `{"cni.dev/valid-attachments":[]}`),
			types.ErrInvalidNetworkConfig, "name")
		r.mustFail(gc(time.Time{}, `{"name":"sriov","cni.dev/valid-attachments":[]}`),
			types.ErrInvalidEnvironmentVariables, "time")
		r.must(gc(time.Now().Add(-time.Hour), `{"name":"sriov","cni.dev/valid-attachments":[]}`))
		if got := left(); len(got) != 4 {
			t.Errorf("left after a GC of before: %q", got)
		}

		r.must(gc(time.Now(),
			`{"name":"sriov","cni.dev/valid-attachments":[{"containerID":"c1","ifname":"net1"},{"containerID":"c2","ifname":"net9"}]}`))
		if got := left(); !slices.Equal(got, []string{"c1", "c3"}) {
			t.Errorf("left %q", got)
		}
	})
}

func TestCheck(t *testing.T) {
	t.Parallel()
	set := func(
		change func(t *testing.T, h *netlink.Handle, l netlink.Link),
	) func(*testing.T, *netns.Namespace) {
		return func(t *testing.T, pod *netns.Namespace) {
			change(t, pod.Handle(), mustLink(t, pod, "net1"))
		}
	}

	address := func(t *testing.T, text string) *netlink.Addr {
		a, err := netlink.ParseAddr(text)
		must.Succeed(t, err)
		return a
	}

	changes := map[string]struct {
		change func(t *testing.T, pod *netns.Namespace)
		// want is part of the difference, "" for none.
		want string
	}{
		"nothing": {func(*testing.T, *netns.Namespace) {}, ""},
		"an address more": {set(func(t *testing.T, h *netlink.Handle, l netlink.Link) {
			must.Succeed(t, h.AddrAdd(l, address(t, "192.0.2.1/24")))
		}), ""},
		"mtu": {set(func(t *testing.T, h *netlink.Handle, l netlink.Link) {
			must.Succeed(t, h.LinkSetMTU(l, 1300))
		}), ""},
		"mac": {set(func(t *testing.T, h *netlink.Handle, l netlink.Link) {
			must.Succeed(t,
				h.LinkSetHardwareAddr(l, function.MAC("02:00:00:00:00:66").HardwareAddr()))
		}), `mac is 02:00:00:00:00:66, was 02:00:00:00:00:01`},
		"name": {set(func(t *testing.T, h *netlink.Handle, l netlink.Link) {
			must.Succeed(t, h.LinkSetDown(l))
			must.Succeed(t, h.LinkSetName(l, "mine0"))
		}), `name is "mine0", was "net1"`},
		"down": {set(func(t *testing.T, h *netlink.Handle, l netlink.Link) {
			must.Succeed(t, h.LinkSetDown(l))
		}), "up is false, was true"},
		"address": {set(func(t *testing.T, h *netlink.Handle, l netlink.Link) {
			must.Succeed(t, h.AddrDel(l, address(t, "10.1.0.5/24")))
		}), "address 10.1.0.5/24 is missing"},
		"route": {set(func(t *testing.T, h *netlink.Handle, l netlink.Link) {
			routes, err := h.RouteListFiltered(netlink.FAMILY_V4,
				&netlink.Route{LinkIndex: l.Attrs().Index, Protocol: unix.RTPROT_STATIC},
				netlink.RT_FILTER_OIF|netlink.RT_FILTER_PROTOCOL)
			must.Succeed(t, err)
			for _, route := range routes {
				must.Succeed(t, h.RouteDel(&route))
			}
		}), "route to 10.2.0.0/16 is missing"},
		"moved away": {func(t *testing.T, pod *netns.Namespace) {
			must.Succeed(t, pod.Handle().LinkSetNsFd(mustLink(t, pod, "net1"), netns.New(t).Fd()))
		}, "interface net1 is not in the pod"},
		"namespace gone": {func(t *testing.T, pod *netns.Namespace) {
			must.Succeed(t, pod.Unmount())
		}, "is gone"},
	}

	for name, test := range changes {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1)
			pod := netns.New(t)
			n.run(func(r *running) {
				config := map[string]any{"mtu": 1400, "mac": "02:00:00:00:00:01"}
				add := request(wire.Add, 0, "c1", pod, config)
				add.IPAM = json.RawMessage(ipamResult)
				var prev any
				must.Succeed(t, json.Unmarshal(r.must(add).Result, &prev))
				test.change(t, pod)
				config["prevResult"] = prev
				check := request(wire.Check, 0, "c1", pod, config)
				if test.want == "" {
					r.must(check)
				} else {
					r.mustFail(check, CodeCheck, test.want)
				}
			})
		})
	}
}

// TestCheckPrevious: changes of later plugins are in the result that the runtime kept, and are no
// differences.
func TestCheckPrevious(t *testing.T) {
	t.Parallel()
	link := func(
		change func(h *netlink.Handle, l netlink.Link) error,
	) func(*testing.T, *netns.Namespace) {
		return func(t *testing.T, pod *netns.Namespace) {
			must.Succeed(t, change(pod.Handle(), mustLink(t, pod, "net1")))
		}
	}

	setMAC := link(func(h *netlink.Handle, l netlink.Link) error {
		return h.LinkSetHardwareAddr(l, function.MAC("02:00:00:00:00:66").HardwareAddr())
	})
	for name, test := range map[string]struct {
		change func(*testing.T, *netns.Namespace)
		// result changes the result as a later plugin does.
		result func(*types100.Result)
		// want is part of the difference, "" for none.
		want string
	}{
		"tuning, mac": {setMAC, func(r *types100.Result) {
			r.Interfaces[0].Mac = "02:00:00:00:00:66"
		}, ""},
		"tuning, mtu": {
			link(func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetMTU(l, 1300) }),
			func(r *types100.Result) { r.Interfaces[0].Mtu = 1300 }, "",
		},
		"tuning, allmulti": {link(func(h *netlink.Handle, l netlink.Link) error {
			return h.LinkSetAllmulticastOn(l)
		}), nil, ""},
		"sbr, without the routes in the result": {
			link(func(h *netlink.Handle, l netlink.Link) error {
				return h.RouteDel(&netlink.Route{Dst: mustNet("10.2.0.0/16")})
			}),
			func(r *types100.Result) { r.Routes = r.Routes[:1] }, "",
		},
		"sbr, with the routes in another table": {
			link(func(h *netlink.Handle, l netlink.Link) error {
				return moveRoutes(h,
					l, 100)
			}), nil, "",
		},
		"a port of another netdev, with the routes in its table": {
			link(func(h *netlink.Handle, l netlink.Link) error {
				return errors.Join(moveRoutes(h, l, 100), enslave(h, l))
			}), nil, "",
		},
		"a port of another netdev, without routes": {
			link(func(h *netlink.Handle, l netlink.Link) error {
				return errors.Join(enslave(h, l),
					h.RouteDel(&netlink.Route{Dst: mustNet("10.2.0.0/16")}))
			}), nil, "",
		},
		"a port of another netdev, with the address of both": {
			link(func(h *netlink.Handle, l netlink.Link) error {
				address := &netlink.Addr{
					IPNet: &net.IPNet{IP: net.IPv4(10, 1, 0, 5), Mask: net.CIDRMask(24, 32)},
				}
				return errors.Join(enslave(h, l), h.AddrDel(l, address), giveMaster(h, address))
			}), nil, "",
		},
		"a port of another netdev, and the address of neither": {
			link(func(h *netlink.Handle, l netlink.Link) error {
				address := &netlink.Addr{
					IPNet: &net.IPNet{IP: net.IPv4(10, 1, 0, 5), Mask: net.CIDRMask(24, 32)},
				}
				return errors.Join(enslave(h, l), h.AddrDel(l, address))
			}), nil, "address 10.1.0.5/24 is missing",
		},
		"an address taken away": {
			link(func(h *netlink.Handle, l netlink.Link) error {
				return h.AddrDel(l,
					&netlink.Addr{
						IPNet: &net.IPNet{IP: net.IPv4(10, 1, 0, 5), Mask: net.CIDRMask(24, 32)},
					})
			}),
			func(r *types100.Result) { r.IPs, r.Routes = nil, nil }, "",
		},
		"bond": {setMAC, func(r *types100.Result) {
			r.Interfaces[0] = &types100.Interface{
				Name: "bond0", Mac: "02:00:00:00:00:66", Sandbox: r.Interfaces[0].Sandbox,
			}
		}, ""},
		"mac that no plugin tells of": {setMAC, nil, "mac is 02:00:00:00:00:66"},
		"an address that another plugin gave elsewhere": {nil, func(r *types100.Result) {
			r.IPs = append(r.IPs, &types100.IPConfig{Address: *mustNet("10.9.0.1/24")})
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1)
			before := n.Snapshot(0)
			pod := netns.New(t)
			n.run(func(r *running) {
				add := request(wire.Add, 0, "c1", pod, nil)
				add.IPAM = json.RawMessage(ipamResult)
				result := decodeResult(t, r.must(add).Result)

				if test.change != nil {
					test.change(t, pod)
				}

				if test.result != nil {
					test.result(result)
				}

				check := request(wire.Check, 0, "c1", pod, map[string]any{"prevResult": result})
				if test.want == "" {
					r.must(check)
				} else {
					r.mustFail(check, CodeCheck, test.want)
				}

				r.must(request(wire.Del, 0, "c1", pod, map[string]any{"prevResult": result}))
				r.checkFree(0, before)
			})
		})
	}
}

// moveRoutes moves the routes of an interface from the main table to another one, as sbr does.
func moveRoutes(h *netlink.Handle, l netlink.Link, table int) error {
	routes, err := netns.Listed(func() ([]netlink.Route, error) {
		return h.RouteList(l, netlink.FAMILY_V4)
	})
	errs := []error{err}
	// gateways need their subnet
	for _, to := range []netlink.Scope{netlink.SCOPE_LINK, netlink.SCOPE_UNIVERSE} {
		for _, route := range routes {
			if route.Scope == to {
				route.Table, route.Flags = table, 0
				errs = append(errs, h.RouteReplace(&route))
			}
		}
	}

	for _, route := range slices.Backward(routes) {
		route.Table = unix.RT_TABLE_MAIN
		errs = append(errs, h.RouteDel(&route))
	}

	return errors.Join(errs...)
}

// enslave makes an interface a port of another one, as vrf and bond do.
func enslave(h *netlink.Handle, l netlink.Link) error {
	master := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "master0"}}
	return errors.Join(h.LinkAdd(master), h.LinkSetUp(master), h.LinkSetMaster(l, master))
}

// giveMaster adds an address to the interface that enslave made.
func giveMaster(h *netlink.Handle, address *netlink.Addr) error {
	master, err := h.LinkByName("master0")
	if err != nil {
		return err
	}
	return h.AddrAdd(master, address)
}

func mustNet(text string) *net.IPNet {
	_, network, err := net.ParseCIDR(text)
	if err != nil {
		panic(err)
	}
	return network
}

// An IPAM plugin such as dhcp needs the interface first.
func TestAddress(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	pod := netns.New(t)
	n.run(func(r *running) {
		address := with(request(wire.Address, 0, "c1", pod, nil), func(r *wire.Request) {
			r.IPAM = json.RawMessage(ipamResult)
		})
		r.mustFail(address, CodeAttach, "is not attached")
		if got := decodeResult(t,
			r.must(request(wire.Add, 0, "c1", pod, nil)).Result); len(got.IPs) > 0 {
			t.Errorf("IPs %v", got.IPs)
		}

		r.mustFail(request(wire.Address, 0, "c1", pod, nil), types.ErrInvalidNetworkConfig,
			"no result of an IPAM plugin")
		r.mustFail(with(address, func(r *wire.Request) { r.ContainerID = "c2" }), CodeAttach,
			"is not attached for this request")

		for range 2 {
			got := decodeResult(t, r.must(address).Result)
			if len(got.IPs) != 1 || len(got.Routes) != 2 || len(got.Interfaces) != 1 {
				t.Errorf("result %v", got)
			}
		}

		record, _ := r.Journal.Get(lifecycletest.ID(0))
		if want := []netip.Prefix{
			netip.MustParsePrefix("10.1.0.5/24"),
		}; !slices.Equal(record.Observed.Addresses, want) {
			t.Errorf("observed %v", record.Observed.Addresses)
		}

		r.must(request(wire.Check, 0, "c1", pod, nil))
		r.must(request(wire.Del, 0, "c1", nil, nil))
		r.checkFree(0, before)
	})
}

// Multus may attach a Function of a claim of the same pod. The claim keeps its Function when the
// sandbox ends.
func TestClaim(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	n.pools[0].Spec.Publish = v1alpha1.PublishDRA
	before := n.Snapshot(0)
	first, second := netns.New(t), netns.New(t)

	claimed := journal.Attachment{
		Function: lifecycletest.ID(0), PF: "0000:3b:00.0",
		Claim:   journal.Claim{Namespace: "default", Name: "c", UID: "claim-1"},
		Pod:     journal.Pod{Namespace: "default", Name: "pod-c1", UID: "uid-c1"},
		Devices: &journal.Devices{VDPA: "vhost"},
		Interface: function.Interface{
			Name: "claimed", MAC: "02:00:00:00:00:0d", MTU: 1450,
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.1/24")},
		},
	}

	n.run(func(r *running) {
		must.Succeed(t, r.Lifecycle.Reserve(t.Context(), claimed))
		r.mustFail(request(wire.Add, 0, "c2", second, nil), CodeTaken,
			"belongs to claim default/c (UID claim-1) and is for pod default/pod-c1")
		r.mustFail(request(wire.Add, 0, "c1", first, map[string]any{"network": "red"}),
			types.ErrInvalidNetworkConfig, "leave network out")
		r.mustFail(request(wire.Add, 0, "c1", first, map[string]any{"mac": "02:00:00:00:00:0e"}),
			types.ErrInvalidNetworkConfig, "leave mac out")

		bonded := claimed
		bonded.Interface.Bond = &function.Bond{
			Name: "bond0", Mode: function.BondActiveBackup, MIIMon: 100,
		}
		must.Succeed(t, r.Lifecycle.Reserve(t.Context(), bonded))
		r.mustFail(request(wire.Add, 0, "c1", first, nil), types.ErrInvalidNetworkConfig,
			"Function 0000:3b:00.0/sf0 is a port of bond bond0 of claim c")
		must.Succeed(t, r.Lifecycle.Reserve(t.Context(), claimed))

		got := decodeResult(t,
			r.must(request(wire.Add, 0, "c1", first, map[string]any{"mtu": 1400})).Result)
		if i := got.Interfaces[0]; i.Name != "net1" || i.Mtu != 1400 ||
			i.Mac != "02:00:00:00:00:0d" || len(got.IPs) != 1 {
			t.Errorf("result %v", got)
		}
		if reported := r.reports.reported; len(reported) != 1 || reported[0].UID != "claim-1" {
			t.Errorf("reported %v", reported)
		}
		if record, _ := r.Journal.Get(lifecycletest.ID(0)); record.Devices == nil ||
			*record.Devices != *claimed.Devices {
			t.Errorf("devices %v, want %v", record.Devices, claimed.Devices)
		}

		// The pod gets another sandbox, and the DEL of the first one comes late.
		again := request(wire.Add, 0, "c2", second, map[string]any{"mtu": 1480})
		again.Args = request(wire.Add, 0, "c1", nil, nil).Args
		again.IPAM = json.RawMessage(ipamResult)
		r.mustFail(again, types.ErrInvalidNetworkConfig,
			"address 10.1.0.5/24: Function 0000:3b:00.0/sf0 belongs to claim c, which has "+
				"[10.9.0.1/24], and the xPU may count on them; leave ipam and ips out")
		again.IPAM = json.RawMessage(strings.NewReplacer("10.1.0.5/24", "10.9.0.1/24", "10.1.0.1\"",
			"10.9.0.2\"", "10.1.0.9", "10.9.0.3").Replace(ipamResult))
		got = decodeResult(t, r.must(again).Result)
		if i := got.Interfaces[0]; i.Mtu != 1450 || i.Sandbox != second.Path() ||
			got.IPs[0].Address.String() != "10.9.0.1/24" || len(got.Routes) != 2 {
			t.Errorf("result %v", got)
		}

		late := with(again, func(r *wire.Request) {
			r.Command, r.IPAM = wire.Address, json.RawMessage(ipamResult)
		})
		r.mustFail(late, types.ErrInvalidNetworkConfig, "address 10.1.0.5/24")
		r.must(request(wire.Del, 0, "c1", nil, nil))
		if record, _ := r.Journal.Get(lifecycletest.ID(0)); record.State != journal.Attached {
			t.Errorf("record %+v", record)
		}

		r.must(request(wire.Del, 0, "c2", nil, nil))
		record, _ := r.Journal.Get(lifecycletest.ID(0))
		if record.State != journal.Reserved || record.CNI != nil ||
			record.Interface.Name != "claimed" || record.Claim.UID != "claim-1" ||
			record.Interface.Addresses[0].String() != "10.9.0.1/24" {
			t.Errorf("record %+v", record)
		}

		must.Succeed(t, r.Lifecycle.Unprepare(t.Context(), "claim-1"))
		r.checkFree(0, before)
	})
}

func TestStatus(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	n.run(func(r *running) {
		status := wire.Request{Version: wire.Version, Command: wire.Status}
		r.must(status)
		r.Ready = func() error { return errors.New("the disk is full") }
		r.mustFail(status, types.ErrPluginNotAvailable, "the disk is full")
		n.pools = nil
		r.mustFail(status, types.ErrPluginNotAvailable, "have not been read yet")
	})
}

// BenchmarkAddAndDel attaches and releases a Function through the socket, with the journal on a
// disk. Compare it with BenchmarkBareMove of package netdev.
func BenchmarkAddAndDel(b *testing.B) {
	n := newNode(b, 1)
	// beside the test, because a temporary directory may be on a file system without a disk
	n.dir = "bench"
	must.Succeed(b, os.Mkdir(n.dir, 0o700))
	b.Cleanup(func() { must.Succeed(b, os.RemoveAll(n.dir)) })

	pod := netns.New(b)
	n.serve(func(r *running) {
		var add, del time.Duration
		ask := func(request wire.Request) time.Duration {
			start := time.Now()
			reply, err := r.call(request)
			if err != nil || reply.Error != nil {
				b.Fatal(err, reply.Error)
			}
			return time.Since(start)
		}

		for b.Loop() {
			request := request(wire.Add, 0, "c1", pod, nil)
			request.IPAM = json.RawMessage(ipamResult)
			add += ask(request)
			request.Command = wire.Del
			del += ask(request)
		}

		b.ReportMetric(float64(add.Microseconds())/float64(b.N), "add-us")
		b.ReportMetric(float64(del.Microseconds())/float64(b.N), "del-us")
	})
}

// TestAssignedAddresses: with ipam.type xpu, the interface gets the addresses from the network's
// address book, and the routes of the request. The result is like that of an IPAM plugin, and the
// Port keeps the addresses when it is made again.
func TestAssignedAddresses(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	pod := netns.New(t)
	n.xpuAgent.addresses = []netip.Prefix{
		netip.MustParsePrefix("10.1.0.7/24"), netip.MustParsePrefix("fd00::7/64"),
	}
	ipam := map[string]any{
		"type": wire.IPAM, "routes": []map[string]any{{"dst": "10.2.0.0/16", "gw": "10.1.0.1"}},
	}
	add := request(wire.Add, 0, "c1", pod, map[string]any{"network": "blue", "ipam": ipam})
	n.run(func(r *running) {
		r.mustFail(request(wire.Add, 0, "c1", pod, map[string]any{"ipam": ipam}),
			types.ErrInvalidNetworkConfig,
			"ipam.type xpu: gives addresses of a network of the xPU")
		got := decodeResult(t, r.must(add).Result)
		if len(got.IPs) != 2 || got.IPs[0].Address.String() != "10.1.0.7/24" ||
			len(got.Routes) != 1 || got.Routes[0].GW.String() != "10.1.0.1" {
			t.Errorf("result %v", got)
		}

		record, _ := r.Journal.Get(lifecycletest.ID(0))
		if !record.Port.AssignAddresses ||
			!slices.Equal(record.Port.Addresses, n.xpuAgent.addresses) ||
			!slices.Equal(record.Observed.Addresses, n.xpuAgent.addresses) {
			t.Errorf("Port %+v, observed %+v", record.Port, record.Observed)
		}

		asked := n.xpuAgent.calls
		again := decodeResult(t, r.must(add).Result)
		if diff := cmp.Diff(got, again); diff != "" || n.xpuAgent.calls != asked {
			t.Errorf("the second ADD asked the xPU, or has another result (-first +second):\n%s",
				diff)
		}

		r.must(request(wire.Del, 0, "c1", nil, nil))
		r.checkFree(0, before)
	})
}
