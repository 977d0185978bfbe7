// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

func recovery(kinds conformance.Kinds) (all []Case) {
	for _, how := range []conformance.Ending{conformance.Terminated, conformance.Killed} {
		for _, k := range kinds.All() {
			all = append(all, of(conformance.Recovery, k, afterRestart(how))...)
		}
		all = append(all, about(conformance.Recovery, kinds.BridgePort,
			interfacesAtRestart(kinds.BridgePort, how))...)
		all = append(all, about(conformance.Recovery, kinds.BridgePort,
			packetsAfterRestart(how))...)
	}
	return all
}

// afterRestart are the cases about an agent that has ended in one way and was started again.
func afterRestart(how conformance.Ending) []generic {
	suffix := "-after-" + strings.ToLower(string(how))
	when := fmt.Sprintf(" (The agent's process got SIG%s.)", how)
	restarted := func(t *T) { t.Restart(how) }
	needs := func(t *T) {
		if t.Config().Hooks.Restart == nil {
			t.Skipf("needs --restart-agent")
		}
	}

	return []generic{
		{
			name: "is-there" + suffix, source: "AIP-121", says: strongCreate + when,
			violation: "Pods that run lose their {kind} when the agent is updated or crashes.",
			run: func(t *T, k *Kind) {
				needs(t)
				o := t.Have(k)
				restarted(t)
				t.WantAsMade(o)
			},
		},
		{
			name: "is-listed" + suffix, source: "AIP-132", says: "The purpose of the List method " +
				"is to return data from a finite collection." + when,
			violation: "What a dead controller left is never found.",
			run: func(t *T, k *Kind) {
				needs(t)
				o := t.Have(k)
				restarted(t)
				if t.Listed(k, o.Name) == nil {
					t.Failf("after the restart the list lacks %s", o.Name)
				}
			},
		},
		{
			name: "is-up" + suffix, says: "{kind} is up." + when,
			violation: "Pods that run lose their traffic when the agent is updated or crashes.",
			run: func(t *T, k *Kind) {
				needs(t)
				o := t.HaveUp(k)
				restarted(t)
				t.WantUp(k, o.Name)
			},
		},
		{
			name: "is-made-once" + suffix, source: "AIP-133", says: duplicate + when,
			violation: "A controller that repeats a call whose answer was lost with the agent " +
				"makes a second {kind}, or none.",
			run: func(t *T, k *Kind) {
				needs(t)
				o := t.Have(k)
				restarted(t)
				_, err := t.Create(k, o.ID, o.Spec)
				t.WantCode("Create of the same again", err, codes.OK, codes.AlreadyExists)
				wantOnce(t, o)
			},
		},
		{
			name: "can-be-deleted" + suffix, source: "AIP-121", says: strongDelete + when,
			violation: "A {kind} that was made before the agent's last start stays for ever.",
			run: func(t *T, k *Kind) {
				needs(t)
				o := t.Have(k)
				restarted(t)
				t.WantOK("Delete", t.Delete(k, o.Name, false))
				t.WantGone(k, o.Name)
			},
		},
		{
			name: "deleted-stays-gone" + suffix, source: "AIP-121", says: strongDelete + when,
			violation: "A pod's {kind} is back after the pod, and with it its VLAN or address.",
			run: func(t *T, k *Kind) {
				needs(t)
				name := deleted(t, k)
				restarted(t)
				_, err := t.Get(k, name)
				t.WantCode("Get of what was deleted before the restart", err, codes.NotFound)
			},
		},
		{
			name: "update-is-kept" + suffix, source: "AIP-121", says: strongUpdate + when,
			violation: "A change is undone when the agent is updated or crashes.",
			run: func(t *T, k *Kind) {
				needs(t)
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				t.Prepare(func() {
					_, err := t.Update(k, updated(o, other), nil, false)
					t.WantOK("Update", err)
				})
				restarted(t)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: other})
			},
		},
		{
			name: "new-ones-come-up" + suffix, says: "{kind} is up." + when,
			violation: "After the agent was updated or crashed, no pod starts.",
			run: func(t *T, k *Kind) {
				needs(t)
				if k == t.Kinds.BridgePort {
					t.NeedInterfaces()
				}
				t.Have(k)
				restarted(t)
				id, spec := t.Sample(k)
				got, err := t.Create(k, id, spec)
				t.WantOK("Create", err)
				t.WantUp(k, got.GetName())
			},
		},
	}
}

// interfacesAtRestart are cases about interfaces that change while the agent is away, as far as a
// run can tell: right before its end.
func interfacesAtRestart(k *Kind, how conformance.Ending) []Case {
	suffix := "-after-" + strings.ToLower(string(how))
	return []Case{
		{
			Name:      "without-its-interface-is-not-up" + suffix,
			Says:      "Bridge Port is down",
			Violation: "A pod whose Function is gone counts as healthy.",
			Run: func(t *T) {
				if t.Config().Hooks.Restart == nil {
					t.Skipf("needs --restart-agent")
				}
				o := t.HaveUp(k)
				t.RemoveInterface(portOf(o))
				t.Restart(how)
				t.WantNotUp(k, o.Name)
			},
		},
		{
			Name:      "comes-up-with-its-interface" + suffix,
			Says:      "Bridge Port is up",
			Violation: "A pod whose Function came while the agent was away waits for ever.",
			Run: func(t *T) {
				if t.Config().Hooks.Restart == nil {
					t.Skipf("needs --restart-agent")
				}
				o := t.HaveUp(k)
				t.RemoveInterface(portOf(o))
				t.Prepare(func() { t.WantNotUp(k, o.Name) })
				t.MakeInterface(portOf(o))
				t.Restart(how)
				t.WantUp(k, o.Name)
			},
		},
	}
}
