// SPDX-License-Identifier: Apache-2.0

// Package access knows the clients of the agent by their certificates, and decides what each of
// them may see and change.
package access

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// Authorization says what each client may do. A client without a rule may do nothing.
type Authorization struct {
	Rules []Rule `json:"rules"`
}

// Rule says what one client may see and change: the networks and VRFs whose ids match, the ports
// whose ids match and whose networks all match, and the SVIs whose ids match and whose network and
// VRF match.
type Rule struct {
	// Subject is the subject of the client's certificate as RFC 2253 writes it:
	// "CN=xpu-controller,O=infra".
	Subject  string   `json:"subject"`
	Networks []string `json:"networks"`           // patterns of path.Match
	Ports    []string `json:"ports"`              // patterns of path.Match
	VRFs     []string `json:"vrfs,omitempty"`     // patterns of path.Match
	SVIs     []string `json:"svis,omitempty"`     // patterns of path.Match
	ReadOnly bool     `json:"readOnly,omitempty"` // the client may change nothing

	// VLANs and VNIs are the segments that the client may give its networks. An empty list allows
	// no segment. A rule that lets networks be changed must have both lists, because clients whose
	// networks have different ids could otherwise take each other's segments.
	VLANs []Segments `json:"vlans,omitempty"`
	VNIs  []Segments `json:"vnis,omitempty"`

	// These limit how many objects of a kind the client can see when it makes another one. A limit
	// that is nil is defaultMax.
	MaxNetworks *int `json:"mostNetworks,omitempty"`
	MaxPorts    *int `json:"mostPorts,omitempty"`
	MaxVRFs     *int `json:"mostVRFs,omitempty"`
	MaxSVIs     *int `json:"mostSVIs,omitempty"`
}

// defaultMax is how many objects of a kind a client may have if its rule has no limit: more than an
// xPU serves, and few enough to be stored.
const defaultMax = 4096

const (
	maxVLAN = 4094      // IEEE 802.1Q
	maxVNI  = 1<<24 - 1 // RFC 7348, section 5
)

// Segments are the VLAN ids or VNIs of a rule: a range such as "100-199", or a number.
type Segments string

// UnmarshalJSON accepts a number too.
func (s *Segments) UnmarshalJSON(data []byte) error {
	text := string(data)
	if unquoted, err := strconv.Unquote(text); err == nil {
		text = unquoted
	}
	*s = Segments(text)
	return nil
}

// segmentsForm matches "300" or "100-199".
var segmentsForm = regexp.MustCompile(`^([0-9]{1,8})(?:-([0-9]{1,8}))?$`)

// bounds returns the first and the last segment. It returns an error if there are segments above
// limit.
func (s Segments) bounds(limit uint32) (first, last uint32, err error) {
	parts := segmentsForm.FindStringSubmatch(string(s))
	if parts == nil {
		return 0, 0, fmt.Errorf("%q: must be a number, or a range such as 100-199", string(s))
	}

	low, _ := strconv.ParseUint(parts[1], 10, 32) // has at most 8 digits
	high, _ := strconv.ParseUint(cmp.Or(parts[2], parts[1]), 10, 32)
	if low < 1 || low > high || high > uint64(limit) {
		return 0, 0, fmt.Errorf("%q: must be in 1-%d, the lowest first", string(s), limit)
	}

	return uint32(low), uint32(high), nil
}

// contains reports whether a segment is in one of the ranges.
func contains(ranges []Segments, segment, limit uint32) bool {
	return slices.ContainsFunc(ranges, func(s Segments) bool {
		first, last, err := s.bounds(limit)
		return err == nil && first <= segment && segment <= last
	})
}

// describe lists the ranges for error messages.
func describe(ranges []Segments) string {
	if len(ranges) == 0 {
		return "none"
	}
	texts := make([]string, len(ranges))
	for i, s := range ranges {
		texts[i] = string(s)
	}
	return strings.Join(texts, ", ")
}

// ParseAuthorization parses YAML. Its errors name the rule and the field, and say what would be
// right.
func ParseAuthorization(text []byte) (*Authorization, error) {
	a := &Authorization{}
	if err := yaml.UnmarshalStrict(text, a); err != nil {
		return nil, err
	}
	if err := a.check(); err != nil {
		return nil, err
	}
	return a, nil
}

func (a *Authorization) check() error {
	var failed []error
	if a.Rules == nil { // for example because the file is being written
		failed = append(failed,
			errors.New("rules: is missing, want a list; [] lets no client do anything"))
	}

	for i, r := range a.Rules {
		if slices.ContainsFunc(a.Rules[:i], func(other Rule) bool {
			return other.Subject == r.Subject
		}) {
			failed = append(failed,
				fmt.Errorf("rules[%d].subject: %s has a rule already", i, r.Subject))
		}
		for _, err := range r.problems() {
			failed = append(failed, fmt.Errorf("rules[%d].%w", i, err))
		}
	}

	return errors.Join(failed...)
}

// problems returns what is wrong with the rule, whatever other rules there are. Each error begins
// with the name of the field.
func (r Rule) problems() (all []error) {
	wrong := func(format string, args ...any) { all = append(all, fmt.Errorf(format, args...)) }
	if r.Subject == "" {
		wrong("subject: is missing, want one such as CN=xpu-controller")
	}

	for _, of := range []struct {
		field, limitField string
		patterns          []string
		limit             *int
	}{{"networks", "mostNetworks", r.Networks, r.MaxNetworks},
		{"ports", "mostPorts", r.Ports, r.MaxPorts}, {"vrfs", "mostVRFs", r.VRFs, r.MaxVRFs},
		{"svis", "mostSVIs", r.SVIs, r.MaxSVIs}} {
		for j, pattern := range of.patterns {
			if _, err := path.Match(pattern, ""); err != nil {
				wrong("%s[%d]: pattern %q: %w", of.field, j, pattern, err)
			}
		}
		if of.limit != nil && *of.limit < 0 {
			wrong("%s: %d: must not be negative; without it, it is %d", of.limitField, *of.limit,
				defaultMax)
		}
	}

	for _, of := range []struct {
		field    string
		segments []Segments
		limit    uint32
	}{{"vlans", r.VLANs, maxVLAN}, {"vnis", r.VNIs, maxVNI}} {
		if of.segments == nil && !r.ReadOnly && len(r.Networks) > 0 {
			wrong("%s: is missing, want those that the client may give its networks: "+
				"[\"100-199\"], "+
				"or [\"1-%d\"] for all, or [] for none", of.field, of.limit)
		}
		for j, s := range of.segments {
			if _, _, err := s.bounds(of.limit); err != nil {
				wrong("%s[%d]: %w", of.field, j, err)
			}
		}
	}

	return all
}
