// SPDX-License-Identifier: Apache-2.0

package cases_test

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/cases"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// interfaces are the interfaces at a fake agent.
type interfaces struct {
	mu   sync.Mutex
	have map[string]bool
}

func (i *interfaces) set(id string, have bool) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.have[id] = have
	return nil
}

func (i *interfaces) find(id string) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.have[id] {
		return errors.New("no netdev " + id)
	}
	return nil
}

// against runs the cases of a profile against a fake agent.
func against(
	t *testing.T, agent *opitest.Agent, profile conformance.Profile,
) *conformance.Report {
	t.Helper()
	endpoint, err := conformance.ParseEndpoint(agent.Config().Endpoint)
	must.Succeed(t, err)
	netdevs := &interfaces{have: map[string]bool{}}
	agent.Set(func(b *opitest.Behaviour) { b.Realise = netdevs.find })

	runner, err := conformance.NewRunner(conformance.Config{
		Endpoint: endpoint,
		Hooks: conformance.Hooks{
			MakePort: func(_ context.Context, p conformance.Port) error {
				return netdevs.set(p.ID, true)
			},
			RemovePort: func(_ context.Context, p conformance.Port) error {
				return netdevs.set(p.ID, false)
			},
			Restart: func(_ context.Context, how conformance.Ending) error {
				if how == conformance.Killed {
					agent.Kill()
				} else {
					agent.Stop()
				}
				return agent.Run()
			},
		},
		Prefix: conformance.NewPrefix(),
		VLANs:  conformance.Range{First: 100, Last: 299}, VNIs: conformance.Range{First: 1, Last: 99},
		Settle: time.Second, CallTimeout: 5 * time.Second, Limit: time.Minute, Scale: 8,
	}, conformance.NewKinds())
	must.Succeed(t, err)
	t.Cleanup(func() { _ = runner.Close() })

	selected := slices.DeleteFunc(cases.All(runner.Kinds), func(c conformance.Case) bool {
		return c.Profile != profile ||
			c.Kind == runner.Kinds.Vrf || c.Kind == runner.Kinds.Svi
	})
	report, err := runner.Run(t.Context(), selected)
	must.Succeed(t, err)
	return report
}

// failed returns the names of the cases that failed, without those of updates of logical bridges,
// which the fake agent does not serve.
func failed(t *testing.T, report *conformance.Report) (names []string) {
	t.Helper()
	for _, r := range report.Results() {
		switch r.Outcome {
		case conformance.Failed:
			names = append(names, r.Case.ID())
			fallthrough
		case conformance.Blocked, conformance.Deviates, conformance.NotRun:
			t.Logf("%s: %s: %s", r.Case.ID(), r.Outcome, r.Text)
		}
	}
	slices.Sort(names)
	return names
}

// fakes are fake agents with the cases that must fail there, and no others.
var fakes = []struct {
	name    string
	profile conformance.Profile
	set     func(*opitest.Behaviour)
	fails   string // without the profile, separated by blanks; LB is logical-bridge, BP bridge-port
}{
	{
		name: "opi-evpn-bridge", profile: conformance.L2Core,
		set:   func(*opitest.Behaviour) {},
		fails: `LB/create-again-of-another-is-refused ` + reference + phantoms + deafToNetdevs,
	},
	{
		name: "opi-evpn-bridge v0.2.0", profile: conformance.L2Core,
		set: func(b *opitest.Behaviour) { b.V02 = true },
		fails: `LB/create-again-of-another-is-refused LB/with-a-port-is-not-deleted
			BP/get-answers-what-was-made BP/create-without-id-makes-one
			BP/update-of-a-missing-one-allowed BP/update-of-a-missing-one-ignores-the-mask
			BP/is-in-the-logical-bridge-that-it-moved-to ` + reference,
	},
	{
		name: "Get and List leave fields out", profile: conformance.L2Core,
		set: func(b *opitest.Behaviour) { b.Untold = true },
		fails: `LB/create-again-of-another-is-refused BP/create-answers-the-object
			BP/get-answers-what-was-made BP/update-answers-the-object
			BP/update-of-the-same-changes-nothing BP/update-of-a-missing-one-allowed
			BP/update-of-a-missing-one-ignores-the-mask BP/made-again-after-delete
			BP/refused-create-leaves-the-id-free BP/may-have-the-id-of-a-logical-bridge ` +
			reference + phantoms + deafToNetdevs,
	},
	{
		name: "the inventory ends the process", profile: conformance.Inventory,
		set: func(*opitest.Behaviour) {}, fails: "inventory/get-answers",
	},
	{
		name: "the inventory of opi-bridge", profile: conformance.Inventory,
		set: func(b *opitest.Behaviour) { b.HostPFs = []string{"host-pf c1pf0"} },
	},
	{
		name: "a VNI without a VTEP ends the process", profile: conformance.L2Overlay,
		set: func(b *opitest.Behaviour) { b.V02 = true }, fails: "LB/vtep-may-be-absent",
	},
	{
		name: "VXLAN is not looked at", profile: conformance.L2Overlay,
		set: func(*opitest.Behaviour) {},
		fails: `LB/vni-of-25-bits-is-refused LB/vtep-of-5-bytes-is-refused
			LB/vtep-length-of-129-is-refused LB/vtep-length-negative-is-refused`,
	},
	{
		name: "Create and Delete only", profile: conformance.Blind,
		set: func(b *opitest.Behaviour) {
			b.Unimplemented = []string{"GetBridgePort", "ListBridgePorts", "UpdateBridgePort"}
		},
	},
	{
		name: "Get answers nothing", profile: conformance.Blind,
		set: func(b *opitest.Behaviour) { b.Blind = true },
	},
	{
		name: "everything is lost with the process", profile: conformance.Recovery,
		set:   func(*opitest.Behaviour) {},
		fails: lost("term") + lost("kill"),
	},
	{
		name: "everything is lost by a kill", profile: conformance.Recovery,
		set:   func(b *opitest.Behaviour) { b.KeepOnStop = true },
		fails: lost("kill") + " BP/without-its-interface-is-not-up-after-term",
	},
	{
		name: "lists are lost with the process", profile: conformance.Recovery,
		set: func(b *opitest.Behaviour) { b.V02 = true },
		fails: `LB/is-listed-after-term LB/is-made-once-after-term BP/is-listed-after-term
			BP/is-made-once-after-term LB/is-listed-after-kill LB/is-made-once-after-kill
			BP/is-listed-after-kill BP/is-made-once-after-kill`,
	},
}

// reference are faults of opi-evpn-bridge in all versions.
const reference = `
	LB/vlan-id-4095-is-refused
	BP/create-again-of-another-is-refused
	BP/update-with-mask-leaves-other-fields BP/update-with-mask-star
	BP/update-without-mask-keeps-absent-fields
	BP/mac-address-of-5-bytes-is-refused BP/mac-address-of-8-bytes-is-refused
	BP/mac-address-as-text-is-refused BP/mac-address-multicast-is-refused
	BP/mac-address-broadcast-is-refused BP/ptype-unknown-is-refused
	BP/update-to-a-missing-logical-bridge-is-refused
	BP/update-to-a-wrong-mac-address-is-refused
`

// phantoms are faults of an agent whose Update does not move the references of a port.
const phantoms = `
	BP/leaves-its-logical-bridge-when-it-moves BP/is-in-the-logical-bridge-that-it-moved-to
`

// deafToNetdevs are faults of an agent that configures a port once.
const deafToNetdevs = " BP/goes-down-with-its-interface"

// lost are the cases that fail where an end of the process loses all objects.
func lost(how string) string {
	return strings.ReplaceAll(`
		LB/is-there-after-HOW LB/is-listed-after-HOW LB/is-up-after-HOW
		LB/can-be-deleted-after-HOW
		BP/is-there-after-HOW BP/is-listed-after-HOW BP/is-up-after-HOW
		BP/is-made-once-after-HOW BP/can-be-deleted-after-HOW BP/update-is-kept-after-HOW
	`, "HOW", how)
}

// TestFakes checks that the kit finds exactly the faults that fake agents have.
func TestFakes(t *testing.T) {
	for _, test := range fakes {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			agent := opitest.Start(t)
			agent.Set(test.set)

			long := strings.NewReplacer("LB/", "logical-bridge/", "BP/", "bridge-port/")
			var want []string
			for _, name := range strings.Fields(test.fails) {
				want = append(want, string(test.profile)+"/"+long.Replace(name))
			}
			slices.Sort(want)

			if diff := cmp.Diff(want, failed(t, against(t, agent, test.profile))); diff != "" {
				t.Errorf("failed (-want +got):\n%s", diff)
			}
		})
	}
}

// TestNames checks that names are unique and of one form, and that each case says all that a report
// needs.
func TestNames(t *testing.T) {
	form := regexp.MustCompile(`^[A-Z0-9-]+/[a-z-]+/[a-z0-9.-]+$`)
	seen := map[string]bool{}
	for _, c := range cases.All(conformance.NewKinds()) {
		if !form.MatchString(c.ID()) || seen[c.ID()] {
			t.Errorf("%s: is not of the form, or there are two", c.ID())
		}
		seen[c.ID()] = true
		if c.Source == "" || c.Says == "" || c.Violation == "" || c.Run == nil ||
			strings.ContainsAny(c.Says+c.Violation, "{}") && !strings.Contains(c.Says, "{id}") {
			t.Errorf("%s: lacks its source, sentence or violation: %+v", c.ID(), c)
		}
	}
	if len(seen) < 150 {
		t.Errorf("there are %d cases, want at least 150", len(seen))
	}
}
