// SPDX-License-Identifier: Apache-2.0

// Package refusal has the errors that the agent answers: gRPC statuses with the details that
// AIP-193 asks for (https://google.aip.dev/193), so that programs need not read the text.
package refusal

import (
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Domain is the domain of the reasons (google.rpc.ErrorInfo).
const Domain = "opi-bridge.xpu.opiproject.org"

// Reason says why a call was refused. Clients may rely on it. An error without one of these reasons
// has the name of its code.
type Reason string

// The reasons. docs/reference/opi-bridge.md says when they are given.
const (
	InvalidID      Reason = "INVALID_ID"
	InvalidName    Reason = "INVALID_NAME"
	InvalidPage    Reason = "INVALID_PAGE"
	InvalidMask    Reason = "INVALID_UPDATE_MASK"
	InvalidSpec    Reason = "INVALID_SPEC"
	InvalidOptions Reason = "INVALID_OPTIONS"

	Missing        Reason = "MISSING"
	NetworkMissing Reason = "LOGICAL_BRIDGE_MISSING"
	OtherSpec      Reason = "EXISTS_WITH_OTHER_SPEC"
	VLANInUse      Reason = "VLAN_IN_USE"
	VNIInUse       Reason = "VNI_IN_USE"
	MACInUse       Reason = "MAC_IN_USE"
	AddressInUse   Reason = "ADDRESS_IN_USE"
	SubnetInUse    Reason = "SUBNET_IN_USE"
	NetworkHasSVI  Reason = "LOGICAL_BRIDGE_HAS_SVI"
	VRFMissing     Reason = "VRF_MISSING"
	VRFInUse       Reason = "VRF_IN_USE"
	NetworkInUse   Reason = "LOGICAL_BRIDGE_IN_USE"
	BeingDeleted   Reason = "BEING_DELETED"
	NotDeletedYet  Reason = "NOT_DELETED_YET"

	NoFunction Reason = "NO_FUNCTION_WITH_MAC"
	NoUplink   Reason = "NO_UPLINK"
	OtherVTEP  Reason = "OTHER_VTEP"
	NoTrunks   Reason = "NO_TRUNKS"
	NoL3VNI    Reason = "NO_L3_VNI"
	NoBGP      Reason = "NO_BGP"

	NoRule         Reason = "NO_RULE"
	NotInRule      Reason = "NOT_IN_RULE"
	ReadOnly       Reason = "READ_ONLY"
	LimitReached   Reason = "LIMIT_REACHED"
	StateFileFails Reason = "STATE_FILE_FAILS"
	Busy           Reason = "BUSY"
	NotCounted     Reason = "NOT_COUNTED"
	CountersFail   Reason = "COUNTERS_FAIL"
)

// maxText is how many bytes of a text are answered and logged. Texts repeat what clients sent. An
// answer has its text in two headers, in one of them with 3 bytes for some bytes, and gRPC's C core
// takes 8 KiB of headers by default (GRPC_ARG_MAX_METADATA_SIZE).
const maxText = 1 << 10

// New returns a gRPC status with a reason. It shortens a long text.
func New(code codes.Code, reason Reason, format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "..."
	}
	return withReason(status.New(code, text), reason)
}

// Complete returns the error with a reason: its own, or else the name of its code, such as
// "DEADLINE_EXCEEDED".
func Complete(err error) error {
	if err == nil || Of(err) != "" {
		return err
	}
	s := status.Convert(err)
	return withReason(s, Reason(upperSnake(s.Code().String())))
}

// Of returns the reason of an error, or "" if it has none.
func Of(err error) Reason {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == Domain {
			return Reason(info.GetReason())
		}
	}
	return ""
}

func withReason(s *status.Status, reason Reason) error {
	detailed, err := s.WithDetails(&errdetails.ErrorInfo{Reason: string(reason), Domain: Domain})
	if err != nil {
		return s.Err() // the status is OK, or has details of an unknown type
	}
	return detailed.Err()
}

// upperSnake turns the name of a code, such as "InvalidArgument", into a reason.
func upperSnake(name string) string {
	var text strings.Builder
	for i, r := range name {
		if i > 0 && 'A' <= r && r <= 'Z' {
			text.WriteByte('_')
		}
		fmt.Fprintf(&text, "%c", r)
	}
	return strings.ToUpper(text.String())
}
