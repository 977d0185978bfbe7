// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/host"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// hotplug is a node where DRA offers the first VF of each PF and the device plugin the others. The
// test changes the first card's PF while two pods have VFs of the last card.
type hotplug struct {
	*node.Node
	pf     pci.Address
	others []function.ID // VFs of the last card that the device plugin offers
	kernel *kernelEvents
	slices *sliceWatch
}

// TestHotplug checks that a change of a PF and its VFs is in ResourceSlices and at the kubelet
// within a second after the kernel's event. Pods with another PF's VFs keep their traffic, and the
// slices of that PF are not written.
func TestHotplug(t *testing.T) {
	card.InGuest(t, "igb")
	pfs := card.PFs(t)
	node.Carrier(t, pfs...)
	var claims, plugged v1alpha1.FunctionSelector
	for _, pf := range pfs {
		claims.RootDevices = append(claims.RootDevices, string(pf)+"#0")
		plugged.RootDevices = append(plugged.RootDevices, string(pf)+"#1-6")
	}

	h := &hotplug{pf: pfs[0], others: node.VFs(t, pfs[len(pfs)-1])[1:]}
	h.Node = node.New(t,
		node.Options{Cluster: true, Pools: []v1alpha1.DevicePool{node.Pool("fast", plugged)}})
	h.Cluster.Create(&v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: "claims"},
		Spec:       v1alpha1.DevicePoolSpec{Selectors: []v1alpha1.FunctionSelector{claims}},
	})

	h.StartRuntime()
	h.slices = watchSlices(t)
	h.kernel = listen(t)
	h.Start()
	vfs := node.VFs(t, h.pf)
	h.settled(t, vfs)
	undisturbed := h.traffic(t)

	t.Run("link down", func(t *testing.T) {
		h.follow(t, carrier(card.Netdev(h.pf), false), nil, []string{tainted(vfs[0])},
			func(ctx context.Context) {
				must.Succeed(t, host.SetLink(ctx, 0, false))
			})
	})

	t.Run("link up", func(t *testing.T) {
		h.follow(t, carrier(card.Netdev(h.pf), true), vfs, []string{vfs[0].DeviceName()},
			func(ctx context.Context) {
				must.Succeed(t, host.SetLink(ctx, 0, true))
			})
	})

	t.Run("VFs destroyed", func(t *testing.T) {
		h.follow(t, removed(vfs[len(vfs)-1].Address), nil, nil, func(context.Context) {
			card.SetAttribute(t, h.pf, "sriov_numvfs", "0")
		})
	})

	makeVFs := func(t *testing.T) {
		h.follow(t, netdevAdded(vfs[len(vfs)-1].Address), vfs, []string{vfs[0].DeviceName()},
			func(context.Context) {
				card.SetAttribute(t, h.pf, "sriov_numvfs", strconv.Itoa(len(vfs)))
			})
		h.settled(t, vfs)
	}

	t.Run("VFs created", makeVFs)
	t.Run("PF unplugged", func(t *testing.T) {
		h.follow(t, removed(vfs[len(vfs)-1].Address), nil, nil, func(ctx context.Context) {
			must.Succeed(t, host.Unplug(ctx, 0))
		})
	})

	t.Run("PF plugged", func(t *testing.T) {
		must.Succeed(t, host.Plug(t.Context(), 0))
		must.Eventually(t, "netdev of "+string(h.pf), func() bool {
			return card.Netdev(h.pf) != ""
		})
		link, err := netlink.LinkByName(card.Netdev(h.pf))
		must.Succeed(t, err)
		must.Succeed(t, netlink.LinkSetUp(link))
		node.Carrier(t, h.pf)
		makeVFs(t)
	})

	t.Run("pods with other VFs are not disturbed", func(t *testing.T) { undisturbed(t) })
	h.End()
}

// settled waits until all is as it is with a link. A little after VFs were made, igb takes the link
// away for some seconds.
func (h *hotplug) settled(t *testing.T, vfs []function.ID) {
	t.Helper()
	node.Carrier(t, h.pf)
	h.WantHealthy(resource, append(slices.Clone(h.others), vfs[1:]...)...)
	ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
	defer cancel()
	if _, err := h.slices.await(ctx, h.pf, vfs[0].DeviceName()); err != nil {
		t.Fatal(err)
	}
}

// follow calls do, and waits until the kubelet has the PF's healthy VFs of the device plugin, and
// slices have these devices of the PF. It logs the time since the kernel's event, but does not
// check it, because a guest without hardware virtualization is slow on a busy machine.
func (h *hotplug) follow(
	t *testing.T, about func(event string) bool, healthy []function.ID, devices []string,
	do func(context.Context),
) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
	defer cancel()

	begin := time.Now()
	var doing, waiting sync.WaitGroup
	defer doing.Wait()

	doing.Go(func() { do(ctx) }) // the event may come long before do ends
	var published, listed time.Time
	var errPublished, errListed error
	waiting.Go(func() { published, errPublished = h.slices.await(ctx, h.pf, devices...) })
	waiting.Go(func() { listed, errListed = h.listed(ctx, healthy) })
	waiting.Wait()
	if errPublished != nil || errListed != nil {
		t.Fatalf("slices: %v; kubelet: %v", errPublished, errListed)
	}

	event := h.kernel.first(t, begin, about)
	t.Logf("the kernel told of it after %s; then slices had it after %s, and the kubelet after %s",
		since(event, begin), since(published, event), since(listed, event))
}

func since(then, begin time.Time) time.Duration { return then.Sub(begin).Round(time.Millisecond) }

// listed waits until the kubelet has exactly these VFs and the other card's VFs as healthy.
func (h *hotplug) listed(ctx context.Context, healthy []function.ID) (time.Time, error) {
	var want []string
	for _, vf := range h.others {
		want = append(want, vf.String())
	}

	if len(healthy) > 0 {
		for _, vf := range healthy[1:] {
			want = append(want, vf.String())
		}
	}

	slices.Sort(want)
	var got []string
	err := h.Kubelet.Wait(ctx, func() bool {
		got = slices.Sorted(slices.Values(h.Kubelet.Healthy(resource)))
		return slices.Equal(got, want)
	})
	if err != nil {
		return time.Time{}, fmt.Errorf("healthy are %q, want %q: %w", got, want, err)
	}

	return time.Now(), nil
}

// traffic starts traffic between two pods on the last card. The returned function ends it, and
// checks that it never stopped and that slices of the last card were not written.
func (h *hotplug) traffic(t *testing.T) (undisturbed func(*testing.T)) {
	t.Helper()
	var pods []*node.Pod
	for i, vf := range h.others[:2] {
		_, err := h.Allocate(resource, vf)
		must.Succeed(t, err)
		p := h.NewPod(fmt.Sprintf("undisturbed%d", i), byte(i+1))
		p.MustAdd(vf, nil)
		pods = append(pods, p)
	}

	pods[0].WantReach(t, pods[1])
	// A pod that has a VF by the device plugin changes no slice. So from here on no program may
	// write slices of the VF's PF.
	quiet := h.slices.writes(h.pf)
	ctx, stop := context.WithCancel(t.Context())
	sent, lost := 0, 0
	var pinging sync.WaitGroup
	t.Cleanup(func() { stop(); pinging.Wait() })

	pinging.Go(func() {
		for ctx.Err() == nil {
			sent++
			if !pods[0].Reaches(pods[1], time.Second) {
				lost++
			}
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})

	return func(t *testing.T) {
		stop()
		pinging.Wait()
		if lost > 0 || sent == 0 {
			t.Errorf("%d of %d times a pod did not reach the other within a second", lost, sent)
		}
		if now := h.slices.writes(h.pf); now != quiet {
			t.Errorf("slices of other PFs were written %d times", now-quiet)
		}

		t.Logf("a pod reached the other %d times of %d", sent-lost, sent)
		for i, p := range pods {
			p.MustDel(h.others[i], nil)
		}
	}
}

// tainted returns the text for a device with the taint of a PF without link.
func tainted(vf function.ID) string { return vf.DeviceName() + " " + v1alpha1.TaintLinkDown }

// sliceWatch watches the node's ResourceSlices as a scheduler does.
type sliceWatch struct {
	mu      sync.Mutex
	slices  map[string]resourceapi.ResourceSlice
	written map[pci.Address]int // events of slices, by PF
	changed chan struct{}       // closed at the next change
}

func watchSlices(t *testing.T) *sliceWatch {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", plan.AdminKubeconfig)
	must.Succeed(t, err)
	api, err := client.NewWithWatch(config, client.Options{Scheme: clientgoscheme.Scheme})
	must.Succeed(t, err)
	stream, err := api.Watch(t.Context(), &resourceapi.ResourceSliceList{})
	must.Succeed(t, err)

	w := &sliceWatch{
		slices: map[string]resourceapi.ResourceSlice{}, written: map[pci.Address]int{},
		changed: make(chan struct{}),
	}

	var following sync.WaitGroup
	following.Go(func() {
		for event := range stream.ResultChan() {
			w.take(event)
		}
	})

	t.Cleanup(func() {
		stream.Stop()
		following.Wait()
	})

	return w
}

func (w *sliceWatch) take(event watch.Event) {
	slice, ok := event.Object.(*resourceapi.ResourceSlice)
	if !ok {
		return
	}

	pool, err := claim.ParsePoolID(slice.Spec.Pool.Name)
	if err != nil {
		return
	}

	w.mu.Lock()
	defer w.mu.Unlock()

	w.written[pool.PF]++
	if event.Type == watch.Deleted {
		delete(w.slices, slice.Name)
	} else {
		w.slices[slice.Name] = *slice
	}

	close(w.changed)
	w.changed = make(chan struct{})
}

// writes counts the writes of slices of other PFs than this.
func (w *sliceWatch) writes(but pci.Address) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for pf, written := range w.written {
		if pf != but {
			n += written
		}
	}
	return n
}

// await waits until the PF has exactly these devices with their taints, and returns the time of the
// change.
func (w *sliceWatch) await(ctx context.Context, pf pci.Address, want ...string) (time.Time, error) {
	for {
		got, changed := w.devices(pf)
		if slices.Equal(got, want) {
			return time.Now(), nil
		}

		select {
		case <-changed:
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("slices of %s have %q, want %q: %w", pf,
				got, want, ctx.Err())
		}
	}
}

func (w *sliceWatch) devices(pf pci.Address) (devices []string, changed <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()

	for _, slice := range w.slices {
		if pool, err := claim.ParsePoolID(slice.Spec.Pool.Name); err != nil || pool.PF != pf {
			continue
		}
		for _, d := range slice.Spec.Devices {
			text := d.Name
			for _, taint := range d.Taints {
				text += " " + taint.Key
			}
			devices = append(devices, text)
		}
	}

	slices.Sort(devices)
	return devices, w.changed
}

// kernelEvents are events about devices and netdevs, with the time at which they were received.
type kernelEvents struct {
	mu  sync.Mutex
	all []kernelEvent
}

type kernelEvent struct {
	at    time.Time
	about string // "remove@/devices/pci0000:20/..." or "carrier@eth1 true"
}

// The following functions select events that tests wait for.
func removed(a pci.Address) func(string) bool {
	return func(about string) bool {
		return strings.HasPrefix(about, "remove@") && strings.HasSuffix(about, "/"+string(a))
	}
}

func netdevAdded(a pci.Address) func(string) bool {
	return func(about string) bool {
		return strings.HasPrefix(about, "add@") && strings.Contains(about, "/"+string(a)+"/net/") &&
			!strings.Contains(about, "/queues/")
	}
}

func carrier(netdev string, up bool) func(string) bool {
	want := fmt.Sprintf("carrier@%s %v", netdev, up)
	return func(about string) bool { return about == want }
}

func listen(t *testing.T) *kernelEvents {
	t.Helper()
	k := &kernelEvents{}
	const kind = unix.SOCK_RAW | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	fd, err := unix.Socket(unix.AF_NETLINK, kind, unix.NETLINK_KOBJECT_UEVENT)
	must.Succeed(t, err)
	must.Succeed(t, unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}))
	uevents := os.NewFile(uintptr(fd), "uevents")
	links, done := make(chan netlink.LinkUpdate), make(chan struct{})
	must.Succeed(t, netlink.LinkSubscribe(links, done))
	var listening sync.WaitGroup
	listening.Go(func() {
		buffer := make([]byte, os.Getpagesize())
		for {
			n, err := uevents.Read(buffer)
			if err != nil {
				return
			}
			about, _, _ := strings.Cut(string(buffer[:n]), "\x00")
			k.add(about)
		}
	})

	listening.Go(func() {
		for update := range links {
			if update.Header.Type == unix.RTM_NEWLINK {
				a := update.Attrs()
				k.add(fmt.Sprintf("carrier@%s %v", a.Name, a.RawFlags&unix.IFF_LOWER_UP != 0 &&
					a.Flags&net.FlagUp != 0))
			}
		}
	})

	t.Cleanup(func() {
		close(done)
		_ = uevents.Close()
		listening.Wait()
	})

	return k
}

func (k *kernelEvents) add(about string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all = append(k.all, kernelEvent{time.Now(), about})
}

// first returns when a wanted event was first received since begin. It waits if the event has not
// been received yet.
func (k *kernelEvents) first(
	t *testing.T, begin time.Time, wanted func(about string) bool,
) (at time.Time) {
	t.Helper()
	must.Eventually(t, "the kernel tells of it", func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()

		for _, e := range k.all {
			if e.at.After(begin) && wanted(e.about) {
				at = e.at
				return true
			}
		}

		return false
	})

	return at
}
