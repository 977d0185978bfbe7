// SPDX-License-Identifier: Apache-2.0

package devlink_test

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

var card = devlink.OfPCI(pci.Address("0000:3b:00.0"))

// message serializes attributes as the kernel does.
func message(attrs ...*nl.RtAttr) []byte {
	var m []byte
	for _, a := range attrs {
		m = append(m, a.Serialize()...)
	}
	return m
}

func handle() []*nl.RtAttr {
	return []*nl.RtAttr{
		nl.NewRtAttr(unix.DEVLINK_ATTR_BUS_NAME, nl.ZeroTerminated(card.Bus)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_DEV_NAME, nl.ZeroTerminated(card.Name)),
	}
}

func sfPort() []byte {
	function := nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_FUNCTION, nil)
	function.AddRtAttr(unix.DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR, []byte{2, 0, 0, 0, 0, 88})
	function.AddRtAttr(unix.DEVLINK_PORT_FN_ATTR_STATE, nl.Uint8Attr(1))
	function.AddRtAttr(unix.DEVLINK_PORT_FN_ATTR_OPSTATE, nl.Uint8Attr(1))

	return message(append(handle(),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_INDEX, nl.Uint32Attr(32768)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_NETDEV_IFINDEX, nl.Uint32Attr(7)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_NETDEV_NAME, nl.ZeroTerminated("eth4")),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_FLAVOUR, nl.Uint16Attr(7)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_CONTROLLER_NUMBER, nl.Uint32Attr(1)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_EXTERNAL, nl.Uint8Attr(1)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_PCI_PF_NUMBER, nl.Uint16Attr(1)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_PCI_SF_NUMBER, nl.Uint32Attr(88)),
		function)...)
}

func portReporter() []byte {
	reporter := nl.NewRtAttr(unix.DEVLINK_ATTR_HEALTH_REPORTER, nil)
	reporter.AddRtAttr(unix.DEVLINK_ATTR_HEALTH_REPORTER_NAME, nl.ZeroTerminated("tx"))
	reporter.AddRtAttr(unix.DEVLINK_ATTR_HEALTH_REPORTER_STATE, nl.Uint8Attr(1))
	reporter.AddRtAttr(unix.DEVLINK_ATTR_HEALTH_REPORTER_ERR_COUNT, nl.Uint64Attr(3))
	reporter.AddRtAttr(unix.DEVLINK_ATTR_HEALTH_REPORTER_RECOVER_COUNT, nl.Uint64Attr(2))
	return message(append(handle(), nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_INDEX, nl.Uint32Attr(0)),
		reporter)...)
}

func TestDecodePort(t *testing.T) {
	vf := message(append(handle(),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_INDEX, nl.Uint32Attr(2)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_FLAVOUR, nl.Uint16Attr(4)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_PCI_PF_NUMBER, nl.Uint16Attr(0)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_PCI_VF_NUMBER, nl.Uint16Attr(1)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_FUNCTION|unix.NLA_F_NESTED,
			nl.NewRtAttr(unix.DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR, make([]byte, 6)).Serialize()))...)
	for _, test := range []struct {
		name    string
		message []byte
		want    devlink.Port
	}{
		{"subfunction of a DPU's host", sfPort(), devlink.Port{
			Device: card, Index: 32768, Flavour: devlink.PCISF, Controller: 1, External: true,
			PF: 1, SF: 88,
			Netdev: "eth4", NetdevIndex: 7,
			Function: devlink.Function{MAC: "02:00:00:00:00:58", Active: true, Attached: true},
		}},
		{"VF without MAC, with the flag of nested attributes", vf, devlink.Port{
			Device: card, Index: 2, Flavour: devlink.PCIVF, VF: 1,
		}},
		{"flavour of a later kernel",
			message(nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_FLAVOUR, nl.Uint16Attr(99))),
			devlink.Port{Flavour: "99"}},
		{"number of another size",
			message(nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_INDEX, nl.Uint16Attr(5))),
			devlink.Port{Flavour: devlink.Physical}},
	} {
		t.Run(test.name, func(t *testing.T) {
			attrs, err := attribute.Parse(test.message)
			if err != nil {
				t.Fatal(err)
			}

			got, err := devlink.DecodePort(attrs)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestDecodeReporter(t *testing.T) {
	attrs, err := attribute.Parse(portReporter())
	if err != nil {
		t.Fatal(err)
	}

	got, err := devlink.DecodeReporter(attrs)
	if err != nil {
		t.Fatal(err)
	}

	want := devlink.Reporter{
		Device: card, Port: 0, Name: "tx", Failed: true, Errors: 3, Recoveries: 2,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got.Handle() != "pci/0000:3b:00.0/0" {
		t.Errorf("handle %q", got.Handle())
	}
	if got.Port = -1; got.Handle() != "pci/0000:3b:00.0" {
		t.Errorf("handle %q of the device's own", got.Handle())
	}
}

// TestDecodeRate checks that bytes per second become Mbit/s, rounded up, so that a low limit never
// becomes 0, which means no limit.
func TestDecodeRate(t *testing.T) {
	for _, test := range []struct {
		bytes uint64
		want  int
	}{{0, 0}, {125_000, 1}, {1, 1}, {125_001, 2}, {125_000_000, 1000},
		{math.MaxUint64, math.MaxUint64/125_000 + 1}} {
		attrs, err := attribute.Parse(
			message(nl.NewRtAttr(unix.DEVLINK_ATTR_RATE_TX_MAX, nl.Uint64Attr(test.bytes))),
		)
		if err != nil {
			t.Fatal(err)
		}
		if got := devlink.DecodeRate(attrs); got != (function.Rate{Max: test.want}) {
			t.Errorf("%d bytes per second are %+v, want maximum %d", test.bytes, got, test.want)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, test := range []struct {
		name    string
		message []byte
		want    string
	}{
		{"less than a header", []byte{4, 0, 1}, "attribute of 3 bytes"},
		{"length of less than a header", []byte{3, 0, 1, 0}, "attribute of length 3"},
		{"length beyond the end", []byte{9, 0, 1, 0, 'p', 'c', 'i', 0},
			"attribute of length 9 in 8 bytes"},
	} {
		if _, err := attribute.Parse(test.message); err == nil ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one with %q", test.name, err, test.want)
		}
	}
}

// FuzzMessage checks that decoding ends for any answer of the kernel, and does not read beyond its
// end.
func FuzzMessage(f *testing.F) {
	f.Add(sfPort())
	f.Add(portReporter())
	f.Add([]byte{5, 0, 3, 0, 'x'}) // no padding
	f.Add([]byte{3, 0, 1, 0})

	f.Fuzz(func(t *testing.T, message []byte) {
		// The copy has no spare capacity, so that a read beyond the end panics.
		message = append(make([]byte, 0, len(message)), message...)
		attrs, err := attribute.Parse(message)
		if err != nil {
			return
		}

		size := 0
		for _, value := range attrs {
			size += len(value)
		}

		if size > len(message) {
			t.Errorf("attributes of %d bytes in a message of %d", size, len(message))
		}
		if port, err := devlink.DecodePort(attrs); err == nil && port.NetdevIndex < 0 {
			t.Errorf("netdev index %d", port.NetdevIndex)
		}
		if reporter, err := devlink.DecodeReporter(attrs); err == nil && reporter.Port < -1 {
			t.Errorf("port %d", reporter.Port)
		}
		if rate := devlink.DecodeRate(attrs); rate.Min < 0 || rate.Max < 0 {
			t.Errorf("rate %+v", rate)
		}
	})
}

// refusals returns the errors of commands about a card that no machine has, by the command.
func refusals(c *devlink.Conn) map[string]error {
	const (
		device = "pci/ffff:ff:1f.7"
		port   = device + "/3"
	)

	nowhere := devlink.OfPCI("ffff:ff:1f.7")
	_, mode := c.EswitchMode(nowhere)
	_, add := c.AddSF(nowhere, 0, 88)
	change := func(to devlink.FunctionChange) error { return c.SetFunction(nowhere, 3, to) }
	errs := map[string]error{}
	errs["devlink dev eswitch show "+device] = mode
	_, errs["devlink dev info "+device] = c.Info(nowhere)
	errs["devlink dev eswitch set "+device+
		" mode switchdev"] = c.SetEswitchMode(nowhere, devlink.Switchdev)
	errs["devlink port add "+device+" flavour pcisf pfnum 0 sfnum 88"] = add
	errs["devlink port del "+port] = c.DeletePort(nowhere, 3)
	errs["devlink port function set "+port+" hw_addr 02:00:00:00:00:01 state active"] =
		change(devlink.FunctionChange{MAC: "02:00:00:00:00:01", Active: new(true)})
	errs["devlink port function set "+port+
		" state inactive"] = change(devlink.FunctionChange{Active: new(false)})
	errs["devlink port function rate set "+port+" tx_share 1mbit tx_max 2mbit"] =
		c.SetRate(nowhere, 3, function.Rate{Min: 1, Max: 2})

	return errs
}

// TestNoSuchDevice checks that an error begins with the equivalent command of devlink(8). It works
// with any kernel, with devlink or without.
func TestNoSuchDevice(t *testing.T) {
	c := dial(t, "")
	want := error(unix.ENODEV)
	if !devlink.HasDevlink() {
		want = devlink.ErrNoDevlink
	}

	for command, err := range refusals(c) {
		if !errors.Is(err, want) || !strings.HasPrefix(err.Error(), command+": ") {
			t.Errorf("%s: error %v, want %v", command, err, want)
		}
	}

	nowhere := devlink.OfPCI("ffff:ff:1f.7")
	if ports, err := c.PortsOf(nowhere); err != nil || len(ports) > 0 {
		t.Errorf("ports %v, %v", ports, err)
	}
	if rate, exists, err := c.Rate(nowhere, 3); err != nil || exists {
		t.Errorf("rate %v, %v, %v", rate, exists, err)
	}
	if err := c.SetFunction(nowhere, 3, devlink.FunctionChange{}); err != nil {
		t.Errorf("no change: %v", err)
	}

	for _, all := range []func() (int, error){
		func() (int, error) { ports, err := c.Ports(); return len(ports), err },
		func() (int, error) { reporters, err := c.Reporters(); return len(reporters), err },
	} {
		if n, err := all(); err != nil || n > 0 && errors.Is(want, devlink.ErrNoDevlink) {
			t.Errorf("%d objects, %v", n, err)
		}
	}
}

// TestBadInput checks that invalid arguments are refused before the kernel is asked.
func TestBadInput(t *testing.T) {
	c := dial(t, "")
	for _, test := range []struct {
		err  error
		want string
	}{
		{c.SetEswitchMode(card, "offloads"),
			`eswitch mode "offloads" of pci/0000:3b:00.0: must be legacy or switchdev`},
		{c.SetFunction(card, 3, devlink.FunctionChange{MAC: function.MAC("zz")}),
			`MAC "zz" of port pci/0000:3b:00.0/3: must be an address such as 02:00:00:00:00:01`},
		{c.SetRate(card, 3, function.Rate{Max: -1}),
			"rate of port pci/0000:3b:00.0/3: share 0 and max -1 Mbit/s must not be negative"},
	} {
		if test.err == nil || test.err.Error() != test.want {
			t.Errorf("error %v, want %s", test.err, test.want)
		}
	}
}

func TestNoSuchNamespace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	if _, err := devlink.Dial(path); !errors.Is(err, os.ErrNotExist) ||
		!strings.Contains(err.Error(), path) {
		t.Errorf("dial: error %v", err)
	}
}

func TestClosed(t *testing.T) {
	if !devlink.HasDevlink() {
		t.Skip("the kernel has no devlink, which is said before anything else")
	}

	c := dial(t, "")
	c.Close()
	c.Close()
	if _, err := c.Ports(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("error %v, want %v", err, os.ErrClosed)
	}
}

func dial(t *testing.T, netNS string) *devlink.Conn {
	t.Helper()
	c, err := devlink.Dial(netNS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}
