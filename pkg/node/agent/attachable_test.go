// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestUsedByTheHost: a VF that is a port of a host's bridge is neither offered nor attached, until
// it leaves the bridge.
func TestUsedByTheHost(t *testing.T) {
	s := newDirectSite(t)
	vf, other := s.vfs[0], s.vfs[1]
	p := newPod(t, "pod1")
	s.start()
	s.wantHealthy(vf, other)

	name := s.stateOf(vf).Netdev
	link, err := netlink.LinkByName(name)
	must.Succeed(t, err)
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "host-br"
	bridge := &netlink.Bridge{LinkAttrs: attributes}
	must.Succeed(t, netlink.LinkAdd(bridge))
	defer func() { _ = netlink.LinkDel(bridge) }()

	must.Succeed(t, netlink.LinkSetMaster(link, bridge))
	s.wantHealthy(other)
	if problems := s.stateOf(vf).Problems; len(problems) != 1 ||
		problems[0].Taint != v1alpha1.TaintInUse {
		t.Errorf("problems %+v, want %s", problems, v1alpha1.TaintInUse)
	}

	_, err = s.give(p.name, vf)
	if err == nil {
		t.Error("the VF is allocated although the host uses it")
	}

	_, err = s.add(p, vf)
	wantError(t, "ADD", err, cniserver.CodeAttach, "netdev "+name+" is a port of bridge host-br")
	if left := s.stateOf(vf).Attachment; left != nil {
		t.Errorf("a refused ADD left %+v", left)
	}

	must.Succeed(t, netlink.LinkSetNoMaster(link))
	s.wantHealthy(vf, other)
	s.mustAdd(p, vf)
	s.wantHealthy(vf, other) // use by a pod is not use by the host
	s.del(p, vf)
	must.Succeed(t, netlink.LinkDel(bridge))
	s.endClean()
}

// TestVFWithoutDriver: a VF without a driver is neither offered nor attached.
func TestVFWithoutDriver(t *testing.T) {
	s := newDirectSite(t)
	s.declare(byDevicePlugin(v1alpha1.ProvisionAtAdd))
	vf, other := s.vfs[0], s.vfs[1]
	must.Succeed(t,
		os.Remove(filepath.Join(s.config.SysRoot, "bus/pci/devices", string(vf.Address), "driver")))
	p := newPod(t, "pod1")
	s.start()
	s.wantHealthy(other)
	if problems := s.stateOf(vf).Problems; len(problems) != 1 ||
		problems[0].Taint != v1alpha1.TaintFault {
		t.Errorf("problems %+v, want %s", problems, v1alpha1.TaintFault)
	}

	_, err := s.add(p, vf)
	wantError(t, "ADD", err, cniserver.CodeAttach, "the Function has no driver")
	s.mustAdd(p, other)
	s.del(p, other)
}
