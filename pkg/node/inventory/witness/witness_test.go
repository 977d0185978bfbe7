// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const (
	pf  = "0000:3b:00.0"
	vf  = "0000:3b:00.2"
	aux = "mlx5_core.sf.4"
)

var errAway = errors.New("sriovnet cannot say")

// host is a PF with a VF on the host, a VF in a pod and an SF, in mode switchdev, and a FPGA.
func host() []function.Function {
	of := function.Function{
		ID: function.ID{Address: pf}, Kind: function.PF, Class: function.Network, PF: pf,
		Index: -1, NumVFs: 2, Driver: "mlx5_core", Netdev: "ens1", PKey: "0x7fff",
	}
	first, second, sf := of, of, of
	first.ID.Address, first.Kind, first.Index, first.Netdev = vf, function.VF, 0, "ens1v0"
	second.ID.Address, second.Kind, second.Index, second.Netdev = "0000:3b:00.3", function.VF, 1, ""
	second.Driver = "vfio-pci"
	first.PKey, second.PKey, sf.PKey = "", "", ""
	sf.ID, sf.Kind, sf.Index = function.SubfunctionID(pf, 88), function.SF, 88
	sf.Netdev, sf.AuxDevice = "ens1s88", aux
	fpga := function.Function{
		ID: function.ID{Address: "0000:5e:00.0"}, Kind: function.PF, Class: function.Accelerator,
		PF: "0000:5e:00.0", Index: -1, NoNetdev: true, Driver: "vfio-pci",
	}

	return []function.Function{of, sf, first, second, fpga}
}

func ports() ([]devlink.Port, error) {
	eswitch := devlink.OfPCI(pf)
	return []devlink.Port{
		{Device: eswitch, Flavour: devlink.Physical, Netdev: "ens1"},
		{Device: eswitch, Flavour: devlink.PCIVF, VF: 0, Netdev: "pf0vf0"},
		{Device: eswitch, Flavour: devlink.PCIVF, VF: 1, Netdev: "pf0vf1"},
		{Device: eswitch, Flavour: devlink.PCIVF, VF: 1, External: true, Netdev: "c1pf0vf1"},
		{Device: eswitch, Flavour: devlink.PCISF, SF: 88, Netdev: "pf0sf88"},
	}, nil
}

// agreeing returns a Reader that says what the host has.
func agreeing() Reader {
	netdevs := map[string][]string{
		pf: {"ens1", "pf0vf0", "pf0vf1", "pf0sf88"}, vf: {"ens1v0"}, "0000:3b:00.3": {},
	}
	return Reader{
		NetDevicesFromPCI: func(device string) ([]string, error) { return netdevs[device], nil },
		PFFromVF:          func(string) (string, error) { return pf, nil },
		VFIndex: func(of string) (int, error) {
			return map[string]int{vf: 0, "0000:3b:00.3": 1}[of], nil
		},
		VFsOf:             func(string) ([]string, error) { return []string{"virtfn0", "virtfn1"}, nil },
		UplinkRepresentor: func(string) (string, error) { return "ens1", nil },
		VFRepresentor: func(_ string, index int) (string, error) {
			return fmt.Sprintf("pf0vf%d", index), nil
		},
		AuxDevicesFromPCI: func(string) ([]string, error) {
			return []string{aux, "mlx5_core.eth.0"}, nil
		},
		SFNumOfAux:        func(string) (int, error) { return 88, nil },
		AuxDeviceOfSF:     func(string, uint32) (string, error) { return aux, nil },
		NetDevicesFromAux: func(string) ([]string, error) { return []string{"ens1s88"}, nil },
		SFRepresentor: func(_ string, sfnum int) (string, error) {
			return fmt.Sprintf("pf0sf%d", sfnum), nil
		},
		DefaultPKey: func(string) (string, error) { return "0x7fff", nil },
		IsBoundToVFIO: func(device string) bool {
			return device == "0000:3b:00.3" || device == "0000:5e:00.0"
		},
	}
}

// verified compares Functions with a Reader in a bubble, where pauses take no time.
func verified(t *testing.T, functions []function.Function, r Reader) (v nodestate.Verification) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		v = Verify(t.Context(), Source{
			Functions: func(context.Context) ([]function.Function, error) { return functions, nil },
			Ports:     ports, Reader: func() Reader { return r },
		})
	})
	return v
}

// notKnown are the properties of the host that sriovnet cannot say.
var notKnown = []nodestate.Unverified{{
	Property: "driver", Functions: 2, First: function.ID{Address: pf},
	Reason: "sriovnet knows no driver but vfio-pci",
}}

func TestSame(t *testing.T) {
	want := nodestate.Verification{Same: 19, Unknown: 2, Unknowns: notKnown}
	got := verified(t, host(), agreeing())
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(got, "Time")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got.Time.IsZero() {
		t.Error("the comparison has no time")
	}
}

// TestDifferent checks each property with a Reader that says something else.
func TestDifferent(t *testing.T) {
	sf := function.SubfunctionID(pf, 88).String()
	for name, test := range map[string]struct {
		disagree func(*Reader)
		want     []string
	}{
		"netdevs": {func(r *Reader) {
			r.NetDevicesFromPCI = func(string) ([]string, error) {
				return []string{"a", "b", "c", "d", "e", "f"}, nil
			}
		}, []string{
			pf + " netdev: ens1, not a, b, c, d and 2 more",
			vf + " netdev: ens1v0, not a, b, c, d and 2 more",
			"0000:3b:00.3 netdev: none on the host, not a, b, c, d and 2 more",
		}},
		"no netdev of an SF": {func(r *Reader) {
			r.NetDevicesFromAux = func(string) ([]string, error) { return nil, nil }
		}, []string{sf + " netdev: ens1s88, not none"}},
		"PF of VFs": {func(r *Reader) {
			r.PFFromVF = func(string) (string, error) { return "0000:3b:00.1", nil }
		}, []string{
			vf + " pf: 0000:3b:00.0, not 0000:3b:00.1",
			"0000:3b:00.3 pf: 0000:3b:00.0, not 0000:3b:00.1",
		}},
		"index of a VF": {func(r *Reader) {
			r.VFIndex = func(string) (int, error) { return 0, nil }
		}, []string{"0000:3b:00.3 vf-index: 1, not 0"}},
		"number of VFs": {func(r *Reader) {
			r.VFsOf = func(string) ([]string, error) { return []string{"virtfn0"}, nil }
		}, []string{pf + " vfs: 2, not 1"}},
		"uplink": {func(r *Reader) {
			r.UplinkRepresentor = func(string) (string, error) { return "pf0vf0", nil }
		}, []string{pf + " uplink: ens1, not pf0vf0"}},
		"representors": {func(r *Reader) {
			r.VFRepresentor = func(string, int) (string, error) { return "pf0vf1", nil }
		}, []string{vf + " representor: pf0vf0, not pf0vf1"}},
		"a representor that is a netdev of a Function": {func(r *Reader) {
			r.SFRepresentor = func(string, int) (string, error) { return "ens1v0", nil }
		}, []string{sf + " representor: pf0sf88, not ens1v0, which the inventory has as netdev " +
			"of " + vf}},
		"number of SFs": {func(r *Reader) {
			r.AuxDevicesFromPCI = func(string) ([]string, error) {
				return []string{"mlx5_core.eth.0"}, nil
			}
		}, []string{pf + " sfs: 1, not 0"}},
		"sfnum": {func(r *Reader) {
			r.SFNumOfAux = func(string) (int, error) { return -1, nil }
		}, []string{sf + " sfnum: 88, not -1"}},
		"auxiliary device": {func(r *Reader) {
			r.AuxDeviceOfSF = func(string, uint32) (string, error) { return "x.sf.9", nil }
		}, []string{sf + " aux-device: mlx5_core.sf.4, not x.sf.9"}},
		"partition key": {func(r *Reader) {
			r.DefaultPKey = func(string) (string, error) { return "0xffff", nil }
		}, []string{pf + " pkey: 0x7fff, not 0xffff"}},
		"driver": {func(r *Reader) {
			r.IsBoundToVFIO = func(device string) bool { return device != pf }
		}, []string{vf + " driver: mlx5_core, not vfio-pci"}},
	} {
		t.Run(name, func(t *testing.T) {
			reader := agreeing()
			test.disagree(&reader)
			v := verified(t, host(), reader)

			var got []string
			for _, d := range v.Differences {
				got = append(got, fmt.Sprintf("%s %s: %s, not %s", d.Function, d.Property,
					d.Inventory, d.Sriovnet))
				if !strings.Contains(d.Look, pf) && !strings.Contains(d.Look, "0000:3b:00") {
					t.Errorf("%s says nothing about the device", d.Look)
				}
			}

			if diff := cmp.Diff(test.want, got); diff != "" || v.Different != len(got) ||
				v.Skipped != "" {
				t.Errorf("%d differences, skipped %q (-want +got):\n%s", v.Different, v.Skipped,
					diff)
			}
		})
	}
}

// TestNoNetdevAtAll checks that a Function without a netdev in any namespace must have none.
func TestNoNetdevAtAll(t *testing.T) {
	functions := host()[2:3]
	functions[0].Netdev, functions[0].NoNetdev = "", true
	v := verified(t, functions, agreeing())
	if len(v.Differences) != 1 || v.Differences[0].Inventory != "none" ||
		v.Differences[0].Sriovnet != "ens1v0" {
		t.Errorf("%+v, want that sriovnet finds ens1v0", v)
	}
}

// TestUnknown checks that an error is neither a difference nor an agreement, for every property.
func TestUnknown(t *testing.T) {
	none := func(string) ([]string, error) { return nil, errAway }
	text := func(string) (string, error) { return "", errAway }
	number := func(string) (int, error) { return -1, errAway }
	indexed := func(string, int) (string, error) { return "", errAway }
	reader := Reader{
		NetDevicesFromPCI: none, PFFromVF: text, VFIndex: number, VFsOf: none,
		UplinkRepresentor: text, VFRepresentor: indexed, AuxDevicesFromPCI: none,
		SFNumOfAux:        number,
		AuxDeviceOfSF:     func(string, uint32) (string, error) { return "", errAway },
		NetDevicesFromAux: none, SFRepresentor: indexed, DefaultPKey: text,
		IsBoundToVFIO: func(string) bool { return false },
	}

	v := verified(t, host(), reader)
	if v.Same != 0 || v.Different != 0 || v.Unknown != 21 || len(v.Unknowns) != 11 ||
		!strings.Contains(v.Skipped,
			"every property is unknown; driver of Function 0000:3b:00.0: sriovnet") {
		t.Errorf("%+v, want that all 21 are unknown", v)
	}
	for _, u := range v.Unknowns {
		if u.Reason != errAway.Error() && u.Property != "driver" {
			t.Errorf("%s is unknown because of %q", u.Property, u.Reason)
		}
	}

	// a Reader without functions, which panics at each call
	v = verified(t, host(), Reader{})
	if v.Same != 0 || v.Different != 0 || v.Unknown != 21 ||
		!strings.Contains(v.Unknowns[0].Reason, "sriovnet panicked") {
		t.Errorf("%+v, want that all 21 are unknown", v)
	}
}

// TestSriovnetDoesNotKnow checks that Functions of which sriovnet knows a part only are not
// different.
func TestSriovnetDoesNotKnow(t *testing.T) {
	for name, test := range map[string]struct {
		change func(pf, vf *function.Function)
		want   string // properties
	}{
		"netdev below a vDPA device": {func(_, vf *function.Function) {
			vf.Netdev, vf.VDPA = "vdpa0", function.VDPA{Name: "vdpa0", Driver: "virtio_vdpa"}
		}, "driver netdev"},
		"PF below a vDPA device": {func(pf, _ *function.Function) {
			pf.Netdev, pf.VDPA = "vdpa0", function.VDPA{Name: "vdpa0", Driver: "virtio_vdpa"}
		}, "driver netdev uplink vfs"},
		"netdev of a virtio device": {func(pf, _ *function.Function) {
			pf.Driver, pf.NumVFs = "virtio-pci", 7
		}, "driver vfs"},
		"PF in a pod": {func(pf, _ *function.Function) { pf.NumVFs, pf.Netdev = 7, "" },
			"driver vfs"},
		"no devlink port": {func(_, vf *function.Function) { vf.Index = 7 },
			"driver representor"},
	} {
		t.Run(name, func(t *testing.T) {
			functions, reader := host(), agreeing()
			test.change(&functions[0], &functions[2])
			if functions[0].Netdev == "" {
				reader.NetDevicesFromPCI = func(string) ([]string, error) { return nil, nil }
				reader.UplinkRepresentor = func(string) (string, error) { return "", nil }
				functions = functions[:1]
			}
			reader.VFIndex = func(of string) (int, error) {
				return functions[len(functions)-1].Index, nil
			}

			v := verified(t, functions[:min(len(functions), 3)], reader)
			var unknown []string
			for _, u := range v.Unknowns {
				unknown = append(unknown, u.Property)
			}
			if strings.Join(unknown, " ") != test.want {
				t.Errorf("unknown are %q, want %s: %+v", unknown, test.want, v)
			}
			for _, d := range v.Differences {
				if strings.Contains(test.want, d.Property) {
					t.Errorf("%+v", d)
				}
			}
		})
	}
}

// TestHostileText checks that no text of the kernel makes the result large, or something that the
// API does not accept.
func TestHostileText(t *testing.T) {
	long := strings.Repeat("\xff\x1b[31mü", 10_000)
	reader := agreeing()
	reader.UplinkRepresentor = func(string) (string, error) { return long, nil }
	reader.PFFromVF = func(string) (string, error) { return "", errors.New(long) }
	reader.NetDevicesFromPCI = func(string) ([]string, error) {
		return []string{long, long, long, long, long}, nil
	}

	v := verified(t, host(), reader)
	for _, text := range []string{
		v.Differences[0].Sriovnet, v.Differences[1].Sriovnet, v.Unknowns[1].Reason,
	} {
		if text == "" || len(text) > maxText || !utf8.ValidString(text) {
			t.Errorf("%d bytes, want 1 to %d of UTF-8: %q", len(text), maxText, text)
		}
	}
}

// TestManyDifferences checks that the first are listed, and all are counted.
func TestManyDifferences(t *testing.T) {
	reader := agreeing()
	reader.VFIndex = func(string) (int, error) { return 9999, nil }
	var functions []function.Function
	for i := range 300 {
		f := host()[2]
		f.ID.Address, f.Index = pci.Address(fmt.Sprintf("0000:3c:%02x.%d", i/8, i%8)), i
		functions = append(functions, f)
	}

	v := verified(t, functions, reader)
	if len(v.Differences) != nodestate.MaxDifferences || v.Different < 300 {
		t.Errorf("%d of %d differences are listed, want %d of 300 or more", len(v.Differences),
			v.Different, nodestate.MaxDifferences)
	}
}

// TestConfirmed checks that only a difference that stays is one.
func TestConfirmed(t *testing.T) {
	for name, test := range map[string]struct {
		wrong           []bool // for each comparison: the index of the VF is wrong
		other           bool   // it is wrong in another way each time
		different, runs int
		reason          string
	}{
		"at once right":  {wrong: []bool{false, true}, runs: 1},
		"wrong for once": {wrong: []bool{true, false}, runs: 2},
		"wrong twice":    {wrong: []bool{true, true, false}, runs: 3},
		"always wrong":   {wrong: []bool{true, true, true}, different: 1, runs: 3},
		"always otherwise": {wrong: []bool{true, true, true}, other: true, runs: 2,
			reason: "it changed while it was compared"},
	} {
		t.Run(name, func(t *testing.T) {
			compared := 0
			synctest.Test(t, func(t *testing.T) {
				v := Verify(t.Context(), Source{
					Functions: func(context.Context) ([]function.Function, error) {
						return host(), nil
					},
					Ports: ports,
					Reader: func() Reader {
						compared++
						reader := agreeing()
						if !test.wrong[compared-1] {
							return reader
						}
						index := 9
						if test.other {
							index += compared
						}
						reader.VFIndex = func(of string) (int, error) {
							if of != vf {
								return 1, nil
							}
							return index, nil
						}
						return reader
					},
				})

				if v.Different != test.different || compared != test.runs {
					t.Errorf("%d differences after %d comparisons: %+v", v.Different, compared, v)
				}
				if test.reason != "" && v.Unknowns[len(v.Unknowns)-1].Reason != test.reason {
					t.Errorf("unknown: %+v, want %s", v.Unknowns, test.reason)
				}
			})
		})
	}
}

// TestTimeIsUp checks that what was not compared, or not again, is unknown.
func TestTimeIsUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), pause/2,
			errors.New("there was no time left"))
		defer cancel()
		reader := agreeing()
		reader.VFsOf = func(string) ([]string, error) { return nil, nil }
		source := Source{
			Functions: func(context.Context) ([]function.Function, error) { return host(), nil },
			Ports:     ports, Reader: func() Reader { return reader },
		}

		v := Verify(ctx, source)
		if v.Different != 0 || v.Same != 18 || v.Unknown != 3 ||
			!strings.Contains(v.Unknowns[1].Reason, "could not be compared again: there was no") {
			t.Errorf("%+v, want that the difference is unknown", v)
		}
		if !strings.Contains(v.Skipped, "did not end (there was no time left); 3 properties") {
			t.Errorf("a comparison that did not end has the result %+v", v)
		}
		if v = Verify(ctx, source); v.Unknown != 21 ||
			v.Unknowns[0].Reason != "there was no time left" {
			t.Errorf("%+v, want that all is unknown", v)
		}
	})
}

func TestNothingToCompare(t *testing.T) {
	functions := func(context.Context) ([]function.Function, error) { return host(), nil }
	elsewhere := t.TempDir()
	for want, source := range map[string]Source{
		"below " + elsewhere + ", and sriovnet can read only /sys": {SysRoot: elsewhere},
		"no such file or directory":                                {SysRoot: elsewhere + "/none"},
		"no Functions": {
			Functions: func(context.Context) ([]function.Function, error) { return nil, nil },
			Reader:    agreeing,
		},
		"cannot say": {
			Functions: func(context.Context) ([]function.Function, error) { return nil, errAway },
			Reader:    agreeing,
		},
	} {
		if source.Functions == nil {
			source.Functions = functions
		}
		source.Ports = ports
		if v := Verify(t.Context(), source); !strings.Contains(v.Skipped, want) || v.Unknown != 0 {
			t.Errorf("%+v, want skipped: %s", v, want)
		}
	}

	// A container has the host's sysfs at another path.
	link := filepath.Join(elsewhere, "sys")
	must.Succeed(t, os.Symlink("/sys", link))
	must.Succeed(t, checkRoot(link))
}

// TestPortsUnknown checks that representors are unknown without devlink's list.
func TestPortsUnknown(t *testing.T) {
	v := Verify(t.Context(), Source{
		Functions: func(context.Context) ([]function.Function, error) { return host(), nil },
		Ports:     func() ([]devlink.Port, error) { return nil, errAway },
		Reader:    agreeing,
	})
	if v.Different != 0 || len(v.Unknowns) != 2 || v.Unknowns[1] != (nodestate.Unverified{
		Property: "representor", Functions: 3, First: function.SubfunctionID(pf, 88),
		Reason: errAway.Error(),
	}) {
		t.Errorf("%+v, want that representors are unknown", v)
	}
}
