// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"path"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

// crudUpdate are the cases about Update.
func crudUpdate() []generic {
	return slices.Concat(updates(), updatesByMask(), updatesWithoutEffect(), updatesOfMissing())
}

// updates are cases about an Update without a mask.
func updates() []generic {
	return []generic{
		{
			name: "update-changes", source: "AIP-121", says: strongUpdate,
			violation: "A pod keeps the {kind} of before, and its controller believes otherwise.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				_, err := t.Update(k, updated(o, other), nil, false)
				t.WantOK("Update", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: other})
			},
		},
		{
			name: "update-answers-the-object", source: "AIP-134",
			says: "The response message must be the resource itself, and must include any fields " +
				"that were sent.",
			violation: "A controller that reads its {kind} from the answer takes it for another one.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				got, err := t.Update(k, updated(o, other), nil, false)
				t.WantOK("Update", err)
				t.WantSpec("the answer", got, other)
				if got.GetName() != o.Name {
					t.Failf("the answer has the name %q, want %q", got.GetName(), o.Name)
				}
			},
		},
		{
			name: "update-comes-up", says: "{kind} is up.",
			violation: "A pod has no traffic after its {kind} was changed.",
			run: func(t *T, k *Kind) {
				o := t.HaveUp(k)
				other, _ := t.Vary(o.Spec)
				_, err := t.Update(k, updated(o, other), nil, false)
				t.WantOK("Update", err)
				t.WantUp(k, o.Name)
			},
		},
		{
			name: "update-can-be-deleted", source: "AIP-121", says: strongDelete,
			violation: "After a change, a pod's Function is never free again.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				_, err := t.Update(k, updated(o, other), nil, false)
				t.WantOK("Update", err)
				t.WantOK("Delete after Update", t.Delete(k, o.Name, false))
				t.WantGone(k, o.Name)
			},
		},
		{
			name: "update-of-the-same-changes-nothing", source: "AIP-134",
			says: "If the method call is on a resource that already exists, and all fields match, the " +
				"existing resource is returned unchanged.",
			violation: "A controller that repeats itself interrupts pods.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				got, err := t.Update(k, updated(o, o.Spec), nil, false)
				t.WantOK("Update with the same", err)
				t.WantSpec("the answer", got, o.Spec)
				t.WantAsMade(o)
			},
		},
	}
}

// updatesByMask are cases about the fields that an Update changes.
func updatesByMask() []generic {
	return []generic{
		{
			name: "update-with-mask-changes-the-field", source: "AIP-134",
			says:      "Only fields declared in the field mask are updated.",
			violation: "A change that a client asks for by a mask is lost.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, field := t.Vary(o.Spec)
				_, err := t.Update(k, updated(o, other), []string{field}, false)
				t.WantOK("Update with mask "+field, err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: other})
			},
		},
		{
			name: "update-with-mask-leaves-other-fields", source: "AIP-134",
			says: "Only fields declared in the field mask are updated.",
			violation: "A client that changes one field undoes what another client changed, and a pod " +
				"loses its network.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				mask := t.Untouched(k)
				_, err := t.Update(k, updated(o, other), []string{mask}, false)
				t.WantOK("Update with mask "+mask, err)
				t.WantAsMade(o)
			},
		},
		{
			name: "update-with-mask-spec", source: "AIP-161",
			says: "A user must be able to specify either a field as a whole, or one of its " +
				"subfields.",
			violation: "A client that replaces the whole spec by a mask changes nothing.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				_, err := t.Update(k, updated(o, other), []string{"spec"}, false)
				t.WantOK("Update with mask spec", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: other})
			},
		},
		{
			name: "update-with-mask-star", source: "AIP-134",
			says:      "Update masks must support a special value *, meaning full replacement.",
			violation: "A client that replaces all of a {kind} fails.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				_, err := t.Update(k, updated(o, other), []string{"*"}, false)
				t.WantOK("Update with mask *", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: other})
			},
		},
		{
			name: "update-without-mask-keeps-absent-fields", source: "AIP-134",
			says: "The service must treat an omitted field mask as an implied field mask equivalent " +
				"to all fields that are populated (have a non-empty value).",
			violation: "A client that does not know of a field removes it, and a pod loses its network.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				part, path := t.Vary(o.Spec)
				want := proto.Clone(part)
				keepOnly(part, path)
				_, err := t.Update(k, updated(o, part), nil, false)
				t.WantOK("Update with one field and no mask", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: want})
			},
		},
		{
			name: "update-with-an-unknown-field-in-the-mask", source: "AIP-161",
			level: conformance.Should,
			says: "When writing data, field masks should return an INVALID_ARGUMENT error if an entry " +
				"points to a value that can not exist.",
			violation: "A client whose field is not known believes that it was changed.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				_, err := t.Update(k, updated(o, o.Spec), []string{"spec.no_such_field"}, false)
				t.WantCode("Update with mask spec.no_such_field", err, codes.InvalidArgument)
			},
		},
	}
}

// updatesWithoutEffect are cases about an Update that is refused, and about a status, which only the
// agent sets.
func updatesWithoutEffect() []generic {
	return []generic{
		{
			name: "refused-update-changes-nothing", source: "AIP-193",
			says: "Services must return a google.rpc.Status message when an API error occurs.",
			violation: "A change that was refused is made in part, and a pod is in no network or in " +
				"the wrong one.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, field := t.Vary(o.Spec)
				mask := []string{field, "spec.no_such_field"}
				_, err := t.Update(k, updated(o, other), mask, false)
				if err == nil {
					t.Skipf("the agent takes masks with unknown fields")
				}
				t.WantAsMade(o)
			},
		},
		{
			name: "update-ignores-status-in-the-mask", source: "AIP-203",
			says:      "Services must ignore the presence of output only fields in update field masks.",
			violation: "A client that sends back what it read, with a mask of all fields, fails.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, field := t.Vary(o.Spec)
				m := updated(o, other)
				k.SetStatus(m, conformance.Deleting, forged())
				got, err := t.Update(k, m, []string{field, "status"}, false)
				t.WantOK("Update with status in the mask", err)
				wantNotForged(t, got)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: other})
			},
		},
		{
			name: "update-ignores-the-status", source: "AIP-134",
			says:      "State fields must not be directly writable by update methods.",
			violation: "A client can make a {kind} look up that is not, and pods start without it.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				m := updated(o, o.Spec)
				k.SetStatus(m, conformance.Deleting, forged())
				got, err := t.Update(k, m, nil, false)
				t.WantOK("Update with a status in the object", err)
				wantNotForged(t, got)
			},
		},
	}
}

// updatesOfMissing are cases about an Update of an object that does not exist.
func updatesOfMissing() []generic {
	return []generic{
		{
			name: "update-of-a-missing-one", source: "AIP-134",
			says: "If the requested resource does not exist, the service must error with NOT_FOUND " +
				"unless allow_missing is set to true.",
			violation: "A controller makes a {kind} again that was deleted on purpose.",
			run: func(t *T, k *Kind) {
				name := missing(t, k)
				_, spec := t.Sample(k)
				_, err := t.Update(k, k.NewMessage(name, spec), nil, false)
				t.WantCode("Update", err, codes.NotFound)
				_, err = t.Get(k, name)
				t.WantCode("Get after that Update", err, codes.NotFound)
			},
		},
		{
			name:      "update-of-a-missing-one-allowed",
			says:      "If set to true, and the object is not found, a new object will be created.",
			violation: "Clients that make and change by one call make no {kind}.",
			run: func(t *T, k *Kind) {
				name, spec := missing(t, k), specForMissing(t, k)
				updateToCreate(t, k, name, spec, nil)
			},
		},
		{
			name: "update-of-a-missing-one-ignores-the-mask",
			says: "If set to true, and the object is not found, a new object will be created. In this " +
				"situation, `update_mask` is ignored.",
			violation: "Clients that make and change by one call make half of a {kind}.",
			run: func(t *T, k *Kind) {
				name, spec := missing(t, k), specForMissing(t, k)
				updateToCreate(t, k, name, spec, []string{t.Untouched(k)})
			},
		},
		{
			name: "update-without-a-name", source: "AIP-203", says: required,
			violation: "A client that forgets the name changes some {kind} or makes one.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				_, err := t.Update(k, k.NewMessage("", o.Spec), nil, false)
				t.WantRefused("Update without a name", err)
			},
		},
	}
}

// specForMissing returns a spec for an object that an Update is to make.
func specForMissing(t *T, k *Kind) proto.Message {
	_, spec := t.Sample(k)
	return spec
}

// updateToCreate makes an object by an Update, and ends the case unless that holds.
func updateToCreate(t *T, k *Kind, name string, spec proto.Message, mask []string) {
	t.Expect(k, path.Base(name))
	got, err := t.Update(k, k.NewMessage(name, spec), mask, true)
	t.WantOK("Update with allow_missing", err)
	t.WantSpec("the answer", got, spec)
	t.WantAsMade(conformance.Object{Kind: k, Name: got.GetName(), Spec: spec})
}

// keepOnly clears all fields of a spec but the one with this path.
func keepOnly(spec proto.Message, field string) {
	r := spec.ProtoReflect()
	for i := range r.Descriptor().Fields().Len() {
		f := r.Descriptor().Fields().Get(i)
		if "spec."+string(f.Name()) != field {
			r.Clear(f)
		}
	}
}
