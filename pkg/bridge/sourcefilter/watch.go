// SPDX-License-Identifier: Apache-2.0

package sourcefilter

import (
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// Watch calls changed whenever another program has removed something from the table, or may have.
// Call Restore then. Watch returns nil after Close.
func (f *Filter) Watch(changed func()) error {
	if f.unsupported != nil {
		return nil
	}
	for {
		messages, from, err := f.events.Receive()
		switch {
		case f.closed.Load():
			return nil
		case errors.Is(err, unix.ENOBUFS):
			changed()
			continue
		case err != nil:
			return fmt.Errorf("nftables events: %w", err)
		case from.Pid != nl.PidKernel:
			continue // any process may send to a netlink socket
		}

		byOthers := func(m syscall.NetlinkMessage) bool {
			return m.Header.Pid != f.portID && isRemoval(m)
		}
		if slices.ContainsFunc(messages, byOthers) {
			changed()
		}
	}
}

// isRemoval reports whether something was removed from a table with the name of the agent's.
func isRemoval(m syscall.NetlinkMessage) bool {
	switch m.Header.Type {
	case removal(unix.NFT_MSG_DELTABLE), removal(unix.NFT_MSG_DELCHAIN),
		removal(unix.NFT_MSG_DELRULE), removal(unix.NFT_MSG_DELSET),
		removal(unix.NFT_MSG_DELSETELEM):
	default:
		return false
	}

	const header = 4 // struct nfgenmsg
	if len(m.Data) < header ||
		m.Data[0] != unix.NFPROTO_BRIDGE && m.Data[0] != unix.NFPROTO_INET {
		return false
	}

	attrs, err := attribute.Parse(m.Data[header:])
	// The name of the table has the same number in all messages: NFTA_TABLE_NAME, NFTA_CHAIN_TABLE
	// and so on.
	return err != nil || attrs.Text(unix.NFTA_TABLE_NAME) == TableName
}

func removal(message uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | message }
