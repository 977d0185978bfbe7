// SPDX-License-Identifier: Apache-2.0

// Package trial runs the conformance test of OPI agents against opi-bridges with faults. It needs
// root, because each agent has a network namespace of its own.
package trial

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/cases"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/netdevwire"
	"github.com/opiproject/xpu-device-plugin/test/conformance/faults"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// prefix begins the ids of the trial's objects.
const prefix = "conf01"

// Run runs the cases that should find a fault against a program of opi-bridge, and returns those
// that did. The program needs a name of the fault in [faults.Variable], or has the fault anyway.
func Run(ctx context.Context, program string, f faults.Fault) (found []string, err error) {
	work, err := os.MkdirTemp("", "trial")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()

	x, err := newXPU(work)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.close()) }()

	a := &agent{program: program, fault: f, xpu: x, dir: work}
	endpoint, err := a.serve()
	if err != nil {
		return nil, err
	}
	defer a.close()

	runner, err := conformance.NewRunner(a.config(endpoint), conformance.NewKinds())
	if err != nil {
		return nil, err
	}
	defer runner.Close()

	report, err := runner.Run(ctx, selected(runner.Kinds, f))
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, a.log())
	}
	for _, r := range report.Results() {
		if r.Outcome == conformance.Failed || r.Outcome == conformance.Deviates {
			found = append(found, r.Case.ID())
		} else if r.Text != "" {
			err = errors.Join(err, fmt.Errorf("%s: %s: %s", r.Case.ID(), r.Outcome, r.Text))
		}
	}
	if len(found) > 0 {
		return found, nil
	}

	return nil, err
}

// config returns the configuration of the kit.
func (a *agent) config(endpoint conformance.Endpoint) conformance.Config {
	x := a.xpu
	return conformance.Config{
		Endpoint: endpoint,
		Hooks: conformance.Hooks{
			MakePort: func(_ context.Context, p conformance.Port) error { return x.makePort(p) },
			RemovePort: func(_ context.Context, p conformance.Port) error {
				return x.removePort(p)
			},
			OpenWire: func(_ context.Context, p conformance.Port) (conformance.Wire, error) {
				return x.openWire(p)
			},
			Restart: func(_ context.Context, how conformance.Ending) error {
				return errors.Join(a.end(how), a.start())
			},
		},
		Prefix: prefix,
		VLANs:  conformance.Range{First: 3000, Last: 3199},
		VNIs:   conformance.Range{First: 16000000, Last: 16000199},
		VTEP:   netip.MustParsePrefix(uplinkAddress),
		Settle: 3 * time.Second, CallTimeout: 10 * time.Second, Limit: 5 * time.Minute, Scale: 24,
		// What is declared and not served is a failure.
		Declared: []conformance.Profile{conformance.Profile(a.fault.Profile())},
	}
}

func selected(kinds conformance.Kinds, f faults.Fault) []conformance.Case {
	wanted := regexp.MustCompile(f.Pattern())
	return slices.DeleteFunc(cases.All(kinds), func(c conformance.Case) bool {
		return !wanted.MatchString(c.ID())
	})
}

// xpu is a network namespace with an uplink, and the namespace of the Functions of its ports.
type xpu struct{ own, functions *netns.Namespace }

// uplinkAddress is the address of the uplink p0.
const uplinkAddress = "198.51.100.1/24"

func newXPU(dir string) (*xpu, error) {
	x := &xpu{}
	var err error
	if x.own, err = netns.Make(filepath.Join(dir, "xpu")); err != nil {
		return nil, err
	}
	if x.functions, err = netns.Make(filepath.Join(dir, "functions")); err != nil {
		return nil, errors.Join(err, x.own.Close())
	}
	if err := x.makeUplink(); err != nil {
		return nil, errors.Join(err, x.close())
	}
	return x, nil
}

func (x *xpu) close() error { return errors.Join(x.functions.Close(), x.own.Close()) }

// makeUplink makes the netdev p0 with a carrier and an address.
func (x *xpu) makeUplink() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "p0"
	handle := x.own.Handle()
	if err := handle.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "p1"}); err != nil {
		return err
	}
	for _, name := range []string{"lo", "p0", "p1"} {
		link, err := handle.LinkByName(name)
		if err == nil {
			err = handle.LinkSetUp(link)
		}
		if err != nil {
			return err
		}
	}

	uplink, err := handle.LinkByName("p0")
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr(uplinkAddress)
	if err != nil {
		return err
	}
	return handle.AddrAdd(uplink, address)
}

// makePort makes a wire between a Function and its representor, which both have the port's id.
func (x *xpu) makePort(p conformance.Port) error {
	if _, err := x.own.Handle().LinkByName(p.ID); err == nil {
		return nil
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = p.ID
	return x.own.Handle().LinkAdd(&netlink.Veth{
		LinkAttrs: attrs, PeerName: p.ID, PeerNamespace: netlink.NsFd(x.functions.Fd()),
		PeerHardwareAddr: p.MAC,
	})
}

func (x *xpu) removePort(p conformance.Port) error {
	link, err := x.own.Handle().LinkByName(p.ID)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil
	}
	if err != nil {
		return err
	}
	return x.own.Handle().LinkDel(link)
}

func (x *xpu) openWire(p conformance.Port) (wire conformance.Wire, err error) {
	link, err := x.functions.Handle().LinkByName(p.ID)
	if err != nil {
		return nil, err
	}
	if err := x.functions.Handle().LinkSetUp(link); err != nil {
		return nil, err
	}
	err = x.functions.Do(func() (err error) {
		wire, err = netdevwire.Open(p.ID)
		return err
	})
	return wire, err
}
