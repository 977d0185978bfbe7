// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/yaml"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
)

// Authorization is who may do what. A client that no rule is for may do nothing.
type Authorization struct {
	Rules []Rule `json:"rules"`
}

// Rule is what a client may see and change: networks with these ids, and ports with these ids all
// of whose networks are among them.
type Rule struct {
	// Subject is that of the client's certificate as RFC 2253 writes it:
	// "CN=xpu-controller,O=infra".
	Subject  string   `json:"subject"`
	Networks []string `json:"networks"`           // patterns of path.Match
	Ports    []string `json:"ports"`              // patterns of path.Match
	ReadOnly bool     `json:"readOnly,omitempty"` // nothing may be changed

	// VLANs and VNIs are the segments that the client may give its networks: numbers or ranges. An
	// empty list allows no segment. A rule that lets networks be changed must have both lists,
	// because clients whose networks have different ids could otherwise take each other's segments.
	VLANs []Segments `json:"vlans,omitempty"`
	VNIs  []Segments `json:"vnis,omitempty"`

	// MostNetworks and MostPorts are how many networks and ports with ids of the rule there may be
	// when the client makes another one; nil is defaultMost.
	MostNetworks *int `json:"mostNetworks,omitempty"`
	MostPorts    *int `json:"mostPorts,omitempty"`
}

// defaultMost is how many networks, and how many ports, a client may have if its rule does not say
// it: more than an xPU serves, and few enough to be kept.
const defaultMost = 4096

// Segments are VLAN ids or VNIs in the words of a rule: "100-199", or a single one, "300".
type Segments string

// UnmarshalJSON takes a single number too.
func (s *Segments) UnmarshalJSON(data []byte) error {
	text := string(data)
	if unquoted, err := strconv.Unquote(text); err == nil {
		text = unquoted
	}
	*s = Segments(text)
	return nil
}

// segmentsForm is "300" or "100-199".
var segmentsForm = regexp.MustCompile(`^([0-9]{1,8})(?:-([0-9]{1,8}))?$`)

// bounds returns the lowest and the highest. The error says what would be right; most is the
// largest that there is.
func (s Segments) bounds(most uint32) (first, last uint32, err error) {
	parts := segmentsForm.FindStringSubmatch(string(s))
	if parts == nil {
		return 0, 0, fmt.Errorf("%q: must be a number, or a range such as 100-199", string(s))
	}

	low, _ := strconv.ParseUint(parts[1], 10, 32) // of at most 8 digits
	high, _ := strconv.ParseUint(cmp.Or(parts[2], parts[1]), 10, 32)
	if low < 1 || low > high || high > uint64(most) {
		return 0, 0, fmt.Errorf("%q: must be in 1-%d, the lowest first", string(s), most)
	}

	return uint32(low), uint32(high), nil
}

// has reports whether a segment is among some, of which most is the largest that there is.
func has(all []Segments, segment, most uint32) bool {
	return slices.ContainsFunc(all, func(s Segments) bool {
		first, last, err := s.bounds(most)
		return err == nil && first <= segment && segment <= last
	})
}

// ParseAuthorization reads YAML. The errors name the rule and the field, and say what would be
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
	if a.Rules == nil { // such as a file that is being written
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

// problems returns what is wrong with a rule by itself. Each begins with the field's name.
func (r Rule) problems() (all []error) {
	wrong := func(format string, args ...any) { all = append(all, fmt.Errorf(format, args...)) }
	if r.Subject == "" {
		wrong("subject: is missing, want one such as CN=xpu-controller")
	}

	for _, of := range []struct {
		field, mostField string
		patterns         []string
		most             *int
	}{{"networks", "mostNetworks", r.Networks, r.MostNetworks},
		{"ports", "mostPorts", r.Ports, r.MostPorts}} {
		for j, pattern := range of.patterns {
			if _, err := path.Match(pattern, ""); err != nil {
				wrong("%s[%d]: pattern %q: %w", of.field, j, pattern, err)
			}
		}
		if of.most != nil && *of.most < 0 {
			wrong("%s: %d: must not be negative; without it, it is %d", of.mostField, *of.most,
				defaultMost)
		}
	}

	for _, of := range []struct {
		field    string
		segments []Segments
		most     uint32
	}{{"vlans", r.VLANs, maxVLAN}, {"vnis", r.VNIs, maxVNI}} {
		if of.segments == nil && !r.ReadOnly && len(r.Networks) > 0 {
			wrong("%s: is missing, want those that the client may give its networks: "+
				"[\"100-199\"], "+
				"or [\"1-%d\"] for all, or [] for none", of.field, of.most)
		}
		for j, s := range of.segments {
			if _, _, err := s.bounds(of.most); err != nil {
				wrong("%s[%d]: %w", of.field, j, err)
			}
		}
	}

	return all
}

// client is who makes a call.
type client struct {
	subject    string // of its certificate, "" without one
	restricted bool   // it may do what its rule says only
	rule       Rule
}

type clientKey struct{}

// clientOf returns who makes a call. Where there is no authorization, it may do anything.
func clientOf(ctx context.Context) client {
	c, _ := ctx.Value(clientKey{}).(client)
	return c
}

// identify returns a context with who makes a call. authorization is nil if there is none.
func identify(ctx context.Context, authorization *Authorization) context.Context {
	var certificates []*x509.Certificate
	if p, ok := peer.FromContext(ctx); ok {
		if tls, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			certificates = tls.State.PeerCertificates
		}
	}
	return context.WithValue(ctx, clientKey{}, authorization.client(certificates))
}

// client returns the client that presented this chain of certificates, which begins with the
// client's own. A nil authorization restricts no client.
func (authorization *Authorization) client(certificates []*x509.Certificate) client {
	c := client{restricted: authorization != nil}
	if len(certificates) > 0 {
		c.subject = certificates[0].Subject.String()
	}

	if c.restricted {
		i := slices.IndexFunc(authorization.Rules, func(r Rule) bool {
			return r.Subject == c.subject
		})
		if i >= 0 {
			c.rule = authorization.Rules[i]
		}
	}

	return c
}

// known returns a gRPC status for a client that no rule is for.
func (c client) known() error {
	if c.restricted && c.rule.Subject == "" {
		return status.Errorf(codes.PermissionDenied,
			"no rule of --authorization is for the client %q", c.subject)
	}
	return nil
}

// sees tells whether a client may know of an object: of a network, or of a port with its networks.
func (c client) sees(port string, networks []string) bool {
	if !c.restricted {
		return true
	}
	return (port == "" || matches(c.rule.Ports, port)) &&
		!slices.ContainsFunc(networks, func(id string) bool {
			return !matches(c.rule.Networks, id)
		})
}

func matches(patterns []string, id string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		is, err := path.Match(pattern, id)
		return err == nil && is
	})
}

// permitID is permit for what is known from the id alone. It comes before any look at the objects,
// so that a client learns nothing about ids that are not for it, not even whether they are in use.
func (c *collection[S, M]) permitID(who client, id string) error {
	port, networks := c.scope(id, *new(S))
	if who.sees(port, networks) {
		return nil
	}
	return c.denied(who, id)
}

// permit returns a gRPC status if the client may not see, or not change, an object.
func (c *collection[S, M]) permit(who client, change bool, id string, spec S) error {
	port, networks := c.scope(id, spec)
	switch {
	case !who.sees(port, networks):
		return c.denied(who, id)
	case change && who.rule.ReadOnly:
		return status.Errorf(codes.PermissionDenied,
			"%s %s: the client %q may change nothing (readOnly)", c.word, id, who.subject)
	}

	return nil
}

func (c *collection[S, M]) denied(who client, id string) error {
	return status.Errorf(codes.PermissionDenied, "%s %s: the rule of --authorization for the "+
		"client %q does not have it, or a network of it",
		c.word, id, who.subject)
}

// room returns a gRPC status if the client may not have one more object. It counts those that the
// client may know of, whoever made them.
func (c *collection[S, M]) room(who client, id string) error {
	if !who.restricted {
		return nil
	}

	limit := defaultMost
	if said := c.most(who.rule); said != nil {
		limit = *said
	}

	if have := len(c.visible(who)); have >= limit {
		return status.Errorf(codes.ResourceExhausted,
			"%s %s: the rule of --authorization for the client %q "+
				"lets it have %d, and it has %d; delete one that is not needed", c.word,
			id, who.subject, limit, have)
	}

	return nil
}

// checkSegment returns a gRPC status if the client may not give a network its VLAN id or VNI. What
// the network has already is no matter: have is nil for a new one.
func (c client) checkSegment(id string, have, spec *evpn.LogicalBridgeSpec) error {
	if !c.restricted {
		return nil
	}

	refuse := func(field string, segment uint32, may []Segments) error {
		return status.Errorf(codes.PermissionDenied,
			"logical bridge %s: %s %d: the rule of --authorization for the client %q has %s",
			id, field, segment, c.subject, describe(may))
	}

	vlan, vni := spec.GetVlanId(), spec.GetVni()
	if (have == nil || vlan != have.GetVlanId()) && !has(c.rule.VLANs, vlan, maxVLAN) {
		return refuse("vlan_id", vlan, c.rule.VLANs)
	}
	if spec.Vni != nil && (have == nil || vni != have.GetVni()) && !has(c.rule.VNIs, vni, maxVNI) {
		return refuse("vni", vni, c.rule.VNIs)
	}

	return nil
}

func describe(all []Segments) string {
	if len(all) == 0 {
		return "none"
	}
	texts := make([]string, len(all))
	for i, s := range all {
		texts[i] = string(s)
	}
	return strings.Join(texts, ", ")
}

// reference is an error about an object of perhaps another client, which the text names.
type reference struct {
	to      task   // a network or a port
	text    string // names it
	instead string // for clients that may not know of it
}

func (r reference) Error() string { return r.text }

// tell returns the text of an error for a client: it names no object that the client may not know
// of.
func (a *Agent) tell(who client, err error) string {
	text := err.Error()
	for _, r := range references(err) {
		if !a.mayKnow(who, r.to) {
			text = strings.ReplaceAll(text, r.text, r.instead)
		}
	}
	return text
}

// references returns all that are in the tree of an error.
func references(err error) (all []reference) {
	switch e := err.(type) {
	case reference:
		return []reference{e}
	case interface{ Unwrap() error }:
		return references(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			all = append(all, references(inner)...)
		}
	}
	return all
}

// mayKnow reports whether a client may know of a network or port.
func (a *Agent) mayKnow(who client, of task) bool {
	if of.kind == taskNetwork {
		return who.sees("", []string{of.id})
	}
	var spec *evpn.BridgePortSpec
	if o := a.ports.objects[of.id]; o != nil {
		spec = o.spec
	}
	return who.sees(of.id, networksOf(spec))
}

// name describes a network or port to a client. It leaves the id out if the client may not know of
// the object.
func (a *Agent) name(who client, of task) string {
	word := portKind.word
	if of.kind == taskNetwork {
		word = networkKind.word
	}
	if a.mayKnow(who, of) {
		return word + " " + of.id
	}
	return "a " + word + " of another client"
}

// seesAll reports whether a client may know of every object, whatever its id will be.
func (c client) seesAll() bool {
	return !c.restricted || slices.Contains(c.rule.Networks, "*") &&
		slices.Contains(c.rule.Ports, "*")
}

// objectOf returns what a request is about, for logs.
func objectOf(req any) string {
	switch r := req.(type) {
	case *evpn.CreateBridgePortRequest:
		return r.GetBridgePortId()
	case *evpn.CreateLogicalBridgeRequest:
		return r.GetLogicalBridgeId()
	case *evpn.UpdateBridgePortRequest:
		return path.Base(r.GetBridgePort().GetName())
	case *evpn.UpdateLogicalBridgeRequest:
		return path.Base(r.GetLogicalBridge().GetName())
	case *opibridge.UpdatePortOptionsRequest:
		return path.Base(r.GetOptions().GetName())
	case *opibridge.UpdateNetworkOptionsRequest:
		return path.Base(r.GetOptions().GetName())
	case interface{ GetName() string }:
		return path.Base(r.GetName())
	}
	return ""
}
