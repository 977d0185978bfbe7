// SPDX-License-Identifier: Apache-2.0

// Package conformance tests whether an OPI network agent keeps the contract of OPI's API: the
// comments of its proto files, and Google's API Improvement Proposals (https://google.aip.dev),
// which OPI's API follows. It calls the agent as any gRPC client does.
//
// A [Case] checks one sentence of the contract. The cases are in the package cases. A [Runner] runs
// them and makes a [Report].
package conformance

import (
	"strings"
)

// Profile is a set of cases that an agent can claim together.
type Profile string

// The profiles.
const (
	L2Core    Profile = "L2-CORE"
	L2Overlay Profile = "L2-OVERLAY"
	Trunk     Profile = "TRUNK"
	L3        Profile = "L3"
	Inventory Profile = "INVENTORY"
	AIP       Profile = "AIP"
	Recovery  Profile = "RECOVERY"
	Security  Profile = "SECURITY"
	Scale     Profile = "SCALE"
	Blind     Profile = "BLIND"
)

// Profiles returns all profiles in the order of reports.
func Profiles() []Profile {
	return []Profile{
		L2Core, L2Overlay, Trunk, L3, Inventory, AIP, Recovery, Security, Scale, Blind,
	}
}

// Describe returns in one sentence what a profile is about.
func (p Profile) Describe() string {
	return map[Profile]string{
		L2Core:    "Logical bridges and ACCESS ports: they are made, shown, changed and deleted.",
		L2Overlay: "Logical bridges with a VNI.",
		Trunk:     "TRUNK ports.",
		L3:        "VRFs and SVIs.",
		Inventory: "The inventory of the xPU.",
		AIP:       "Codes and details of errors, pages, names and field masks, as the AIPs have them.",
		Recovery:  "What is there after the agent ended or its process was killed.",
		Security:  "TLS, and input that no well-behaved client sends.",
		Scale:     "Many objects, and many calls at once.",
		Blind: "Create and Delete of ports, for agents that serve nothing else. Nothing can be " +
			"verified there.",
	}[p]
}

// crosses reports whether a profile has cases for all kinds of objects, so that an agent need not
// serve every kind.
func (p Profile) crosses() bool {
	return p == AIP || p == Recovery || p == Security || p == Scale
}

// Level says how binding the sentence of a case is.
type Level string

// The levels, with the meaning of RFC 2119.
const (
	Must   Level = "must"
	Should Level = "should"
)

// Case checks one sentence of the contract.
type Case struct {
	Profile Profile
	// Name identifies the case in its profile, such as "logical-bridge/get-of-a-missing-one". It
	// does not change between versions.
	Name string
	// Kind is the kind of objects that the case is about, or nil.
	Kind *Kind
	// Level is the level of the sentence; empty is [Must].
	Level Level
	// Source is where the sentence is, such as "AIP-131", and Says is the sentence.
	Source, Says string
	// Violation says what it means for pods, or for whoever runs them, if the sentence does not
	// hold.
	Violation string
	Run       func(*T)
}

// ID returns the name of the case with its profile, which is unique.
func (c Case) ID() string { return string(c.Profile) + "/" + c.Name }

// level returns the level of the case.
func (c Case) level() Level {
	if c.Level == "" {
		return Must
	}
	return c.Level
}

// Link returns the address of the case's source, or "" if it is a proto file.
func (c Case) Link() string {
	number, isAIP := strings.CutPrefix(c.Source, "AIP-")
	if !isAIP {
		return ""
	}
	return "https://google.aip.dev/" + number
}

// Outcome is how a case ended.
type Outcome string

// The outcomes.
const (
	// Passed means that the agent did what the sentence says.
	Passed Outcome = "passed"
	// Failed means that the agent did not, and the sentence is a [Must].
	Failed Outcome = "failed"
	// Deviates means that the agent did not, and the sentence is a [Should].
	Deviates Outcome = "deviates"
	// Skipped means that the agent does not serve what the case is about, or that the run was not
	// given what the case needs.
	Skipped Outcome = "skipped"
	// Blocked means that the agent failed before it came to the sentence, which is in doubt.
	Blocked Outcome = "blocked"
	// NotRun means that the run ended before.
	NotRun Outcome = "not run"
)
