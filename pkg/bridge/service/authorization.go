// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"path"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
)

// requireRule refuses calls of clients without a rule. Calls about the health of the agent are open
// to all.
func requireRule(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	if !strings.HasPrefix(info.FullMethod, "/grpc.health.v1.Health/") {
		if err := access.FromContext(ctx).CheckKnown(); err != nil {
			return nil, err
		}
	}
	return handle(ctx, req)
}

// explain gives each error a reason, for clients that are programs.
func explain(
	ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	reply, err := handle(ctx, req)
	return reply, refusal.Complete(err)
}

// authorizeID returns a gRPC status if the client may not see any object with this id. It comes
// before any look at the objects, so that a client does not even learn whether other ids are in
// use.
func (c *collection[S, M]) authorizeID(client access.Client, id string) error {
	return c.authorize(client, id, *new(S))
}

// authorize returns a gRPC status if the client may not see an object.
func (c *collection[S, M]) authorize(client access.Client, id string, spec S) error {
	if c.canSee(client, id, spec) {
		return nil
	}
	return refusal.New(codes.PermissionDenied, refusal.NotInRule,
		"%s %s: the rule of --authorization for the client %q does not have it, or a network of it",
		c.word, id, client.Subject)
}

// authorizeChange returns a gRPC status if the client may not change an object.
func (c *collection[S, M]) authorizeChange(client access.Client, id string, spec S) error {
	if err := c.authorize(client, id, spec); err != nil {
		return err
	}
	if client.ReadOnly() {
		return refusal.New(codes.PermissionDenied, refusal.ReadOnly,
			"%s %s: the client %q may change nothing (readOnly)", c.word, id, client.Subject)
	}
	return nil
}

// checkLimit returns a gRPC status if the client may not have one more object. All objects that the
// client may know of count, whoever made them.
func (c *collection[S, M]) checkLimit(client access.Client, id string) error {
	limit := c.limit(client)
	if have := len(c.visible(client)); have >= limit {
		return refusal.New(codes.ResourceExhausted, refusal.LimitReached,
			"%s %s: the rule of --authorization for the client %q "+
				"lets it have %d, and it has %d; delete one that is not needed", c.word,
			id, client.Subject, limit, have)
	}
	return nil
}

// canSee reports whether a client may know of an object.
func (a *Agent) canSee(client access.Client, object plane.Object) bool {
	switch object.Kind {
	case plane.KindPort:
		return a.ports.canSeeIt(client, object.ID)
	case plane.KindVRF:
		return a.vrfs.canSeeIt(client, object.ID)
	case plane.KindSVI:
		return a.svis.canSeeIt(client, object.ID)
	}
	return a.networks.canSeeIt(client, object.ID)
}

// canSeeIt reports whether a client may know of the object with an id, or of any object with it if
// there is none.
func (c *collection[S, M]) canSeeIt(client access.Client, id string) bool {
	var spec S
	if o := c.objects[id]; o != nil {
		spec = o.spec
	}
	return c.canSee(client, id, spec)
}

// textFor describes an object to a client. The text has no id if the client may not know of the
// object.
func (a *Agent) textFor(client access.Client, object plane.Object) string {
	word := map[plane.ObjectKind]string{
		plane.KindNetwork: networkNames.word, plane.KindPort: portNames.word,
		plane.KindVRF: vrfNames.word, plane.KindSVI: sviNames.word,
	}[object.Kind]
	if a.canSee(client, object) {
		return word + " " + object.ID
	}
	if object.Kind == plane.KindSVI {
		return "an " + word + " of another client"
	}
	return "a " + word + " of another client"
}

// errorText returns the text of an error for a client. It names no object that the client may not
// know of.
func (a *Agent) errorText(client access.Client, err error) string {
	text := err.Error()
	for _, e := range objectErrors(err) {
		if !a.canSee(client, e.Object) {
			text = strings.ReplaceAll(text, e.Text, e.Anonymous)
		}
	}
	return text
}

// objectErrors returns all ObjectErrors in the tree of an error.
func objectErrors(err error) (all []plane.ObjectError) {
	switch e := err.(type) {
	case plane.ObjectError:
		return []plane.ObjectError{e}
	case interface{ Unwrap() error }:
		return objectErrors(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			all = append(all, objectErrors(inner)...)
		}
	}
	return all
}

// objectOf returns the id of the object of a request, for logs.
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
	case *evpn.CreateVrfRequest:
		return r.GetVrfId()
	case *evpn.CreateSviRequest:
		return r.GetSviId()
	case *evpn.UpdateVrfRequest:
		return path.Base(r.GetVrf().GetName())
	case *evpn.UpdateSviRequest:
		return path.Base(r.GetSvi().GetName())
	case *opibridge.UpdatePortOptionsRequest:
		return path.Base(r.GetOptions().GetName())
	case *opibridge.UpdateNetworkOptionsRequest:
		return path.Base(r.GetOptions().GetName())
	case interface{ GetName() string }:
		return path.Base(r.GetName())
	}
	return ""
}
