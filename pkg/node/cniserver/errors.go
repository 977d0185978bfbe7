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
	// the shim speaks another version of the contract; the request was not looked at
	CodeVersion    uint = 100 + iota
	CodeNoFunction      // the node does not have the Function, or no longer has it
	CodeNotOffered      // no pool with publish: DevicePlugin has the Function
	CodeTaken           // another pod, claim or interface has the Function
	// the xPU does not serve the Function; the message has the xPU's reason
	CodeProvision
	// the Function could not be configured as the pod wants; it is on the host again
	CodeAttach
	CodeRelease // the Function is not back yet; DEL and GC are to be repeated
	CodeCheck   // the interface is not what was attached
	CodeJournal // the request could not be written down; nothing was done
)

// fail makes an error with a code. The message is formatted as by [fmt.Errorf].
func fail(code uint, format string, args ...any) error {
	return &types.Error{Code: code, Msg: fmt.Errorf(format, args...).Error()}
}

// failed makes the reply for an error, with the code for an error that has none. Its text may have
// what a tenant wrote, and is cut where it is long.
func failed(code uint, err error) wire.Reply {
	coded, ok := errors.AsType[*types.Error](err)
	if !ok {
		coded = &types.Error{Code: code, Msg: err.Error()}
	}
	return wire.Reply{Error: &types.Error{
		Code: coded.Code, Msg: bounded(coded.Msg), Details: bounded(coded.Details),
	}}
}
