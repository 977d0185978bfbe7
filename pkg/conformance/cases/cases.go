// SPDX-License-Identifier: Apache-2.0

// Package cases has the cases of the conformance test, in a file for each profile. Each case checks
// one sentence of OPI's proto files or of an AIP.
package cases

import (
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

type (
	// Case is a case.
	Case = conformance.Case
	// T is a case that runs.
	T = conformance.T
	// Kind is a kind of objects.
	Kind = conformance.Kind
)

// All returns all cases, profile by profile.
func All(kinds conformance.Kinds) []Case {
	return slices.Concat(
		l2Core(kinds), l2Overlay(kinds), trunk(kinds), l3(kinds), inventoryCases(),
		aip(kinds), recovery(kinds), security(kinds), scale(kinds), blind(kinds),
	)
}

// generic is a case that holds for every kind of objects. In its texts {kind} stands for the kind.
type generic struct {
	name      string
	level     conformance.Level
	source    string // empty is the kind's proto file
	says      string
	violation string
	run       func(*T, *Kind)
}

// of returns the cases for one kind.
func of(profile conformance.Profile, k *Kind, all []generic) []Case {
	text := strings.NewReplacer("{kind}", strings.ToLower(k.Word), "{collection}", k.Collection)
	cases := make([]Case, len(all))
	for i, g := range all {
		source := g.source
		if source == "" {
			source = k.Proto
		}
		cases[i] = Case{
			Profile: profile, Name: k.Slug + "/" + g.name, Kind: k, Level: g.level,
			Source: source, Says: text.Replace(g.says), Violation: text.Replace(g.violation),
			Run: func(t *T) { g.run(t, k) },
		}
	}
	return cases
}

// about completes the cases about one kind in one profile. Their names begin with the kind's.
func about(profile conformance.Profile, k *Kind, all []Case) []Case {
	for i := range all {
		all[i].Profile, all[i].Kind = profile, k
		all[i].Name = k.Slug + "/" + all[i].Name
		if all[i].Source == "" {
			all[i].Source = k.Proto
		}
	}
	return all
}
