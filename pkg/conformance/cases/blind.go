// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

// blind are cases for agents that serve Create and Delete of ports alone. Such agents read the name
// of a port in place of its id, so both are sent; others must ignore the name.
func blind(kinds conformance.Kinds) []Case {
	k := kinds.BridgePort
	// sample returns an id, and a message with that id as its name.
	sample := func(t *T) (string, conformance.Message) {
		id, spec := t.Sample(k)
		return id, k.NewMessage(id, spec)
	}
	nameOf := func(got conformance.Message, id string) string {
		if got.GetName() == "" {
			return id
		}
		return got.GetName()
	}
	made := func(t *T) (id string, m conformance.Message, name string) {
		id, m = sample(t)
		t.Prepare(func() {
			got, err := t.CreateMessage(k, id, m)
			t.WantOK("Create", err)
			name = nameOf(got, id)
		})
		return id, m, name
	}
	const waits = "A pod waits for ever because an answer was lost."

	return about(conformance.Blind, k, []Case{
		{
			Name: "create", Says: "Create a Bridge Port",
			Violation: "No pod gets its port.",
			Run: func(t *T) {
				id, m := sample(t)
				_, err := t.CreateMessage(k, id, m)
				t.WantOK("Create", err)
			},
		},
		{
			Name: "create-again", Source: "AIP-133", Says: duplicate, Violation: waits,
			Run: func(t *T) {
				id, m, _ := made(t)
				_, err := t.CreateMessage(k, id, m)
				t.WantCode("Create of the same again", err, codes.OK, codes.AlreadyExists)
			},
		},
		{
			Name: "delete", Says: "Delete a Bridge Port",
			Violation: "A pod's Function is never free again.",
			Run: func(t *T) {
				_, _, name := made(t)
				t.WantOK("Delete", t.Delete(k, name, false))
			},
		},
		{
			Name: "delete-again", Says: "If set to true, and the resource is not found, the " +
				"request will succeed but no action will be taken on the server",
			Violation: "A pod's Function is never free again because an answer was lost.",
			Run: func(t *T) {
				_, _, name := made(t)
				t.Prepare(func() { t.WantOK("Delete", t.Delete(k, name, false)) })
				t.WantOK("Delete again, with allow_missing", t.Delete(k, name, true))
			},
		},
		{
			Name: "delete-of-what-never-was", Says: "If set to true, and the resource is not " +
				"found, the request will succeed but no action will be taken on the server",
			Violation: "A pod that never got its port never ends.",
			Run: func(t *T) {
				id, _, name := made(t)
				none := name[:len(name)-len(id)] + t.NewID(k)
				t.WantOK("Delete of what never was, with allow_missing", t.Delete(k, none, true))
			},
		},
		{
			Name: "made-again-after-delete", Says: "Create a Bridge Port",
			Violation: "A Function serves one pod and never another.",
			Run: func(t *T) {
				id, m, name := made(t)
				t.Prepare(func() {
					t.WantOK("Delete", t.Delete(k, name, false))
					// Where nothing can be read, OK has to mean that it is gone.
					if _, err := t.GetRaw(k, name); status.Code(err) != codes.Unimplemented {
						t.WantGone(k, name)
					}
				})
				_, err := t.CreateMessage(k, id, m)
				t.WantOK("Create after Delete", err)
			},
		},
		{
			Name: "spec-missing-is-refused", Source: "AIP-203", Says: required,
			Violation: "A pod starts whose port is in no network.",
			Run: func(t *T) {
				id := t.NewID(k)
				_, err := t.CreateMessage(k, id, k.NewMessage(id, nil))
				t.WantRefused("Create without a spec", err)
			},
		},
		{
			Name: "mac-address-missing-is-refused", Source: "AIP-203", Says: required,
			Violation: "A pod starts whose address the xPU does not know.",
			Run: func(t *T) {
				id, m := sample(t)
				spec := proto.Clone(conformance.SpecOf(m))
				spec.ProtoReflect().Clear(spec.ProtoReflect().Descriptor().Fields().ByNumber(1))
				_, err := t.CreateMessage(k, id, k.NewMessage(id, spec))
				t.WantRefused("Create without a MAC address", err)
			},
		},
	})
}
