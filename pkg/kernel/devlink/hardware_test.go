// SPDX-License-Identifier: Apache-2.0

package devlink_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// realCard returns the first card with a physical port. It skips the test unless the machine is a
// guest whose cards tests may change.
func realCard(t *testing.T, c *devlink.Conn) devlink.Port {
	t.Helper()
	if os.Getenv(plan.GuestVariable) == "" {
		t.Skip("changes the eswitch of the machine's cards: make test-qemu runs it in guest simnic")
	}

	ports, err := c.Ports()
	must.Succeed(t, err)
	i := slices.IndexFunc(ports, func(p devlink.Port) bool { return p.Flavour == devlink.Physical })
	if i < 0 {
		t.Fatalf("no physical port in %+v", ports)
	}

	return ports[i]
}

// TestHardware exercises every request about a card. It expects that the card's VFs exist already.
func TestHardware(t *testing.T) {
	c := dial(t, "")
	uplink := realCard(t, c)
	d := uplink.Device
	woken := watch(t)

	t.Run("subfunctions need mode switchdev", func(t *testing.T) {
		mode(t, c, d, devlink.Legacy)
		_, err := c.AddSF(d, 0, 88)
		if !errors.Is(err, unix.EOPNOTSUPP) ||
			!strings.Contains(err.Error(), "only supported in eswitch switchdev mode") {
			t.Errorf("error %v, want one in the driver's words", err)
		}
	})

	woken.expect(t, "the eswitch's mode", func() {
		must.Succeed(t, c.SetEswitchMode(d, devlink.Switchdev))
	})

	t.Cleanup(func() {
		must.Succeed(t, c.SetEswitchMode(d, devlink.Legacy))
		mode(t, c, d, devlink.Legacy)
	})

	mode(t, c, d, devlink.Switchdev)

	t.Run("VFs have ports with representors", func(t *testing.T) { representors(t, c, uplink) })
	t.Run("subfunction comes and goes", func(t *testing.T) { subfunction(t, c, uplink, woken) })
	t.Run("rate", func(t *testing.T) { rate(t, c, uplink) })
	t.Run("reporters", func(t *testing.T) { reporters(t, c, d) })

	t.Run("several goroutines", func(t *testing.T) {
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				for range 10 {
					ports, err := c.PortsOf(d)
					if err != nil || len(ports) < 2 {
						t.Errorf("ports %v, %v", ports, err)
					}
				}
			})
			group.Go(func() {
				for range 10 {
					if got, err := c.EswitchMode(d); err != nil || got != devlink.Switchdev {
						t.Errorf("mode %q, %v", got, err)
					}
				}
			})
		}

		group.Wait()
	})

	t.Run("a card that hangs keeps nobody from the others", func(t *testing.T) { hangs(t, c, d) })

	t.Run("another network namespace has no devices", func(t *testing.T) {
		there := dial(t, netns.New(t).Path())
		if ports, err := there.Ports(); err != nil || len(ports) > 0 {
			t.Errorf("ports %v, %v", ports, err)
		}
		if _, err := there.EswitchMode(d); !errors.Is(err, unix.ENODEV) {
			t.Errorf("error %v, want ENODEV", err)
		}
	})
}

func representors(t *testing.T, c *devlink.Conn, uplink devlink.Port) {
	vfs, err := filepath.Glob(filepath.Join("/sys/bus/pci/devices", uplink.Device.Name, "virtfn*"))
	must.Succeed(t, err)
	ports, err := c.PortsOf(uplink.Device)
	must.Succeed(t, err)
	var indices []uint16
	for _, p := range ports {
		if p.Flavour != devlink.PCIVF {
			continue
		}

		indices = append(indices, p.VF)
		name, err := os.ReadFile(filepath.Join("/sys/class/net", p.Netdev, "phys_port_name"))
		must.Succeed(t, err)
		if want := fmt.Sprintf("pf%dvf%d\n", p.PF, p.VF); string(name) != want {
			t.Errorf("representor %s of %+v is %q, want %q", p.Netdev, p, name, want)
		}
		if p.External || p.PF != uint16(uplink.Number) {
			t.Errorf("port %+v is not of PF %d here", p, uplink.Number)
		}
	}

	slices.Sort(indices)
	var want []uint16
	for i := range vfs {
		want = append(want, uint16(i))
	}
	if diff := cmp.Diff(want, indices); diff != "" || len(want) == 0 {
		t.Errorf("VFs (-want +got):\n%s", diff)
	}
}

func subfunction(t *testing.T, c *devlink.Conn, uplink devlink.Port, woken watched) {
	const sfnum = 88
	d, pf := uplink.Device, uint16(uplink.Number)
	var port devlink.Port
	var err error
	woken.expect(t, "a subfunction's port", func() {
		port, err = c.AddSF(d, pf, sfnum)
		must.Succeed(t, err)
	})

	want := devlink.Port{
		Device: d, Index: port.Index, Flavour: devlink.PCISF, PF: pf, SF: sfnum,
		Netdev: port.Netdev, NetdevIndex: port.NetdevIndex,
	}
	if diff := cmp.Diff(want, port); diff != "" || port.Netdev == "" {
		t.Errorf("added with representor %q (-want +got):\n%s", port.Netdev, diff)
	}
	if _, err := c.AddSF(d, pf, sfnum); !errors.Is(err, unix.EEXIST) {
		t.Errorf("once more: error %v, want EEXIST", err)
	}

	woken.expect(t, "a subfunction's state", func() {
		must.Succeed(t,
			c.SetFunction(d, port.Index,
				devlink.FunctionChange{MAC: "02:00:00:00:00:58", Active: new(true)}))
	})

	want.Function = devlink.Function{MAC: "02:00:00:00:00:58", Active: true, Attached: true}
	if diff := cmp.Diff([]devlink.Port{want}, at(t, c, port)); diff != "" {
		t.Errorf("active (-want +got):\n%s", diff)
	}

	devices, err := filepath.Glob(filepath.Join("/sys/bus/pci/devices", d.Name, "*.sf.*", "net",
		"*", "address"))
	must.Succeed(t, err)
	if len(devices) != 1 {
		t.Fatalf("MACs %q, want that of one SF's netdev", devices)
	}
	if mac, err := os.ReadFile(devices[0]); err != nil || string(mac) != "02:00:00:00:00:58\n" {
		t.Errorf("MAC %q, %v", mac, err)
	}

	must.Succeed(t, c.SetFunction(d, port.Index, devlink.FunctionChange{Active: new(false)}))
	want.Function.Active, want.Function.Attached = false, false
	if diff := cmp.Diff([]devlink.Port{want}, at(t, c, port)); diff != "" {
		t.Errorf("inactive (-want +got):\n%s", diff)
	}

	woken.expect(t, "a subfunction's end", func() { must.Succeed(t, c.DeletePort(d, port.Index)) })
	if err := c.DeletePort(d, port.Index); !errors.Is(err, unix.ENODEV) {
		t.Errorf("once more: error %v, want ENODEV", err)
	}
	if left := at(t, c, port); len(left) > 0 {
		t.Errorf("left: %+v", left)
	}
}

// hangs checks that requests about another card are answered while the card d is slow.
func hangs(t *testing.T, c *devlink.Conn, d devlink.Device) {
	ports, err := c.Ports()
	must.Succeed(t, err)

	i := slices.IndexFunc(ports, func(p devlink.Port) bool {
		return p.Device.Bus == d.Bus &&
			p.Device != d
	})
	if i < 0 {
		t.Fatalf("no other card in %+v", ports)
	}

	const slow = "/sys/module/simnic/parameters/slow"
	must.Succeed(t, os.WriteFile(slow, []byte("500"), 0))
	defer func() { must.Succeed(t, os.WriteFile(slow, []byte("0"), 0)) }()

	asked, told := make(chan struct{}), make(chan error, 1)
	go func() {
		close(asked)
		_, err := c.EswitchMode(d)
		told <- err
	}()

	<-asked
	for n := 0; ; n++ {
		select {
		case err := <-told:
			must.Succeed(t, err)
			t.Logf("the other card told its ports %d times meanwhile", n)
			if n < 20 {
				t.Error("the other card waited for the one that hangs")
			}
			return
		default:
		}

		_, err := c.PortsOf(ports[i].Device)
		must.Succeed(t, err)
	}
}

// at lists the ports that have the same device and index as port.
func at(t *testing.T, c *devlink.Conn, port devlink.Port) []devlink.Port {
	t.Helper()
	ports, err := c.PortsOf(port.Device)
	must.Succeed(t, err)
	return slices.DeleteFunc(ports, func(p devlink.Port) bool { return p.Index != port.Index })
}

func rate(t *testing.T, c *devlink.Conn, uplink devlink.Port) {
	d := uplink.Device
	if _, exists, err := c.Rate(d, uplink.Index); err != nil || exists {
		t.Errorf("the uplink has a rate: %v, %v", exists, err)
	}
	if err := c.SetRate(d, uplink.Index, function.Rate{Max: 1}); !errors.Is(err, unix.ENODEV) {
		t.Errorf("rate of the uplink: error %v, want ENODEV", err)
	}

	ports, err := c.PortsOf(d)
	must.Succeed(t, err)
	vf := ports[slices.IndexFunc(ports, func(p devlink.Port) bool {
		return p.Flavour == devlink.PCIVF
	})]
	for _, want := range []function.Rate{{Min: 100, Max: 2500}, {Max: 2500}, {Max: 10}, {}} {
		must.Succeed(t, c.SetRate(d, vf.Index, want))
		got, exists, err := c.Rate(d, vf.Index)
		if err != nil || !exists || got != want {
			t.Errorf("rate %+v, %v, %v; want %+v", got, exists, err, want)
		}
	}

	// The kernel sets the share first, and then the maximum, which the driver refuses. SetRate must
	// then restore the share.
	must.Succeed(t, c.SetRate(d, vf.Index, function.Rate{Min: 5, Max: 50}))
	if err := c.SetRate(d, vf.Index, function.Rate{Min: 10, Max: 100_000}); !errors.Is(err,
		unix.EINVAL) {
		t.Errorf("more than the card has: error %v, want EINVAL", err)
	}
	if got, _, err := c.Rate(d, vf.Index); err != nil || got != (function.Rate{Min: 5, Max: 50}) {
		t.Errorf("rate %+v, %v after a refusal", got, err)
	}

	must.Succeed(t, c.SetRate(d, vf.Index, function.Rate{}))
}

func reporters(t *testing.T, c *devlink.Conn, d devlink.Device) {
	all, err := c.Reporters()
	must.Succeed(t, err)
	var names []string
	for _, r := range all {
		if r.Device == d {
			names = append(names, r.Handle()+" "+r.Name)
			if r.Failed {
				t.Errorf("%+v", r)
			}
		}
	}

	slices.Sort(names)
	want := []string{d.String() + " fw"}
	ports, err := c.PortsOf(d)
	must.Succeed(t, err)

	for _, p := range ports {
		if p.Flavour == devlink.PCIVF {
			want = append(want, fmt.Sprintf("%s/%d vnic", d, p.Index))
		}
	}

	slices.Sort(want)
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func mode(t *testing.T, c *devlink.Conn, d devlink.Device, want devlink.EswitchMode) {
	t.Helper()
	if got, err := c.EswitchMode(d); err != nil || got != want {
		t.Errorf("eswitch mode %q, %v; want %s", got, err, want)
	}
}

// watched receives a value after devlink reported one or more changes.
type watched chan struct{}

func watch(t *testing.T) watched {
	t.Helper()
	w := make(watched, 1)
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() {
		devlink.Follow(ctx, "", func() {
			select {
			case w <- struct{}{}:
			default:
			}
		}, testr.New(t))
	})

	t.Cleanup(func() {
		cancel()
		following.Wait()
	})

	<-w // the value of the start: from now on, Follow listens
	return w
}

// expect runs f and waits until devlink reports a change.
func (w watched) expect(t *testing.T, what string, f func()) {
	t.Helper()
	// The loop drains reports of earlier changes. They have arrived by now, because the kernel
	// reports a change before it answers the request that made the change.
	for quiet := false; !quiet; {
		select {
		case <-w:
		case <-time.After(20 * time.Millisecond):
			quiet = true
		}
	}

	begin := time.Now()
	f()

	select {
	case <-w:
		t.Logf("told of %s %s after it was asked for",
			what, time.Since(begin).Round(10*time.Microsecond))
	case <-time.After(10 * time.Second):
		t.Errorf("not told of %s", what)
	}
}
