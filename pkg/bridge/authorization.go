package bridge

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"

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

// Rule is what a client may see and change: networks with these ids, and ports with these ids all of whose networks are among them.
type Rule struct {
	// Subject is that of the client's certificate as RFC 2253 writes it: "CN=xpu-controller,O=infra".
	Subject  string   `json:"subject"`
	Networks []string `json:"networks"`           // patterns of path.Match
	Ports    []string `json:"ports"`              // patterns of path.Match
	ReadOnly bool     `json:"readOnly,omitempty"` // nothing may be changed
}

// ParseAuthorization reads YAML.
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
	for i, r := range a.Rules {
		if r.Subject == "" {
			failed = append(failed, fmt.Errorf("rules[%d].subject: is missing, want one such as CN=xpu-controller", i))
		}
		if slices.ContainsFunc(a.Rules[:i], func(other Rule) bool { return other.Subject == r.Subject }) {
			failed = append(failed, fmt.Errorf("rules[%d].subject: %s has a rule already", i, r.Subject))
		}
		for _, pattern := range slices.Concat(r.Networks, r.Ports) {
			if _, err := path.Match(pattern, ""); err != nil {
				failed = append(failed, fmt.Errorf("rules[%d]: pattern %q: %w", i, pattern, err))
			}
		}
	}
	return errors.Join(failed...)
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
	c := client{restricted: authorization != nil}
	if p, ok := peer.FromContext(ctx); ok {
		if tls, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(tls.State.PeerCertificates) > 0 {
			c.subject = tls.State.PeerCertificates[0].Subject.String()
		}
	}
	if c.restricted {
		i := slices.IndexFunc(authorization.Rules, func(r Rule) bool { return r.Subject == c.subject })
		if i >= 0 {
			c.rule = authorization.Rules[i]
		}
	}
	return context.WithValue(ctx, clientKey{}, c)
}

// known returns a gRPC status for a client that no rule is for.
func (c client) known() error {
	if c.restricted && c.rule.Subject == "" {
		return status.Errorf(codes.PermissionDenied, "no rule of --authorization is for the client %q", c.subject)
	}
	return nil
}

// sees tells whether a client may know of an object: of a network, or of a port with its networks.
func (c client) sees(port string, networks []string) bool {
	if !c.restricted {
		return true
	}
	return (port == "" || matches(c.rule.Ports, port)) &&
		!slices.ContainsFunc(networks, func(id string) bool { return !matches(c.rule.Networks, id) })
}

func matches(patterns []string, id string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		is, err := path.Match(pattern, id)
		return err == nil && is
	})
}

// permit returns a gRPC status if the client may not see, or not change, an object.
func (c *collection[S, M]) permit(ctx context.Context, change bool, id string, spec S) error {
	who := clientOf(ctx)
	port, networks := c.scope(id, spec)
	switch {
	case !who.sees(port, networks):
		return status.Errorf(codes.PermissionDenied, "%s %s: the rule of --authorization for the client %q does not have it, or a network of it",
			c.word, id, who.subject)
	case change && who.rule.ReadOnly:
		return status.Errorf(codes.PermissionDenied, "%s %s: the client %q may change nothing (readOnly)", c.word, id, who.subject)
	}
	return nil
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
