// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink"
	"google.golang.org/grpc"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/cases"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/netdevwire"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// testConformance runs the conformance test against the agent. No case may fail. The agent is
// restarted in the process of the test, so a kill is an end without a goodbye.
func testConformance(t *testing.T, mode plane.Mode) {
	x, vfs := newXPU(t, mode, "p0"), netns.New(t)
	netns.Connect(t, x.Namespace, "p0", netns.New(t), "p0")
	addAddress(t, x.Namespace, "p0", "198.51.100.1/24")
	prefix := conformance.NewPrefix()
	x.cfg.Plane.Representors.Netdevs = []string{prefix + "*"}
	socket := filepath.Join(must.SocketDir(t), "agent")
	stop := serveAt(t, x, socket)
	t.Cleanup(func() { stop() })

	runner, err := conformance.NewRunner(conformance.Config{
		Endpoint: conformance.Endpoint{Network: "unix", Address: socket},
		Hooks: conformance.Hooks{
			MakePort: func(_ context.Context, p conformance.Port) error {
				return makeRepresentor(x, vfs, p)
			},
			RemovePort: func(_ context.Context, p conformance.Port) error {
				return removeRepresentor(x, p)
			},
			OpenWire: func(_ context.Context, p conformance.Port) (conformance.Wire, error) {
				return openWire(vfs, p)
			},
			Restart: func(context.Context, conformance.Ending) error {
				stop()
				stop = serveAt(t, x, socket)
				return nil
			},
		},
		Prefix: prefix,
		VLANs:  conformance.Range{First: 100, Last: 199}, VNIs: conformance.Range{First: 1, Last: 99},
		Settle: timeout, CallTimeout: timeout, Limit: 10 * time.Minute, Scale: 8,
	}, conformance.NewKinds())
	must.Succeed(t, err)
	t.Cleanup(func() { _ = runner.Close() })

	selected := cases.All(runner.Kinds)
	if !netns.Has(t, netns.VRFs()) {
		selected = slices.DeleteFunc(selected, func(c conformance.Case) bool {
			return c.Kind == runner.Kinds.Vrf || c.Kind == runner.Kinds.Svi
		})
	}
	report, err := runner.Run(t.Context(), selected)
	must.Succeed(t, err)
	for _, p := range report.Profiles {
		t.Logf("%+v", p)
	}
	report.Implementation.Name, report.Reproduce = "opi-bridge, --data-plane="+string(mode), nil
	t.Logf("conformance report: %s", packed(t, report))
	for _, r := range report.Results() {
		if r.Took > 2*time.Second {
			t.Logf("%s took %s", r.Case.ID(), r.Took)
		}
	}
	if len(report.LeftBehind) > 0 {
		t.Errorf("left behind: %q", report.LeftBehind)
	}
	for _, r := range report.Results() {
		switch r.Outcome {
		case conformance.Failed, conformance.Blocked, conformance.NotRun:
			t.Errorf("%s: %s: %s", r.Case.ID(), r.Outcome, r.Text)
		case conformance.Deviates:
			t.Logf("%s: %s: %s", r.Case.ID(), r.Outcome, r.Text)
		}
	}
}

// packed returns a report for the log of a guest, from which test/conformance/report takes it.
func packed(t *testing.T, report *conformance.Report) string {
	t.Helper()
	var text bytes.Buffer
	zip := gzip.NewWriter(&text)
	must.Succeed(t, report.WriteJSON(zip))
	must.Succeed(t, zip.Close())
	return base64.StdEncoding.EncodeToString(text.Bytes())
}

// serveAt starts an agent that serves at a socket until stop.
func serveAt(t *testing.T, x *xpu, socket string) (stop func()) {
	t.Helper()
	var agent *service.Agent
	must.Succeed(t, x.Do(func() (err error) {
		agent, err = service.New(x.cfg, logr.Discard())
		return err
	}))
	must.Succeed(t, os.RemoveAll(socket))
	lis, err := net.Listen("unix", socket)
	must.Succeed(t, err)

	server := agent.NewServer()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- agent.Run(ctx) }()
	go func() { ended <- server.Serve(lis) }()

	return func() {
		cancel()
		server.Stop()
		for range 2 {
			if err := <-ended; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				t.Errorf("agent: %v", err)
			}
		}
		if err := agent.Close(); err != nil {
			t.Errorf("agent: %v", err)
		}
	}
}

// makeRepresentor makes a wire whose end in the xPU is the representor of a port.
func makeRepresentor(x *xpu, vfs *netns.Namespace, p conformance.Port) error {
	if x.hasLink(p.ID) {
		return nil
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = p.ID
	wire := &netlink.Veth{
		LinkAttrs: attrs, PeerName: p.ID, PeerNamespace: netlink.NsFd(vfs.Fd()),
		PeerHardwareAddr: p.MAC,
	}
	return x.Handle().LinkAdd(wire)
}

func removeRepresentor(x *xpu, p conformance.Port) error {
	link, err := x.Handle().LinkByName(p.ID)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil
	}
	if err != nil {
		return err
	}
	return x.Handle().LinkDel(link)
}

// openWire returns the other end of the wire of a port.
func openWire(vfs *netns.Namespace, p conformance.Port) (wire conformance.Wire, err error) {
	link, err := vfs.Handle().LinkByName(p.ID)
	if err != nil {
		return nil, err
	}
	if err := vfs.Handle().LinkSetUp(link); err != nil {
		return nil, err
	}
	err = vfs.Do(func() (err error) {
		wire, err = netdevwire.Open(p.ID)
		return err
	})
	return wire, err
}
