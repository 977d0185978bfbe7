// SPDX-License-Identifier: Apache-2.0

// Package provisioningtest has one table of tests that every [provisioning.Provisioner] must pass,
// and a journal for them.
package provisioningtest

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// The provisioner under test is configured with one xPU that serves one PF, and with two networks,
// and nothing else.
const (
	XPU     = "card"
	PF      = pci.Address("0000:3b:00.0")
	Pool    = "fast"
	Blue    = "blue"
	BlueMTU = 1450
	Green   = "green"
)

// VLANs of the networks.
const (
	BlueVLAN  = 100
	GreenVLAN = 200
)

const (
	// patience bounds every wait of the suite.
	patience = 30 * time.Second
	// enough is how long the suite gives a provisioner to find out that a call cannot succeed.
	enough = 300 * time.Millisecond
)

// Start makes a provisioner, and all that it needs, for one case and for the xPU with this OPI
// agent. records is the node's journal. Start ends everything with t.Cleanup. The provisioner must
// report an xPU that has been away for more than 100 ms.
type Start func(t *testing.T, agent *opitest.Agent, records *journal.Journal) provisioning.Provisioner

// NewJournal opens an empty journal and closes it when the test ends.
func NewJournal(t *testing.T) *journal.Journal {
	t.Helper()
	records, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	must.Succeed(t, err)
	t.Cleanup(func() { _ = records.Close() })
	return records
}

// Suite tests what the node's agent relies on. It holds for every kind of Provisioner.
func Suite(t *testing.T, start Start) {
	for _, test := range cases {
		t.Run(test.name, func(t *testing.T) {
			agent := opitest.Start(t)
			client, err := opi.Dial(agent.Config())
			must.Succeed(t, err)
			t.Cleanup(func() { _ = client.Close() })

			ctx, cancel := context.WithTimeout(t.Context(), patience)
			t.Cleanup(cancel)

			records := NewJournal(t)
			test.run(&suite{T: t, ctx: ctx, agent: agent, client: client, records: records,
				tested: start(t, agent, records)})
		})
	}
}

type suite struct {
	*testing.T
	ctx     context.Context
	agent   *opitest.Agent
	client  *opi.Client
	records *journal.Journal
	tested  provisioning.Provisioner
}

var cases = []struct {
	name string
	run  func(*suite)
}{
	{"provision", (*suite).provisions},
	{"provision again", (*suite).provisionsAgain},
	{"a subfunction", (*suite).provisionsSubfunction},
	{"another network", (*suite).changesNetwork},
	{"another MAC", (*suite).changesMAC},
	{"another pod", (*suite).changesPod},
	{"a slow agent", (*suite).waits},
	{"lost answers", (*suite).survivesLostAnswers},
	{"a refusing agent", (*suite).isRefused},
	{"a refusal that ends", (*suite).isTakenAfterAll},
	{"no such network", (*suite).missesNetwork},
	{"no xPU", (*suite).missesXPU},
	{"the agent forgets", (*suite).remindsAgent},
	{"the agent is away", (*suite).isAway},
	{"provision while the agent is away", (*suite).waitsForAgent},
	{"deprovision while the agent is away", (*suite).deprovisionsLater},
	{"deprovision what the agent does not tell of", (*suite).keepsUnknown},
	{"deprovision what never was", (*suite).deprovisionsNothing},
	{"many at once", (*suite).manages},
}

// vf returns the n-th VF of the PF.
func vf(n int) function.Function {
	return function.Function{
		ID:   function.ID{Address: pci.Address(fmt.Sprintf("0000:3b:%02x.%d", 2+n/8, n%8))},
		Kind: function.VF, PF: PF, Index: n, LinkUp: true,
	}
}

func reservation(f function.Function, network string) journal.Attachment {
	return journal.Attachment{
		Function: f.ID, PF: f.PF, VFIndex: f.Index, Resource: "xpu.opiproject.org/" + Pool,
		Port: &journal.Port{
			DevicePool: Pool, Network: network, MAC: provisioning.MAC("node", f.ID),
		},
		State: journal.Reserved, ReservedAt: time.Now(),
	}
}

// try records the Port in the journal and provisions it, as the node's agent does.
func (s *suite) try(ctx context.Context, a journal.Attachment) (mtu int, err error) {
	if err := s.records.Put(a); err != nil {
		return 0, err
	}
	done, err := s.tested.Provision(ctx, a)
	return done.MTU, err
}

func (s *suite) provision(a journal.Attachment) {
	s.Helper()
	must.Succeed(s, s.tries(a)(s.ctx))
	s.serves(a)
}

// tryRelease records in the journal that the Port is being released, and deprovisions it, as the
// node's agent does.
func (s *suite) tryRelease(ctx context.Context, f function.Function) error {
	a := journal.Attachment{Function: f.ID, PF: f.PF}
	if recorded, exists := s.records.Get(f.ID); exists {
		a = recorded
		a.State = journal.Releasing
		if err := s.records.Put(a); err != nil {
			return err
		}
	}

	if err := s.tested.Deprovision(ctx, a); err != nil {
		return err
	}

	return s.records.Delete(f.ID)
}

func (s *suite) deprovision(f function.Function) {
	s.Helper()
	must.Succeed(s, s.tryRelease(s.ctx, f))
}

// serves fails the test unless the OPI agent serves exactly this attachment.
func (s *suite) serves(a journal.Attachment) {
	s.Helper()
	if difference := s.differs(a); difference != "" {
		s.Errorf("Port of Function %s (-want +got):\n%s", a.Function, difference)
	}
}

func (s *suite) differs(a journal.Attachment) string {
	s.Helper()
	id, err := opi.PortID(a.Function)
	must.Succeed(s, err)
	got, err := s.client.GetPort(s.ctx, id)
	if err != nil {
		return err.Error()
	}

	want := opi.Port{
		ID: id, MAC: a.Port.MAC.HardwareAddr(),
		Networks: []string{opitest.Installation.NetworkID(a.Port.Network)},
	}

	return cmp.Diff(opi.PortStatus{Port: want, Status: opi.Status{State: opi.StateUp}}, got)
}

func (s *suite) empty() {
	s.Helper()
	if left := s.agent.Ports(); len(left) > 0 {
		s.Errorf("the agent still has %q", left)
	}
}

// refuses fails the test unless the call fails with an error that contains all these texts. It
// repeats a call whose error lacks a text, because one call may have been too short to find it.
func (s *suite) refuses(call func(ctx context.Context) error, texts ...string) {
	s.Helper()
	for {
		ctx, cancel := context.WithTimeout(s.ctx, enough)
		err := call(ctx)
		cancel()
		if err == nil {
			s.Fatalf("no error, want one with %q", texts)
		}

		lacks := slices.DeleteFunc(slices.Clone(texts), func(text string) bool {
			return strings.Contains(err.Error(), text)
		})
		if len(lacks) == 0 {
			return
		}
		if s.ctx.Err() != nil {
			s.Fatalf("error %q, want %q in it", err, lacks)
		}
	}
}

// tries returns a function that calls Provision.
func (s *suite) tries(a journal.Attachment) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		_, err := s.try(ctx, a)
		return err
	}
}

func (s *suite) provisions() {
	r := reservation(vf(0), Blue)
	mtu, err := s.try(s.ctx, r)
	must.Succeed(s, err)
	if mtu != BlueMTU {
		s.Errorf("Provision = %d, want the network's MTU %d", mtu, BlueMTU)
	}

	s.serves(r)
	if mtu, err := s.try(s.ctx, reservation(vf(1), Green)); err != nil || mtu != 0 {
		s.Errorf("Provision in a network without an MTU = %d, %v", mtu, err)
	}
	if message := s.tested.Away(vf(0)); message != "" {
		s.Errorf("Away = %q of an xPU that serves", message)
	}

	s.deprovision(vf(0))
	s.deprovision(vf(1))
	s.empty()
}

func (s *suite) provisionsAgain() {
	r := reservation(vf(0), Blue)
	s.provision(r)
	made := s.agent.Calls("CreateBridgePort")
	s.provision(r)
	if again := s.agent.Calls("CreateBridgePort"); again != made {
		s.Errorf("a Port that is there was made again: %d calls, then %d", made, again)
	}

	s.deprovision(vf(0))
	s.provision(r)
	s.deprovision(vf(0))
	s.empty()
}

// keepsUnknown checks that a Port whose owner the agent does not report is not taken as released.
func (s *suite) keepsUnknown() {
	r := reservation(vf(0), Blue)
	s.provision(r)
	s.agent.Set(func(b *opitest.Behaviour) { b.Untold = true })
	release := func(ctx context.Context) error { return s.tryRelease(ctx, vf(0)) }
	s.refuses(release, vf(0).ID.String(), "does not tell", "delete the port of this id")
	if len(s.agent.Ports()) != 1 {
		s.Errorf("the agent has %q, want the Port", s.agent.Ports())
	}

	s.agent.Set(func(b *opitest.Behaviour) { b.Untold = false })
	s.deprovision(vf(0))
	s.empty()
}

func (s *suite) provisionsSubfunction() {
	f := function.Function{ID: function.SubfunctionID(PF, 88), Kind: function.SF, PF: PF, Index: 88}
	s.provision(reservation(f, Blue))
	s.deprovision(f)
	s.empty()
}

func (s *suite) changesNetwork() {
	s.provision(reservation(vf(0), Blue))
	s.provision(reservation(vf(0), Green))
	s.deprovision(vf(0))
	s.empty()
}

func (s *suite) changesMAC() {
	r := reservation(vf(0), Blue)
	s.provision(r)
	r.Port = &journal.Port{DevicePool: Pool, Network: Blue, MAC: "02:00:00:00:00:01"}
	s.provision(r)
	s.deprovision(vf(0))
	s.empty()
}

func (s *suite) changesPod() {
	r := reservation(vf(0), Blue)
	s.provision(r) // as Allocate does, which does not know the pod
	r.Pod = journal.Pod{Namespace: "default", Name: "web", UID: "web-1"}
	s.provision(r)
	r.Pod.UID = "web-2"
	s.provision(r)
	s.deprovision(vf(0))
	s.empty()
}

func (s *suite) waits() {
	const delay = 300 * time.Millisecond
	s.agent.Set(func(b *opitest.Behaviour) { b.UpDelay, b.DeleteTail = delay, delay })
	begin := time.Now()
	s.provision(reservation(vf(0), Blue))
	if took := time.Since(begin); took < delay {
		s.Errorf("Provision returned after %s, before the Port was up", took)
	}

	s.deprovision(vf(0))
	s.empty()
}

func (s *suite) survivesLostAnswers() {
	for _, rpc := range []string{"CreateLogicalBridge", "CreateBridgePort", "DeleteBridgePort"} {
		s.agent.DropNext(rpc, 1)
		s.agent.FailNext(rpc, 1, codes.Unavailable, "connection lost")
	}
	s.provision(reservation(vf(0), Blue))
	s.deprovision(vf(0))
	s.empty()
}

func (s *suite) isRefused() {
	s.agent.Set(func(b *opitest.Behaviour) {
		b.Realise = func(string) error { return errors.New("no such representor") }
	})
	s.refuses(s.tries(reservation(vf(0), Blue)), vf(0).ID.String(), Blue,
		XPU, "no such representor")
	s.deprovision(vf(0))
	s.empty()
}

func (s *suite) isTakenAfterAll() {
	s.agent.FailNext("CreateBridgePort", 3, codes.Internal, "not now")
	s.provision(reservation(vf(0), Blue))
}

func (s *suite) missesNetwork() {
	s.refuses(s.tries(reservation(vf(0), "nowhere")), vf(0).ID.String(), "nowhere",
		"name another one")
	s.deprovision(vf(0))
}

func (s *suite) missesXPU() {
	f := vf(0)
	f.PF = "0000:5e:00.0"
	s.refuses(s.tries(reservation(f, Blue)), f.ID.String(), "PF 0000:5e:00.0", "add ")
	if message := s.tested.Away(f); message != "" {
		s.Errorf("Away = %q of a Function that has no xPU", message)
	}
	s.deprovision(f)
}

// remindsAgent checks that the agent gets all Ports again that it forgot, without a call, but no
// Port that was released.
func (s *suite) remindsAgent() {
	kept, gone := reservation(vf(0), Blue), reservation(vf(1), Green)
	s.provision(kept)
	s.provision(gone)
	s.deprovision(vf(1))

	for range 2 {
		s.agent.Stop()
		must.Succeed(s, s.agent.Run())
		must.Eventually(s, "the Port is back", func() bool { return s.differs(kept) == "" })
	}

	if ports := s.agent.Ports(); len(ports) != 1 {
		s.Errorf("the agent has %q, want the one that was not given back", ports)
	}
}

func (s *suite) isAway() {
	s.provision(reservation(vf(0), Blue))
	s.agent.Stop()

	must.Eventually(s, "it is known that the xPU is away", func() bool {
		message := s.tested.Away(vf(0))
		return strings.Contains(message, XPU) &&
			strings.Contains(message, s.agent.Config().Endpoint)
	})

	must.Succeed(s, s.agent.Run())
	must.Eventually(s, "it is known that the xPU is back", func() bool {
		return s.tested.Away(vf(0)) == ""
	})
}

func (s *suite) waitsForAgent() {
	s.agent.Stop()
	r := reservation(vf(0), Blue)
	s.refuses(s.tries(r), vf(0).ID.String(), Blue, XPU)
	done := make(chan error, 1)
	go func() { done <- s.tries(r)(s.ctx) }()
	must.Succeed(s, s.agent.Run())
	must.Succeed(s, <-done)
	s.serves(r)
}

func (s *suite) deprovisionsLater() {
	s.agent.Set(func(b *opitest.Behaviour) { b.KeepOnStop = true })
	s.provision(reservation(vf(0), Blue))
	s.agent.Stop()
	s.refuses(func(ctx context.Context) error {
		return s.tryRelease(ctx, vf(0))
	}, vf(0).ID.String(), XPU)
	done := make(chan error, 1)
	go func() { done <- s.tryRelease(s.ctx, vf(0)) }()
	must.Succeed(s, s.agent.Run())
	must.Succeed(s, <-done)
	s.empty()
}

func (s *suite) deprovisionsNothing() {
	s.deprovision(vf(0))
	s.provision(reservation(vf(0), Blue))
	s.deprovision(vf(0))
	s.deprovision(vf(0))
	s.empty()
}

func (s *suite) manages() {
	const functions = 64
	s.agent.Set(func(b *opitest.Behaviour) {
		b.UpDelay, b.DeleteTail, b.Latency = 20*time.Millisecond, 20*time.Millisecond, time.Millisecond
	})
	networks := []string{Blue, Green}
	var provisioning errgroup.Group
	for n := range functions {
		provisioning.Go(func() error { return s.tries(reservation(vf(n), networks[n%2]))(s.ctx) })
	}

	must.Succeed(s, provisioning.Wait())
	for n := range functions {
		s.serves(reservation(vf(n), networks[n%2]))
	}

	if made := s.agent.Networks(); !slices.Contains(made, opitest.Installation.NetworkID(Blue)) ||
		!slices.Contains(made, opitest.Installation.NetworkID(Green)) {
		s.Errorf("the agent has networks %q", made)
	}

	var releasing errgroup.Group
	for n := range functions {
		releasing.Go(func() error { return s.tryRelease(s.ctx, vf(n)) })
	}

	must.Succeed(s, releasing.Wait())
	s.empty()
}
