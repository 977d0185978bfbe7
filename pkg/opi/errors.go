// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/connerror"
)

// Kinds of errors, for [errors.Is]. Every error of a [Client] method is an [*Error] of exactly one
// kind.
var (
	// ErrInvalid: the argument can never work. [Error.Field] names the wrong field. Permanent.
	ErrInvalid = errors.New("invalid")
	// ErrConflict: another object at the agent is in the way, such as a port with the same MAC
	// address in the network, or a network of the same id with another VLAN. It lasts until that
	// object is removed.
	ErrConflict = errors.New("conflict")
	// ErrNetworkMissing: a network of the port does not exist at the agent.
	ErrNetworkMissing = errors.New("network missing")
	// ErrUnavailable: the agent does not answer. The request may or may not have been carried out.
	ErrUnavailable = errors.New("agent unavailable")
	// ErrInUse: the network cannot be deleted because ports use it.
	ErrInUse = errors.New("in use")
	// ErrNotFound: the object does not exist at the agent.
	ErrNotFound = errors.New("not found")
	// ErrUnknown: the agent has an object with this id, or may have one, and reports too little to
	// identify its owner and its properties. Nothing was changed. The object must not be taken for
	// gone, for another owner's, or for correct.
	ErrUnknown = errors.New("not known, as the agent does not tell enough")
	// ErrFailed: the agent reports that it failed. [Error.Detail] is the agent's message.
	ErrFailed = errors.New("failed on the xPU")
	// ErrTimeout: the caller's context ended first. The request may have been carried out, or may
	// still be running at the agent. [Error.Detail] is the last known progress.
	ErrTimeout = errors.New("not done in time")
	// ErrNoTrunks: the port is a trunk, and the agent has none.
	ErrNoTrunks = errors.New("no trunks")
	// ErrUnsupported: the agent does not implement what this package needs.
	ErrUnsupported = errors.New("not supported by the agent")
)

// Error is a failed operation on one object of an OPI agent.
type Error struct {
	Kind   error  // one of the Err variables of this package
	Op     string // operation: "create port", "list ports"
	ID     string // OPI id of the object; empty for operations on no single object
	Field  string // for ErrInvalid, the wrong field: "MAC", "VLAN"; otherwise empty
	Detail string // for people; may be empty
	Err    error  // underlying gRPC or context error; may be nil
}

// Error returns one line with the operation, the object, the kind and the detail.
func (e *Error) Error() string {
	text := "opi: " + e.Op
	if e.ID != "" {
		text += " " + e.ID
	}

	text += ": " + e.Kind.Error()
	if e.Field != "" {
		text += " " + e.Field
	}

	if e.Detail != "" {
		text += ": " + e.Detail
	}

	return text
}

// Unwrap makes both the kind and the cause visible to [errors.Is] and [errors.As].
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

// maxDetail is how many bytes of an agent's text are kept.
const maxDetail = 512

// Short shortens a text of an agent to fit into a condition or an event, and makes it valid UTF-8.
func Short(text string) string {
	if len(text) > maxDetail {
		text = text[:maxDetail] + "..."
	}
	return strings.Clone(strings.ToValidUTF8(text, "?"))
}

func invalid(op, id, field, format string, args ...any) error {
	return &Error{
		Kind: ErrInvalid, Op: op, ID: id, Field: field, Detail: fmt.Sprintf(format, args...),
	}
}

// failure converts the error of a call under ctx into an Error. nil stays nil.
func (c *Client) failure(ctx context.Context, op, id string, err error) error {
	if err == nil {
		return nil
	}

	text := connerror.Text(Short(status.Convert(err).Message()))
	if ended(ctx) {
		return timeout(ctx, op, id, text)
	}

	if e, ok := errors.AsType[*Error](err); ok { // the dialect has classified it
		named := *e
		named.Op, named.ID = op, id
		return &named
	}

	e := &Error{Kind: c.agent.Kind(err), Op: op, ID: id, Detail: text, Err: err}
	if IsDenied(err) {
		e.Detail = "the agent refuses this client: " + text
	}

	return e
}

// IsDenied reports whether the agent refused the call because of who the client is.
func IsDenied(err error) bool {
	code := status.Code(err)
	return code == codes.Unauthenticated || code == codes.PermissionDenied
}

// isForbidden reports whether the agent knows the client and does not allow it the call, which the
// next attempt will not change. A client that the agent does not know may have a certificate that is
// being renewed.
func isForbidden(err error) bool { return status.Code(err) == codes.PermissionDenied }

// outcomeUnknown reports whether the call may have been carried out although it failed.
func outcomeUnknown(err error) bool {
	if e, ok := errors.AsType[*Error](err); ok && e.Err == nil {
		return false // the call was never sent
	}
	switch status.Code(err) {
	case codes.NotFound, codes.InvalidArgument, codes.Unimplemented, codes.Unauthenticated,
		codes.PermissionDenied:
		return false
	default:
		return true
	}
}

// timeout returns the error of an operation whose context ended. last is the last known progress.
func timeout(ctx context.Context, op, id, last string) error {
	return &Error{
		Kind: ErrTimeout, Op: op, ID: id, Detail: last,
		Err: cmp.Or(context.Cause(ctx), context.DeadlineExceeded),
	}
}

// ended reports whether ctx has ended or its deadline has passed. Both are checked because an RPC
// has a timer of its own for the same deadline, which may fire first.
func ended(ctx context.Context) bool {
	deadline, limited := ctx.Deadline()
	return ctx.Err() != nil || limited && !time.Now().Before(deadline)
}
