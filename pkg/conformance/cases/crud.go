// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"path"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

// Sentences that several cases come from.
const (
	strongCreate = "Following a successful create that is the latest mutation on a resource, a " +
		"get request for a resource must return the resource."
	strongUpdate = "Following a successful update that is the latest mutation on a resource, a " +
		"get request for a resource must return the final values from the update request."
	strongDelete = "Following a successful delete that is the latest mutation on a resource, a " +
		"get request for a resource must return NOT_FOUND."
	notSettable = "\"name\" is an opaque object handle that is not user settable."
	outputOnly  = "Including the field in a message in a request does nothing: the server must " +
		"clear out any value in this field, and must not throw an error."
	required = "The field must be present (and set to a non-empty value) on the request or " +
		"resource, and failure to do so must cause an error."
	duplicate = "If a user tries to create a resource with an ID that would result in a " +
		"duplicate resource name, the service must error with ALREADY_EXISTS."
	idForm = "This value should be 4-63 characters, and valid characters are /[a-z][0-9]-/."
)

// crudCreate are the cases about Create.
func crudCreate() []generic {
	return slices.Concat(creations(), comingUp(), creationsAgain(), creationsWithoutID())
}

// creations are cases about what Create answers.
func creations() []generic {
	return []generic{
		{
			name: "create-answers-the-object", source: "AIP-133",
			says: "The response message must be the resource itself, and must include any fields " +
				"that were provided.",
			violation: "A controller that reads its {kind} from the answer takes it for another one.",
			run: func(t *T, k *Kind) {
				id, spec := t.Sample(k)
				got, err := t.Create(k, id, spec)
				t.WantOK("Create", err)
				t.WantSpec("the answer", got, spec)
			},
		},
		{
			name: "create-answers-a-name", says: "\"name\" will be returned with created object.",
			violation: "No client can read, change or delete the {kind} that it made.",
			run: func(t *T, k *Kind) {
				id, spec := t.Sample(k)
				got, err := t.Create(k, id, spec)
				t.WantOK("Create", err)
				if got.GetName() == "" {
					t.Failf("the answer has no name")
				}
			},
		},
		{
			name: "create-id-ends-the-name",
			says: "The ID to use for the {kind}, which will become the final component of the " +
				"{kind}'s resource name.",
			violation: "After a restart a controller does not find its {kind}, and makes another one.",
			run: func(t *T, k *Kind) {
				id, spec := t.Sample(k)
				got, err := t.Create(k, id, spec)
				t.WantOK("Create", err)
				if path.Base(got.GetName()) != id {
					t.Failf("the name is %q, want one that ends with /%s", got.GetName(), id)
				}
			},
		},
		{
			name: "create-ignores-the-name", says: notSettable,
			violation: "The {kind} has a name that no other client computes from its id.",
			run: func(t *T, k *Kind) {
				id, spec := t.Sample(k)
				other := t.NewID(k)
				got, err := t.CreateMessage(k, id, k.NewMessage(k.Collection+other, spec))
				t.WantOK("Create with a name in the object", err)
				if path.Base(got.GetName()) != id {
					t.Failf("the name is %q, want one that ends with /%s", got.GetName(), id)
				}
			},
		},
		{
			name: "create-ignores-the-status", source: "AIP-203", says: outputOnly,
			violation: "A client can make a {kind} look up that is not, and pods start without it.",
			run: func(t *T, k *Kind) {
				id, spec := t.Sample(k)
				m := k.NewMessage("", spec)
				k.SetStatus(m, conformance.Deleting, forged())
				got, err := t.CreateMessage(k, id, m)
				t.WantOK("Create with a status in the object", err)
				wantNotForged(t, got)
				got, err = t.Get(k, got.GetName())
				t.WantOK("Get", err)
				wantNotForged(t, got)
			},
		},
	}
}

// comingUp are cases about the status of a new object.
func comingUp() []generic {
	return []generic{
		{
			name: "create-comes-up", says: "{kind} is up.",
			violation: "Pods wait for ever for a {kind} that does not come into service.",
			run: func(t *T, k *Kind) {
				if k == t.Kinds.BridgePort {
					t.NeedInterfaces()
				}
				o := t.Have(k)
				t.WantUp(k, o.Name)
			},
		},
		{
			name: "up-has-no-component-in-error", says: "component status is \"error\".",
			violation: "Who looks why a pod has no traffic sees an error that is none.",
			run: func(t *T, k *Kind) {
				o := t.HaveUp(k)
				got, err := t.Get(k, o.Name)
				t.WantOK("Get", err)
				for _, c := range conformance.ComponentsOf(got) {
					if c.GetStatus() == evpn.CompStatus_COMP_STATUS_ERROR &&
						conformance.StateOf(got) == conformance.Up {
						t.Failf("it is UP with component %s in error: %s", c.GetName(), c.GetDetails())
					}
				}
			},
		},
		{
			name: "status-is-known", level: conformance.Should, source: "AIP-216",
			says: "Resources should not provide an unspecified state to users.",
			violation: "A controller cannot see whether the {kind} is in service, and must wait or " +
				"guess.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				got, err := t.Get(k, o.Name)
				t.WantOK("Get", err)
				if conformance.StateOf(got) == 0 {
					t.Failf("oper_status is UNSPECIFIED")
				}
			},
		},
	}
}

// creationsAgain are cases about a Create with the id of an object that exists.
func creationsAgain() []generic {
	return []generic{
		{
			name: "create-again-keeps-one", source: "AIP-133", says: duplicate +
				" (Agents may answer OK with the object that is there, because a lost answer is asked " +
				"for again.)",
			violation: "A controller that repeats a call whose answer was lost makes a second {kind}.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				got, err := t.Create(k, o.ID, o.Spec)
				t.WantCode("Create of the same again", err, codes.OK, codes.AlreadyExists)
				if err == nil && got.GetName() != o.Name {
					t.Failf("the second answer has the name %q, want %q", got.GetName(), o.Name)
				}
				wantOnce(t, o)
			},
		},
		{
			name: "create-again-of-another-is-refused", source: "AIP-133", says: duplicate,
			violation: "A controller believes that the {kind} is as it asked, and a pod is in the " +
				"wrong network or has the wrong address.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				_, err := t.Create(k, o.ID, other)
				t.WantCode("Create of another one with the same id", err, codes.AlreadyExists)
			},
		},
		{
			name: "create-again-of-another-changes-nothing", source: "AIP-121", says: strongCreate,
			violation: "Two clients with one id change each other's {kind}.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				_, _ = t.Create(k, o.ID, other)
				t.WantAsMade(o)
			},
		},
	}
}

// creationsWithoutID are cases about ids that the agent chooses.
func creationsWithoutID() []generic {
	return []generic{
		{
			name: conformance.CreateWithoutID,
			says: "If this is not provided the system will auto-generate it.",
			violation: "Clients that leave the id to the agent, such as OPI's command line, make no " +
				"{kind}.",
			run: func(t *T, k *Kind) {
				_, spec := t.Sample(k)
				got, err := t.Create(k, "", spec)
				if k == t.Kinds.BridgePort && status.Code(err) == codes.InvalidArgument &&
					strings.Contains(err.Error(), "bridge_port_id") {
					t.Skipf("not served: ports without an id: %s", err)
				}
				t.WantOK("Create without an id", err)
				id := path.Base(got.GetName())
				if len(id) < 4 || len(id) > 63 {
					t.Failf("the name is %q, want one whose last part has 4-63 characters",
						got.GetName())
				}
				t.WantAsMade(conformance.Object{Kind: k, Name: got.GetName(), Spec: spec})
			},
		},
		{
			name: "create-without-id-makes-different-ones", source: "AIP-122",
			says:      "All resource names defined by an API must be unique within that API.",
			violation: "Two clients that leave the id to the agent have the same {kind}.",
			run: func(t *T, k *Kind) {
				names := map[string]bool{}
				for i := range 2 {
					_, spec := t.Sample(k)
					got, err := t.Create(k, "", spec)
					if err != nil && i == 0 {
						t.Skipf("the agent makes no %s without an id", k.Word)
					}
					t.WantOK("the second Create without an id", err)
					names[got.GetName()] = true
				}
				if len(names) < 2 {
					t.Failf("both have the same name")
				}
			},
		},
	}
}

// crudRead are the cases about Get and List.
func crudRead() []generic {
	return []generic{
		{
			name: "get-answers-what-was-made", source: "AIP-121", says: strongCreate,
			violation: "A controller that verifies its {kind} takes it for somebody else's and makes " +
				"it again and again.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				got, err := t.Get(k, o.Name)
				t.WantOK("Get", err)
				t.WantSpec("Get", got, o.Spec)
			},
		},
		{
			name: "get-answers-the-same-name", source: "AIP-122",
			says:      "All data returned from the API must use the canonical resource name.",
			violation: "A controller takes one {kind} for two.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				got, err := t.Get(k, o.Name)
				t.WantOK("Get", err)
				if got.GetName() != o.Name {
					t.Failf("Get has the name %q, Create had %q", got.GetName(), o.Name)
				}
			},
		},
		{
			name: "get-of-a-missing-one", source: "AIP-193",
			says: "If the user does have proper permission, but the requested resource does not " +
				"exist, the service must error with NOT_FOUND.",
			violation: "A controller cannot see that a {kind} is gone, and keeps a pod's Function for " +
				"ever.",
			run: func(t *T, k *Kind) {
				_, err := t.Get(k, missing(t, k))
				t.WantCode("Get", err, codes.NotFound)
			},
		},
		{
			name: "list-has-it", source: "AIP-132",
			says:      "The purpose of the List method is to return data from a finite collection.",
			violation: "What a dead controller left is never found, and its segment stays in use.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				if t.Listed(k, o.Name) == nil {
					t.Failf("the list lacks %s", o.Name)
				}
			},
		},
		{
			name: "list-has-all-of-it", level: conformance.Should, source: "AIP-132",
			says: "The response should usually include fully-populated resources.",
			violation: "A controller cannot see from a list whose a {kind} is, and must read each of " +
				"them.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				got := t.Listed(k, o.Name)
				if got == nil {
					t.Failf("the list lacks %s", o.Name)
				}
				t.WantSpec("the list", got, o.Spec)
			},
		},
		{
			name: "list-has-it-once", source: "AIP-132",
			says:      "The purpose of the List method is to return data from a finite collection.",
			violation: "A controller counts a {kind} twice.",
			run:       func(t *T, k *Kind) { wantOnce(t, t.Have(k)) },
		},
		{
			name: "list-agrees-with-get", source: "AIP-121", says: strongCreate,
			violation: "What a controller does depends on how it looked.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				got, err := t.Get(k, o.Name)
				t.WantOK("Get", err)
				listed := t.Listed(k, o.Name)
				if listed == nil {
					t.Failf("the list lacks %s, which Get has", o.Name)
				}
				if spec := conformance.SpecOf(got); spec != nil {
					t.WantSpec("the list, in comparison with Get", listed, spec)
				}
			},
		},
	}
}

// crudDelete are the cases about Delete.
func crudDelete() []generic {
	return slices.Concat(deletions(), deletionsOfMissing(), creationsAfterDelete())
}

// deletions are cases about a Delete of an object that exists.
func deletions() []generic {
	return []generic{
		{
			name: "deleted-is-gone", source: "AIP-121", says: strongDelete +
				" (OPI has TO_BE_DELETED for the time until then.)",
			violation: "A pod's Function is never free again, or the next pod gets one that the xPU " +
				"still serves for the last.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				t.WantOK("Delete", t.Delete(k, o.Name, false))
				t.WantGone(k, o.Name)
			},
		},
		{
			name: "deleted-is-never-up", says: "{kind} is to be deleted.",
			violation: "A controller believes that a pod still has its {kind}.",
			run: func(t *T, k *Kind) {
				o := t.HaveUp(k)
				t.WantOK("Delete", t.Delete(k, o.Name, false))
				got, err := t.Get(k, o.Name)
				if err == nil && conformance.StateOf(got) == conformance.Up {
					t.Failf("after Delete it is UP")
				}
			},
		},
		{
			name: "deleted-leaves-the-list", source: "AIP-132",
			says:      "The purpose of the List method is to return data from a finite collection.",
			violation: "A controller deletes again and again what is gone.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				t.WantOK("Delete", t.Delete(k, o.Name, false))
				t.WantGone(k, o.Name)
				if t.Listed(k, o.Name) != nil {
					t.Failf("the list has %s, which is gone", o.Name)
				}
			},
		},
		{
			name: "delete-leaves-the-others", source: "AIP-135",
			says: "The Delete method should succeed if and only if a resource was present and was " +
				"successfully deleted.",
			violation: "The end of one pod takes another pod's {kind} away.",
			run: func(t *T, k *Kind) {
				gone, stays := t.Have(k), t.Have(k)
				t.WantOK("Delete", t.Delete(k, gone.Name, false))
				t.WantGone(k, gone.Name)
				t.WantAsMade(stays)
			},
		},
	}
}

// deletionsOfMissing are cases about a Delete of an object that may not exist.
func deletionsOfMissing() []generic {
	return []generic{
		{
			name: "delete-of-a-missing-one", source: "AIP-135",
			says: "If the requested resource does not exist, the service must error with NOT_FOUND " +
				"unless allow_missing is set to true.",
			violation: "A controller that deletes by a wrong name believes that it succeeded.",
			run: func(t *T, k *Kind) {
				t.WantCode("Delete", t.Delete(k, missing(t, k), false), codes.NotFound)
			},
		},
		{
			name: "delete-of-a-missing-one-allowed",
			says: "If set to true, and the resource is not found, the request will succeed but no " +
				"action will be taken on the server.",
			violation: "A controller that repeats a Delete whose answer was lost fails for ever.",
			run: func(t *T, k *Kind) {
				t.WantOK("Delete with allow_missing", t.Delete(k, missing(t, k), true))
			},
		},
		{
			name: "delete-again-allowed",
			says: "If set to true, and the resource is not found, the request will succeed but no " +
				"action will be taken on the server.",
			violation: "A controller that repeats a Delete whose answer was lost fails for ever.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				t.WantOK("Delete", t.Delete(k, o.Name, false))
				t.WantGone(k, o.Name)
				for range 2 {
					t.WantOK("Delete with allow_missing", t.Delete(k, o.Name, true))
				}
			},
		},
		{
			name: "delete-allowing-missing-deletes", source: "AIP-135",
			says:      "If the method call is on a resource that already exists, the resource is deleted.",
			violation: "A controller that always allows missing ones, as it should, deletes nothing.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				t.WantOK("Delete with allow_missing", t.Delete(k, o.Name, true))
				t.WantGone(k, o.Name)
			},
		},
	}
}

// creationsAfterDelete are cases about an object that is made again.
func creationsAfterDelete() []generic {
	return []generic{
		{
			name: "made-again-after-delete", source: "AIP-121", says: strongCreate,
			violation: "The next pod on a Function gets the {kind} of the last.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				t.WantOK("Delete", t.Delete(k, o.Name, false))
				t.Prepare(func() { t.WantGone(k, o.Name) })
				other, _ := t.Vary(o.Spec)
				got, err := t.Create(k, o.ID, other)
				t.WantOK("Create after Delete", err)
				t.WantSpec("Create after Delete", got, other)
				t.WantAsMade(conformance.Object{Kind: k, Name: got.GetName(), Spec: other})
			},
		},
		{
			name: "made-again-comes-up", says: "{kind} is up.",
			violation: "A Function serves one pod and never another.",
			run: func(t *T, k *Kind) {
				o := t.HaveUp(k)
				t.WantOK("Delete", t.Delete(k, o.Name, false))
				t.Prepare(func() { t.WantGone(k, o.Name) })
				again(t, o)
				got, err := t.Create(k, o.ID, o.Spec)
				t.WantOK("Create after Delete", err)
				t.WantUp(k, got.GetName())
			},
		},
	}
}

// forged returns a component that no agent has.
func forged() *evpn.Component {
	return &evpn.Component{
		Name: "forged-by-opi-conformance", Status: evpn.CompStatus_COMP_STATUS_SUCCESS,
	}
}

func wantNotForged(t *T, got conformance.Message) {
	if conformance.StateOf(got) == conformance.Deleting {
		t.Failf("the status of the request was taken: %s", conformance.Status(got))
	}
	for _, c := range conformance.ComponentsOf(got) {
		if c.GetName() == forged().GetName() {
			t.Failf("the status of the request was taken: %s", conformance.Status(got))
		}
	}
}

// wantOnce ends the case unless the list has an object exactly once.
func wantOnce(t *T, o conformance.Object) {
	n := 0
	for _, m := range t.List(o.Kind, 0) {
		if path.Base(m.GetName()) == o.ID {
			n++
		}
	}
	if n != 1 {
		t.Failf("the list has %s %d times, want once", o.ID, n)
	}
}

// missing returns the name of an object that never existed, in the form that the agent takes. For
// a port, its interface exists.
func missing(t *T, k *Kind) string {
	o := t.Have(k)
	id := ""
	if k == t.Kinds.BridgePort {
		id = t.Port().ID
	} else {
		id = t.NewID(k)
	}
	return strings.TrimSuffix(o.Name, o.ID) + id
}

// deleted returns the name of an object that existed and was deleted.
func deleted(t *T, k *Kind) string {
	o := t.Have(k)
	t.Prepare(func() {
		t.WantOK("Delete", t.Delete(k, o.Name, true))
		t.WantGone(k, o.Name)
	})
	return o.Name
}

// again prepares that a deleted port is made again: some agents remove its interface.
func again(t *T, o conformance.Object) {
	if o.Kind == t.Kinds.BridgePort && t.Config().Hooks.MakePort != nil {
		mac := o.Spec.(*evpn.BridgePortSpec).GetMacAddress()
		t.MakeInterface(conformance.Port{ID: o.ID, MAC: mac})
	}
}

// updated returns an object with another spec, as an Update wants it.
func updated(o conformance.Object, spec proto.Message) conformance.Message {
	return o.Kind.NewMessage(o.Name, spec)
}
