// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"path"
	"regexp"
	"slices"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

func aip(kinds conformance.Kinds) (all []Case) {
	for _, k := range kinds.All() {
		all = slices.Concat(all, of(conformance.AIP, k, names()), of(conformance.AIP, k, ids()),
			of(conformance.AIP, k, pages()), of(conformance.AIP, k, errorDetails()))
	}
	return all
}

// names are the cases about names of objects.
func names() []generic {
	return []generic{
		{
			name: "get-by-the-documented-name", says: "Format: {collection}{id}",
			violation: "A client that was written by the API's documentation finds no {kind}.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				got, err := t.Get(k, k.Collection+o.ID)
				t.WantOK("Get of "+k.Collection+o.ID, err)
				t.WantSpec("Get of "+k.Collection+o.ID, got, o.Spec)
			},
		},
		{
			name: "delete-by-the-documented-name", says: "Format: {collection}{id}",
			violation: "A client that was written by the API's documentation deletes no {kind}.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				t.WantOK("Delete of "+k.Collection+o.ID, t.Delete(k, k.Collection+o.ID, false))
				t.WantGone(k, o.Name)
			},
		},
		{
			name: "get-without-a-name", source: "AIP-203", says: required,
			violation: "A client that forgets the name gets some {kind}.",
			run: func(t *T, k *Kind) {
				_, err := t.Get(k, "")
				t.WantRefused("Get without a name", err)
			},
		},
		{
			name: "get-without-a-name-is-an-invalid-argument", source: "AIP-203",
			level: conformance.Should,
			says:  "Failure to do so must cause an error (usually INVALID_ARGUMENT).",
			violation: "A controller takes its own mistake for a {kind} that is gone or an agent " +
				"that fails, and asks again for ever.",
			run: func(t *T, k *Kind) {
				_, err := t.Get(k, "")
				t.WantCode("Get without a name", err, codes.InvalidArgument)
			},
		},
		{
			name: "delete-without-a-name", source: "AIP-203", says: required,
			violation: "A client that forgets the name deletes some {kind}, or believes that it did.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				t.WantRefused("Delete without a name", t.Delete(k, "", false))
				t.WantAsMade(o)
			},
		},
		{
			name: "name-of-another-kind-is-not-found", source: "AIP-122",
			says:      "All resource names defined by an API must be unique within that API.",
			violation: "A client that mixes up two calls deletes an object of another kind.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				for _, other := range t.Kinds.All() {
					if other == k {
						continue
					}
					t.WantRefused("Get of "+other.Collection+o.ID,
						second(t.Get(k, other.Collection+o.ID)))
				}
			},
		},
		{
			name: "id-is-a-part-of-the-name-only", source: "AIP-122",
			says:      "Resource names must use the / character to separate individual segments.",
			violation: "A client that gives ids where names belong works with one agent only.",
			level:     conformance.Should,
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				t.WantRefused("Get of the id alone", second(t.Get(k, o.ID)))
			},
		},
	}
}

func second[A, B any](_ A, b B) B { return b }

// ids are the cases about ids that clients choose.
func ids() []generic {
	bad := func(name, what string, id func(t *T, k *Kind) string) generic {
		return generic{
			name: "id-" + name + "-is-refused", says: idForm,
			violation: "An id that " + what + " becomes the name of a netdev, a file or a key that " +
				"other programs do not take, or that another {kind} has.",
			run: func(t *T, k *Kind) {
				_, spec := t.Sample(k)
				wrong := id(t, k)
				wantFree(t, k, wrong)
				_, err := t.Create(k, wrong, spec)
				t.WantRefused("Create with id "+wrong, err)
			},
		}
	}
	long := func(t *T, k *Kind, n int) string {
		id := t.NewID(k) + "-"
		for len(id) < n {
			id += "x"
		}
		return id
	}

	return []generic{
		{
			name: "id-of-4-characters-is-taken", says: idForm,
			violation: "Clients with short ids make no {kind}.",
			run: func(t *T, k *Kind) {
				skipPorts(t, k)
				_, spec := t.Sample(k)
				id := t.Config().Prefix[2:6]
				if id[0] < 'a' {
					id = "z" + id[1:]
				}
				wantFree(t, k, id)
				_, err := t.Create(k, id, spec)
				t.WantOK("Create with id "+id, err)
			},
		},
		{
			name: "id-of-63-characters-is-taken", says: idForm,
			violation: "Clients with long ids make no {kind}.",
			run: func(t *T, k *Kind) {
				skipPorts(t, k)
				_, spec := t.Sample(k)
				id := long(t, k, 63)
				got, err := t.Create(k, id, spec)
				t.WantOK("Create with id "+id, err)
				if !conformance.HasID(got, id) {
					t.Failf("the name is %q, want one that ends with /%s", got.GetName(), id)
				}
			},
		},
		bad("of-3-characters", "is short", func(t *T, _ *Kind) string {
			return t.Config().Prefix[:3]
		}),
		bad("of-64-characters", "is long", func(t *T, k *Kind) string { return long(t, k, 64) }),
		bad("in-upper-case", "has upper case", func(t *T, k *Kind) string {
			return t.NewID(k) + "-A"
		}),
		bad("with-an-underscore", "has '_'", func(t *T, k *Kind) string {
			return t.NewID(k) + "_1"
		}),
		bad("with-a-slash", "has '/'", func(t *T, k *Kind) string { return t.NewID(k) + "/x" }),
		bad("with-a-blank", "has a blank", func(t *T, k *Kind) string { return t.NewID(k) + " x" }),
		bad("with-other-letters", "has letters that are not ASCII", func(t *T, k *Kind) string {
			return t.NewID(k) + "ü"
		}),
		{
			name: "wrong-id-is-an-invalid-argument", source: "AIP-193",
			level:     conformance.Should,
			says:      "Services must use the canonical error codes.",
			violation: "A controller asks again for ever for what can never be.",
			run: func(t *T, k *Kind) {
				_, spec := t.Sample(k)
				_, err := t.Create(k, t.NewID(k)+"_A", spec)
				t.WantCode("Create with a wrong id", err, codes.InvalidArgument)
			},
		},
		{
			name: "missing-spec-is-an-invalid-argument", source: "AIP-203",
			level:     conformance.Should,
			says:      "Failure to do so must cause an error (usually INVALID_ARGUMENT).",
			violation: "A controller asks again for ever for what can never be.",
			run: func(t *T, k *Kind) {
				_, err := t.Create(k, t.NewID(k), nil)
				t.WantCode("Create without a spec", err, codes.InvalidArgument)
			},
		},
	}
}

// wantFree ends a case whose id is too short to be certainly the run's own, if something has it.
func wantFree(t *T, k *Kind, id string) {
	var all []conformance.Message
	t.Prepare(func() { all = t.List(k, 0) })
	for _, m := range all {
		if conformance.HasID(m, id) {
			t.Skipf("%s exists at the agent", m.GetName())
		}
	}
}

// skipPorts ends a case about ids for ports, whose ids say which function they are for.
func skipPorts(t *T, k *Kind) {
	if k == t.Kinds.BridgePort {
		t.Skipf("the id of a port says which function it is for, and cannot be any")
	}
}

// pages are the cases about pages of lists.
func pages() []generic {
	return slices.Concat(pageSizes(), wholeLists())
}

// pageSizes are cases about the size of a page.
func pageSizes() []generic {
	return []generic{
		{
			name: "page-size-absent-is-taken", source: "AIP-158",
			says: "If the user does not specify page_size (or specifies 0), the API chooses an " +
				"appropriate default. The API must not return an error.",
			violation: "A client that does not care for pages sees no {kind}.",
			run: func(t *T, k *Kind) {
				_, _, err := t.Page(k, 0, "")
				t.WantOK("List without page_size", err)
			},
		},
		{
			name: "page-size-negative-is-refused", source: "AIP-158",
			says: "If the user specifies a negative value for page_size, the API must send an " +
				"INVALID_ARGUMENT error.",
			violation: "A client with a mistake gets no {kind} or all of them.",
			run: func(t *T, k *Kind) {
				t.Have(k)
				_, _, err := t.Page(k, -1, "")
				t.WantCode("List with page_size -1", err, codes.InvalidArgument)
			},
		},
		{
			name: "page-size-huge-is-taken", source: "AIP-158", level: conformance.Should,
			says: "If the user specifies page_size greater than the maximum permitted by the API, " +
				"the API should coerce down to the maximum permitted page size.",
			violation: "A client that asks for all of them at once sees no {kind}.",
			run: func(t *T, k *Kind) {
				t.Have(k)
				_, _, err := t.Page(k, 1<<31-1, "")
				t.WantOK("List with page_size 2147483647", err)
			},
		},
		{
			name: "page-is-not-larger-than-asked", source: "AIP-158",
			says:      "page_size specifies the maximum number of results to return.",
			violation: "A client that limits what it reads gets more than it can hold.",
			run: func(t *T, k *Kind) {
				haveMany(t, k, 3)
				for _, size := range []int32{1, 2} {
					page, _, err := t.Page(k, size, "")
					t.WantOK("List", err)
					if len(page) > int(size) {
						t.Failf("a page of size %d has %d", size, len(page))
					}
				}
			},
		},
	}
}

// wholeLists are cases about reading all pages of a list.
func wholeLists() []generic {
	return []generic{
		{
			name: "pages-of-one-have-all", source: "AIP-158",
			says: "If the end of the collection has not been reached, the API must provide a " +
				"next_page_token.",
			violation: "A controller that reads by pages takes a {kind} for gone.",
			run:       func(t *T, k *Kind) { wantPages(t, k, haveMany(t, k, 3), 1) },
		},
		{
			name: "pages-of-two-have-all", source: "AIP-158",
			says: "If the end of the collection has not been reached, the API must provide a " +
				"next_page_token.",
			violation: "A controller that reads by pages takes a {kind} for gone.",
			run:       func(t *T, k *Kind) { wantPages(t, k, haveMany(t, k, 3), 2) },
		},
		{
			name: "page-size-may-change", source: "AIP-158",
			says: "If the user changes the page_size in a request for subsequent pages, the " +
				"service must honor the new page size.",
			violation: "A client that reads less at a time after an error gets more than it can " +
				"hold, or misses a {kind}.",
			run: func(t *T, k *Kind) {
				haveMany(t, k, 4)
				_, token, err := t.Page(k, 1, "")
				t.WantOK("List", err)
				if token == "" {
					t.Blockf("the first page of size 1 has no next_page_token")
				}
				page, _, err := t.Page(k, 2, token)
				t.WantOK("List with another page_size", err)
				if len(page) > 2 {
					t.Failf("a page of size 2 after one of size 1 has %d", len(page))
				}
			},
		},
		{
			name: "last-page-says-so", source: "AIP-158",
			says: "If the end of the collection has been reached, the next_page_token field must " +
				"be empty.",
			violation: "A controller reads a list for ever.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				if !slices.ContainsFunc(t.List(k, 1000), func(m conformance.Message) bool {
					return m.GetName() == o.Name
				}) {
					t.Failf("the list lacks %s", o.Name)
				}
			},
		},
		{
			name: "page-token-fits-into-urls", source: "AIP-158",
			says:      "Page tokens provided by APIs must be opaque (but URL-safe) strings.",
			violation: "A client behind an HTTP gateway reads the first page only.",
			run: func(t *T, k *Kind) {
				haveMany(t, k, 2)
				_, token, err := t.Page(k, 1, "")
				t.WantOK("List", err)
				// The characters that RFC 3986 does not reserve, and '='.
				if !regexp.MustCompile(`^[A-Za-z0-9._~=-]*$`).MatchString(token) {
					t.Failf("the token is %q", token)
				}
			},
		},
	}
}

// haveMany makes objects and returns their names.
func haveMany(t *T, k *Kind, n int) []string {
	made := make([]string, n)
	for i := range made {
		made[i] = t.Have(k).Name
	}
	return made
}

// wantPages ends the case unless the pages of a size have all of the names, each once.
func wantPages(t *T, k *Kind, want []string, size int32) {
	seen := map[string]int{}
	for _, m := range t.List(k, size) {
		seen[m.GetName()]++
	}
	for _, name := range want {
		if seen[name] != 1 {
			t.Failf("pages of size %d have %s %d times, want once", size, path.Base(name),
				seen[name])
		}
	}
}

// reasonForm is the form of reasons in AIP-193.
var reasonForm = regexp.MustCompile(`^[A-Z][A-Z0-9_]+[A-Z0-9]$`)

// provoked are ways to get an error of an agent, by the names of cases.
func provoked() []struct {
	name string
	call func(t *T, k *Kind) error
} {
	return []struct {
		name string
		call func(t *T, k *Kind) error
	}{
		{"missing", func(t *T, k *Kind) error { return second(t.Get(k, missing(t, k))) }},
		{"wrong-argument", func(t *T, k *Kind) error {
			return second(t.Create(k, t.NewID(k), nil))
		}},
		{"duplicate", func(t *T, k *Kind) error {
			o := t.Have(k)
			other, _ := t.Vary(o.Spec)
			return second(t.Create(k, o.ID, other))
		}},
	}
}

// errorDetails are the cases about what errors say.
func errorDetails() (all []generic) {
	for _, p := range provoked() {
		have := func(t *T, k *Kind) *status.Status {
			err := p.call(t, k)
			if err == nil {
				t.Blockf("the call succeeded, and there is no error to look at")
			}
			return status.Convert(err)
		}

		all = append(all,
			generic{
				name: "error-" + p.name + "-has-a-canonical-code", source: "AIP-193",
				says: "Services must use the canonical error codes.",
				violation: "A controller cannot see whether to ask again, and does so for ever or " +
					"gives up too early.",
				run: func(t *T, k *Kind) {
					s := have(t, k)
					if s.Code() == codes.Unknown || s.Code() > codes.Unauthenticated {
						t.Failf("the code is %s: %s", s.Code(), s.Message())
					}
				},
			},
			generic{
				name: "error-" + p.name + "-has-a-message", source: "AIP-193",
				says: "Error messages should help a reasonably technical user understand and " +
					"resolve the issue.",
				level:     conformance.Should,
				violation: "Nobody knows why a pod does not start.",
				run: func(t *T, k *Kind) {
					if s := have(t, k); len(s.Message()) < 10 {
						t.Failf("the message is %q", s.Message())
					}
				},
			},
			generic{
				name: "error-" + p.name + "-has-a-reason", source: "AIP-193",
				says:      "All error responses must include an ErrorInfo within details.",
				violation: "Programs must read texts to see what is wrong with a {kind}.",
				run: func(t *T, k *Kind) {
					infos := reasons(have(t, k))
					if len(infos) == 0 {
						t.Failf("the error has no ErrorInfo")
					}
				},
			},
			generic{
				name: "error-" + p.name + "-has-one-reason-of-the-form", source: "AIP-193",
				says: "The reason must be at most 63 characters and match " +
					"[A-Z][A-Z0-9_]+[A-Z0-9]. Each type of detail payload must be included at " +
					"most once.",
				violation: "Programs must read texts to see what is wrong with a {kind}.",
				run: func(t *T, k *Kind) {
					infos := reasons(have(t, k))
					if len(infos) == 0 {
						t.Blockf("the error has no ErrorInfo")
					}
					if info := infos[0]; len(infos) > 1 || len(info.GetReason()) > 63 ||
						!reasonForm.MatchString(info.GetReason()) || info.GetDomain() == "" {
						t.Failf("there are %d, the first with reason %q and domain %q",
							len(infos), info.GetReason(), info.GetDomain())
					}
				},
			})
	}

	return append(all, generic{
		name: "same-error-has-the-same-reason", source: "AIP-193",
		says:      "Services must use the same (reason, domain) pair for the same error.",
		violation: "Programs must read texts to see what is wrong with a {kind}.",
		run: func(t *T, k *Kind) {
			name := missing(t, k)
			a := reasons(status.Convert(second(t.Get(k, name))))
			b := reasons(status.Convert(t.Delete(k, name, false)))
			if len(a) == 0 || len(b) == 0 {
				t.Blockf("the errors have no ErrorInfo")
			}
			if a[0].GetReason() != b[0].GetReason() || a[0].GetDomain() != b[0].GetDomain() {
				t.Failf("Get says %s of %s, Delete says %s of %s", a[0].GetReason(),
					a[0].GetDomain(), b[0].GetReason(), b[0].GetDomain())
			}
		},
	})
}

func reasons(s *status.Status) (all []*errdetails.ErrorInfo) {
	for _, detail := range s.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			all = append(all, info)
		}
	}
	return all
}
