// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
)

// Codes of errors that the CNI specification has no code for.
const (
	// CodeVersion: the shim uses another version of the protocol. The request was not read.
	CodeVersion uint = 100 + iota
	// CodeNoFunction: the node does not have the Function, or no longer has it.
	CodeNoFunction
	// CodeNotOffered: no pool with publish: DevicePlugin has the Function.
	CodeNotOffered
	// CodeTaken: another pod, claim or interface has the Function.
	CodeTaken
	// CodeProvision: the xPU does not serve the Function. The message has the xPU's reason.
	CodeProvision
	// CodeAttach: the Function could not be configured as the pod asks. It is on the host again.
	CodeAttach
	// CodeRelease: the Function is not back yet. DEL and GC have to be repeated.
	CodeRelease
	// CodeCheck: the interface differs from what was attached.
	CodeCheck
	// CodeJournal: the request could not be written to the journal. Nothing was done.
	CodeJournal
)

// fail returns an error with a code. The message is formatted as by [fmt.Errorf].
func fail(code uint, format string, args ...any) error {
	return &types.Error{Code: code, Msg: fmt.Errorf(format, args...).Error()}
}

// errorReply returns the reply for an error. An error without a code gets the given code. Long
// texts are cut, because they may contain text of a tenant.
func errorReply(code uint, err error) wire.Reply {
	coded, ok := errors.AsType[*types.Error](err)
	if !ok {
		coded = &types.Error{Code: code, Msg: err.Error()}
	}
	return wire.Reply{Error: &types.Error{
		Code: coded.Code, Msg: bounded(coded.Msg), Details: bounded(coded.Details),
	}}
}
