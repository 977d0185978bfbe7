package inventory

import (
	"bytes"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/listen"
)

// sources are the kernel's events that a change of Functions causes.
var sources = [...]listen.Source{
	listen.Links,
	// Group 1 has the kernel's own uevents, group 2 what udev makes of them (lib/kobject_uevent.c).
	{Name: "uevent", Protocol: unix.NETLINK_KOBJECT_UEVENT, Groups: listen.Groups(1), Matters: ueventMatters},
	{
		Name: "routes", Protocol: unix.NETLINK_ROUTE, Groups: listen.Groups(unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE),
		Matters: routeMatters,
	},
}

// ueventMatters says whether a uevent, "add@/devices/..\0ACTION=add\0..\0SUBSYSTEM=pci\0..", is about a device
// that is read for Functions.
func ueventMatters(message []byte) bool {
	for variable := range bytes.SplitSeq(message, []byte{0}) {
		if subsystem, ok := bytes.CutPrefix(variable, []byte("SUBSYSTEM=")); ok {
			return slices.Contains([]string{"pci", "net", "virtio", "auxiliary", "infiniband", "vdpa"}, string(subsystem))
		}
	}
	return false
}

// routeMatters says whether a message of rtnetlink is about a default route: a struct nlmsghdr, then a struct
// rtmsg that begins with the family and the length of the destination (include/uapi/linux/rtnetlink.h).
func routeMatters(message []byte) bool {
	if len(message) < unix.SizeofNlMsghdr+unix.SizeofRtMsg {
		return false
	}
	switch binary.NativeEndian.Uint16(message[4:]) {
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return message[unix.SizeofNlMsghdr+1] == 0
	}
	return false
}
