// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// rates is an eswitch with one rate object, which belongs to SF 88.
type rates struct {
	rate   function.Rate
	none   bool // the Function has no rate object, or is gone
	refuse error
	asked  int
}

func (r *rates) EswitchMode(devlink.Device) (devlink.EswitchMode, error) {
	r.asked++
	return devlink.Switchdev, nil
}

func (r *rates) PortsOf(d devlink.Device) ([]devlink.Port, error) {
	r.asked++
	if d != devlink.OfPCI(subfunction().Port.PF) {
		return nil, nil
	}
	return []devlink.Port{
		{Device: d, Index: 5, Flavour: devlink.PCISF, SF: subfunction().Port.Number},
	}, nil
}

func (r *rates) Rate(_ devlink.Device, port uint32) (function.Rate, bool, error) {
	r.asked++
	return r.rate, port == 5 && !r.none, nil
}

func (r *rates) SetRate(_ devlink.Device, port uint32, to function.Rate) error {
	if r.refuse != nil || port != 5 {
		return errors.Join(r.refuse, errors.New("cannot be set"))
	}
	r.rate = to
	return nil
}

func subfunction() netdev.Device {
	return netdev.Device{
		Name: hostName, Port: &function.EswitchPort{PF: "0000:3b:00.0", SF: true, Number: 88},
	}
}

func newRatedWorld(t *testing.T, before function.Rate) (*world, *rates) {
	t.Helper()
	w := newWorld(t, nil)
	r := &rates{rate: before}
	engine, err := netdev.New(netdev.Options{HostNetNS: w.host.Path(), Eswitches: r})
	must.Succeed(t, err)
	t.Cleanup(func() { engine.Close() })
	w.engine = engine
	return w, r
}

// TestRate checks that a rate is set, checked and restored at the eswitch if the eswitch has a rate
// object.
func TestRate(t *testing.T) {
	for name, userspace := range map[string]bool{"netdev": false, "without a netdev": true} {
		t.Run(name, func(t *testing.T) {
			before := function.Rate{Max: 500}
			w, r := newRatedWorld(t, before)
			want := function.Interface{
				Name: "net1", VF: &function.VFConfig{MinTxRate: new(10)}, Userspace: userspace,
			}
			snapshot, place, err := w.engine.Plan(t.Context(), subfunction(), w.pod.Path(), want)
			must.Succeed(t, err)
			if diff := cmp.Diff(&before, snapshot.Rate); diff != "" || r.rate != before {
				t.Errorf("planned: %v; snapshot (-want +got):\n%s", r.rate, diff)
			}

			observed, err := w.engine.Attach(t.Context(), subfunction(), snapshot, place, want)
			must.Succeed(t, err)
			if r.rate != (function.Rate{Min: 10, Max: 500}) {
				t.Errorf("attached: %v", r.rate)
			}

			attached := netdev.Attached{
				Before: snapshot, Place: place, Want: want, Observed: observed,
			}
			if got, err := w.engine.Check(t.Context(), subfunction(), attached); err != nil ||
				len(got) > 0 {
				t.Errorf("check: %q, %v", got, err)
			}

			r.rate.Max = 7
			got, err := w.engine.Check(t.Context(), subfunction(), attached)
			if diff := cmp.Diff([]string{"eswitch max_tx_rate is 7, was 500"}, got); diff != "" ||
				err != nil {
				t.Errorf("check: %v; (-want +got):\n%s", err, diff)
			}

			_, err = w.engine.Restore(t.Context(), subfunction(), snapshot, place)
			must.Succeed(t, err)
			if r.rate != before {
				t.Errorf("restored: %v, want %v", r.rate, before)
			}
		})
	}
}

// TestNoRate checks that the eswitch is never asked if the pod does not want a rate.
func TestNoRate(t *testing.T) {
	w, r := newRatedWorld(t, function.Rate{Max: 500})
	want := function.Interface{Name: "net1", VF: &function.VFConfig{}}
	snapshot, place, err := w.engine.Plan(t.Context(), subfunction(), w.pod.Path(), want)
	must.Succeed(t, err)
	_, err = w.engine.Attach(t.Context(), subfunction(), snapshot, place, want)
	must.Succeed(t, err)
	_, err = w.engine.Restore(t.Context(), subfunction(), snapshot, place)
	must.Succeed(t, err)
	if r.asked > 0 {
		t.Errorf("the eswitch was asked %d times", r.asked)
	}
}

// TestRateRefused checks that a refusal of the eswitch names the fields and leaves nothing behind.
func TestRateRefused(t *testing.T) {
	w, r := newRatedWorld(t, function.Rate{})
	r.refuse = errors.New("refused")
	before := w.snapshot(t, hostName)
	want := function.Interface{Name: "net1", VF: &function.VFConfig{MaxTxRate: new(100)}}
	snapshot, place, err := w.engine.Plan(t.Context(), subfunction(), w.pod.Path(), want)
	must.Succeed(t, err)
	_, err = w.engine.Attach(t.Context(), subfunction(), snapshot, place, want)
	const says = "vf.maxTxRate: the eswitch refuses rates of 0-100 Mbit/s for SF 88 of PF " +
		"0000:3b:00.0: refused"
	if !errors.Is(err, r.refuse) || !strings.Contains(err.Error(), says) {
		t.Errorf("error %v, want one with %q", err, says)
	}

	w.checkRestored(t, before)

	r.refuse = nil
	_, err = w.engine.Attach(t.Context(), subfunction(), snapshot, place, want)
	must.Succeed(t, err)
	r.refuse = errors.New("refused")
	const left = "eswitch max_tx_rate is 100, was 0"
	_, err = w.engine.Restore(t.Context(), subfunction(), snapshot, place)
	if err == nil || !strings.Contains(err.Error(), left) {
		t.Errorf("error %v, want one with %q", err, left)
	}

	r.none = true // the rate object is gone, and the rate with it
	_, err = w.engine.Restore(t.Context(), subfunction(), snapshot, place)
	must.Succeed(t, err)
}

// TestWishesOfSubfunction checks that properties which only a PF can enforce are refused for an SF.
func TestWishesOfSubfunction(t *testing.T) {
	w, r := newRatedWorld(t, function.Rate{})
	for name, test := range map[string]struct {
		wish function.VFConfig
		none bool
		says string
	}{
		"nothing": {},
		"rates":   {wish: function.VFConfig{MinTxRate: new(1), MaxTxRate: new(2)}},
		"VLAN": {
			wish: function.VFConfig{VLAN: new(100), QoS: new(0), MaxTxRate: new(2)},
			says: "vf.vlan, vf.qos: must be absent for SF 88 of PF 0000:3b:00.0: a PF enforces " +
				"that for its VFs only",
		},
		"settings": {
			wish: function.VFConfig{Trust: new(true), SpoofCheck: new(true), LinkState: "auto"},
			says: "vf.trust, vf.spoofCheck, vf.linkState: must be absent",
		},
		"no rate object": {
			wish: function.VFConfig{MaxTxRate: new(2)}, none: true,
			says: "vf.maxTxRate: must be absent for SF 88 of PF 0000:3b:00.0: its eswitch has no " +
				"rate object for it",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r.none = test.none
			want := function.Interface{Name: "net1", VF: &test.wish}
			_, _, err := w.engine.Plan(t.Context(), subfunction(), netns.New(t).Path(), want)
			if test.says == "" && err != nil || test.says != "" &&
				(err == nil || !strings.Contains(err.Error(), test.says)) {
				t.Errorf("error %v, want %q", err, test.says)
			}
		})
	}
}
