// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// suits returns an error if the interface asks a PF for what only PFs of another link type have.
func (r pfReport) suits(want function.Interface, pf *PF) error {
	switch {
	case r.infiniBand() && want.MAC != "":
		return fmt.Errorf("mac: VF %d of PF %s: %w", pf.VF, pf, function.ErrNoMAC)
	case !r.infiniBand() && want.VF.Identified():
		return fmt.Errorf("%s: must be absent: PF %s is no InfiniBand PF, and GUIDs are for the VFs of "+
			"these", guidFields(want.VF), pf)
	}
	return nil
}

func guidFields(c *function.VFConfig) string {
	return fields(field{"vf.nodeGUID", c.NodeGUID != ""}, field{"vf.portGUID", c.PortGUID != ""})
}

// guids returns the GUIDs that a PF must enforce for a VF after the attachment. now is what it
// enforces at present.
func (s Snapshot) guids(now VFState) *function.VFConfig {
	to := s.giveBack(now)
	return &function.VFConfig{NodeGUID: to.NodeGUID, PortGUID: to.PortGUID}
}

// errNotRead says that the driver of a VF does not have the GUID that the PF enforces.
var errNotRead = errors.New("its driver has not read it: most read GUIDs only when they are bound, so " +
	"set the GUIDs before the VF gets its driver, or bind the driver to it again")

// awaitGUIDs waits until a VF that is on the host has the GUIDs that the pod wants and the PF
// enforces. Its driver reports the port's in the address of the netdev, and the node's in sysfs, if
// it has made an RDMA device.
func (e *Engine) awaitGUIDs(
	ctx context.Context, p patience, before Snapshot, want *function.VFConfig,
) error {
	if !want.Identified() {
		return nil
	}

	late := p.atMost(e.settleTime)
	notRead := func(err error) bool { return errors.Is(err, errNotRead) }
	return late.retry(ctx, notRead, func() error {
		l, err := e.host.existing(before.Identity.Index)
		if err != nil {
			return fmt.Errorf("netdev %s: %w", before.Name, err)
		}
		if has := l.MAC.PortGUID(); want.PortGUID != "" && has != want.PortGUID {
			return fmt.Errorf("vf.portGUID: netdev %s has %s, and not %s: %w", l.Name,
				cmp.Or(has, "none"), want.PortGUID, errNotRead)
		}
		if want.NodeGUID == "" {
			return nil
		}
		return e.checkNodeGUID(before.Identity, want.NodeGUID)
	})
}

// checkNodeGUID returns an error if an RDMA device of the VF has another node GUID.
func (e *Engine) checkNodeGUID(who Identity, want function.GUID) error {
	dir := e.deviceDir(who).Dir("infiniband")
	names, _, err := dir.Names()
	if err != nil {
		return fmt.Errorf("vf.nodeGUID: RDMA devices: %w", err)
	}

	for _, name := range names {
		text, err := dir.Dir(name).Attribute("node_guid")
		if err != nil {
			return fmt.Errorf("vf.nodeGUID: RDMA device %s: %w", name, err)
		}
		has, err := parseSysfsGUID(text)
		if err != nil {
			return fmt.Errorf("vf.nodeGUID: RDMA device %s: %w", name, err)
		}
		if has != want {
			return fmt.Errorf("vf.nodeGUID: RDMA device %s has %s, and not %s: %w", name, has, want,
				errNotRead)
		}
	}

	return nil
}

// parseSysfsGUID parses a GUID of an RDMA device: "0011:2233:4455:6677" (node_guid_show of
// drivers/infiniband/core/sysfs.c).
func parseSysfsGUID(text string) (function.GUID, error) {
	digits, err := hex.DecodeString(strings.ReplaceAll(text, ":", ""))
	const size = 8
	if err != nil || len(digits) != size {
		return "", fmt.Errorf("node_guid %q: must be 8 bytes such as 0011:2233:4455:6677", text)
	}
	return function.GUID(net.HardwareAddr(digits).String()), nil
}
