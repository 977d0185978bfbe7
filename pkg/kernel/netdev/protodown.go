// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"math"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// ProtoDown says whether a protocol holds a netdev down, and holds the bits of the reasons
// (IFLA_PROTO_DOWN). A netdev that is held down has no carrier. Only some kinds of netdevs support
// it, such as macvlan and vxlan.
type ProtoDown struct {
	On     bool   `json:"on,omitempty"`
	Reason uint32 `json:"reason,omitempty"`
}

// protoDownOf reads the attributes of an RTM_NEWLINK. It returns nil if the kernel does not report
// the state.
func protoDownOf(attrs attribute.Set) *ProtoDown {
	if !attrs.Has(unix.IFLA_PROTO_DOWN) {
		return nil
	}
	reason, _ := attribute.Parse(attrs[unix.IFLA_PROTO_DOWN_REASON]) // absent without a reason
	return &ProtoDown{
		On:     attrs.Uint8(unix.IFLA_PROTO_DOWN) != 0,
		Reason: reason.Uint32(unix.IFLA_PROTO_DOWN_REASON_VALUE),
	}
}

// reason returns the attribute that sets exactly these reasons.
func (p ProtoDown) reason() *nl.RtAttr {
	reason := nl.NewRtAttr(unix.IFLA_PROTO_DOWN_REASON|unix.NLA_F_NESTED, nil)
	reason.AddRtAttr(unix.IFLA_PROTO_DOWN_REASON_MASK, nl.Uint32Attr(math.MaxUint32))
	reason.AddRtAttr(unix.IFLA_PROTO_DOWN_REASON_VALUE, nl.Uint32Attr(p.Reason))
	return reason
}

// state returns the attribute that sets whether the netdev is held down.
func (p ProtoDown) state() *nl.RtAttr {
	on := byte(0)
	if p.On {
		on = 1
	}
	return nl.NewRtAttr(unix.IFLA_PROTO_DOWN, []byte{on})
}
