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
)

// The kinds of failure, to be told apart with [errors.Is]. Every error of a [Client] method is an
// [*Error] of exactly one kind.
var (
	// ErrInvalid: the argument can never work; [Error.Field] says which part of it. Permanent.
	ErrInvalid = errors.New("invalid")
	// ErrConflict: another object of the agent stands in the way, such as a port that has the same
	// MAC address in the network, or a network of the same id with another VLAN. Lasts until
	// somebody removes it.
	ErrConflict = errors.New("conflict")
	// ErrNetworkMissing: a network that the port names does not exist on the agent.
	ErrNetworkMissing = errors.New("network missing")
	// ErrUnavailable: the agent does not answer. What was asked may or may not have been done.
	ErrUnavailable = errors.New("agent unavailable")
	// ErrInUse: the network cannot be deleted because ports use it.
	ErrInUse = errors.New("in use")
	// ErrNotFound: there is no such object on the agent.
	ErrNotFound = errors.New("not found")
	// ErrUnknown: the agent has an object of this id, or may have one, and does not tell enough of
	// it to say whose it is and whether it is the right one. Nothing was changed, and nobody may
	// take the object for gone, for somebody else's or for right.
	ErrUnknown = errors.New("not known, as the agent does not tell enough")
	// ErrFailed: the agent reports that it could not do it; [Error.Detail] is what it says.
	ErrFailed = errors.New("failed on the xPU")
	// ErrTimeout: the caller's context ended first. What was asked may or may not have been done,
	// or the agent may still be at it; [Error.Detail] is the last that was heard.
	ErrTimeout = errors.New("not done in time")
	// ErrUnsupported: the agent does not serve what this package needs.
	ErrUnsupported = errors.New("not supported by the agent")
)

// Error is a failed operation on one object of an OPI agent.
type Error struct {
	Kind   error  // one of the Err variables of this package
	Op     string // what was done: "create port", "list ports"
	ID     string // the object's OPI id; empty for operations on no single object
	Field  string // for ErrInvalid, the field that is wrong: "MAC", "VLAN"; else empty
	Detail string // what is wrong, for a person; may be empty
	Err    error  // the gRPC or context error behind it; may be nil
}

// Error is one line that names the operation, the object, the kind and the detail.
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

// maxDetail bounds what is kept of a text of an agent, in bytes.
const maxDetail = 512

// Short returns a text of an agent, cut so that it fits a condition or an event with other texts,
// and valid in UTF-8.
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

// failure turns the error of a call that ran under this context into an Error. nil stays nil.
func (c *Client) failure(ctx context.Context, op, id string, err error) error {
	if err == nil {
		return nil
	}

	s := status.Convert(err)
	if ended(ctx) {
		return timeout(ctx, op, id, Short(s.Message()))
	}

	if e, ok := errors.AsType[*Error](err); ok { // the dialect knows better
		named := *e
		named.Op, named.ID = op, id
		return &named
	}

	e := &Error{Kind: c.agent.Kind(err), Op: op, ID: id, Detail: Short(s.Message()), Err: err}
	if s.Code() == codes.Unauthenticated || s.Code() == codes.PermissionDenied {
		e.Detail = "the agent refuses this client: " + Short(s.Message())
	}

	return e
}

// outcomeUnknown tells whether the call may have been carried out although it failed.
func outcomeUnknown(err error) bool {
	if e, ok := errors.AsType[*Error](err); ok && e.Err == nil {
		return false // it was never made
	}
	switch status.Code(err) {
	case codes.NotFound, codes.InvalidArgument, codes.Unimplemented, codes.Unauthenticated,
		codes.PermissionDenied:
		return false
	default:
		return true
	}
}

// timeout is the error of an operation whose context ended. last is what the agent said last.
func timeout(ctx context.Context, op, id, last string) error {
	return &Error{
		Kind: ErrTimeout, Op: op, ID: id, Detail: last,
		Err: cmp.Or(context.Cause(ctx), context.DeadlineExceeded),
	}
}

// ended says whether the context has ended or its deadline has passed. An RPC has a context with
// the same deadline and a timer of its own, which may fire first.
func ended(ctx context.Context) bool {
	deadline, limited := ctx.Deadline()
	return ctx.Err() != nil || limited && !time.Now().Before(deadline)
}
