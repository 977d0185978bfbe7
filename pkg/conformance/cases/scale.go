// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

func scale(kinds conformance.Kinds) (all []Case) {
	for _, k := range kinds.All() {
		all = append(all, of(conformance.Scale, k, atOnce())...)
	}
	return all
}

// many are samples of a kind.
type many struct {
	ids   []string
	specs []proto.Message
}

func samples(t *T, k *Kind) (m many) {
	for range t.Config().Scale {
		if k == t.Kinds.BridgePort && len(m.ids) > 0 {
			// All ports are in one logical bridge.
			port := t.Port()
			network := bridgesOf(conformance.Object{Spec: m.specs[0]})[0]
			m.ids = append(m.ids, port.ID)
			m.specs = append(m.specs, conformance.Access(port.MAC, network))
			continue
		}
		id, spec := t.Sample(k)
		m.ids, m.specs = append(m.ids, id), append(m.specs, spec)
	}
	return m
}

// makeAll makes all samples at once and returns their names.
func makeAll(t *T, k *Kind, m many) []string {
	names := make([]string, len(m.ids))
	errs := t.Go(len(m.ids), func(i int) error {
		got, err := t.CreateRaw(k, m.ids[i], k.NewMessage("", m.specs[i]))
		if err == nil {
			names[i] = got.GetName()
		}
		return err
	})
	for i, err := range errs {
		t.WantOK("Create of "+m.ids[i], err)
	}
	return names
}

// atOnce are the cases about many objects and many calls at once.
func atOnce() []generic {
	const strong = "The completion of those operations must mean that the state of the resource's " +
		"existence and all user-settable values have reached a steady-state."
	return []generic{
		{
			name: "many-are-made-at-once", source: "AIP-121", says: strong,
			violation: "When a node starts, its pods' {kind}s fail.",
			run: func(t *T, k *Kind) {
				m := samples(t, k)
				names := makeAll(t, k, m)
				for i, name := range names {
					t.WantAsMade(conformance.Object{Kind: k, Name: name, Spec: m.specs[i]})
				}
			},
		},
		{
			name: "many-come-up", says: "{kind} is up.",
			violation: "When a node starts, some of its pods wait for ever.",
			run: func(t *T, k *Kind) {
				if k == t.Kinds.BridgePort {
					t.NeedInterfaces()
				}
				for _, name := range makeAll(t, k, samples(t, k)) {
					t.WantUp(k, name)
				}
			},
		},
		{
			name: "many-are-listed", source: "AIP-158",
			says: "If the end of the collection has not been reached, the API must provide a " +
				"next_page_token.",
			violation: "A controller takes a {kind} for gone because there are many.",
			run: func(t *T, k *Kind) {
				names := makeAll(t, k, samples(t, k))
				wantPages(t, k, names, 0)
				wantPages(t, k, names, 7)
			},
		},
		{
			name: "many-are-deleted-at-once", source: "AIP-121", says: strongDelete,
			violation: "When a node is drained, Functions of its pods are never free again.",
			run: func(t *T, k *Kind) {
				names := makeAll(t, k, samples(t, k))
				for _, err := range t.Go(len(names), func(i int) error {
					return t.DeleteRaw(k, names[i], false)
				}) {
					t.WantOK("Delete", err)
				}
				for _, name := range names {
					t.WantGone(k, name)
				}
			},
		},
		{
			name: "one-is-made-by-many-at-once", source: "AIP-133", says: duplicate,
			violation: "Two controllers, of which one is about to end, make two of a {kind}.",
			run: func(t *T, k *Kind) {
				id, spec := t.Sample(k)
				for _, err := range t.Go(8, func(int) error {
					_, err := t.CreateRaw(k, id, k.NewMessage("", spec))
					return err
				}) {
					if c := status.Code(err); c != codes.AlreadyExists && c != codes.Aborted {
						t.WantOK("Create of the same at once", err)
					}
				}
				wantOnce(t, conformance.Object{Kind: k, ID: id})
			},
		},
		{
			name: "one-is-deleted-by-many-at-once",
			says: "If set to true, and the resource is not found, the request will succeed but no " +
				"action will be taken on the server.",
			violation: "Two controllers, of which one is about to end, fail for ever.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				for _, err := range t.Go(8, func(int) error {
					return t.DeleteRaw(k, o.Name, true)
				}) {
					if status.Code(err) != codes.Aborted {
						t.WantOK("Delete at once, with allow_missing", err)
					}
				}
				t.WantGone(k, o.Name)
			},
		},
		{
			name: "reads-are-answered-at-once", source: "AIP-131",
			says:      "The purpose of the get method is to return data from a single resource.",
			violation: "Pods wait because somebody looks at the agent.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				for _, err := range t.Go(64, func(int) error {
					got, err := t.GetRaw(k, o.Name)
					if err == nil && got.GetName() != o.Name {
						return status.Errorf(codes.DataLoss, "Get answers %q", got.GetName())
					}
					return err
				}) {
					t.WantOK("Get, 64 at once", err)
				}
			},
		},
	}
}
