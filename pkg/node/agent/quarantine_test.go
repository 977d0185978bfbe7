// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// rebind binds another driver to a Function, and returns the driver that was bound.
func (s *site) rebind(f function.ID, driver string) (before string) {
	s.t.Helper()
	link := filepath.Join(s.config.SysRoot, "bus/pci/devices", string(f.Address), "driver")
	old, err := os.Readlink(link)
	must.Succeed(s.t, err)
	must.Succeed(s.t, os.Remove(link))
	must.Succeed(s.t, os.Symlink(filepath.Join(filepath.Dir(old), driver), link))

	// A real driver changes netdevs, which makes the inventory scan again.
	signal := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "signal"}}
	must.Succeed(s.t, errors.Join(netlink.LinkAdd(signal), netlink.LinkDel(signal)))

	return filepath.Base(old)
}

// TestDriverLeftByARuntime: a VM runtime bound another driver to the Function of its pod, and did
// not restore it. The pod ends, and its Port is deleted. No other pod gets the Function before it
// has its own driver again.
func TestDriverLeftByARuntime(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		vf := s.vfs[0]
		s.start()
		s.wantHealthy(s.vfs...)
		p, next := newPod(t, "pod1"), newPod(t, "pod2")
		_, err := s.give(p.name, vf)
		must.Succeed(t, err)
		s.mustAdd(p, vf)
		own := s.rebind(vf, "vfio-pci")
		s.del(p, vf)

		const reason = "driver is vfio-pci, was "
		q := s.stateOf(vf).Attachment.Quarantine
		if q == nil || q.Reason != "WrongDriver" || q.Message != reason+own {
			t.Fatalf("quarantine %+v, want one with %q", q, reason+own)
		}

		s.wantHealthy(s.vfs[1])
		s.eventually("the Port is gone", func() bool { return len(s.opi.Ports()) == 0 })
		if _, err := s.give(next.name, vf); err == nil ||
			!strings.Contains(err.Error(), vf.String()) {
			t.Errorf("Allocate: %v, want a refusal", err)
		}

		_, err = s.add(next, vf)
		wantError(t, "ADD", err, cniserver.CodeTaken,
			"is quarantined, as it did not come back as it was from pod default/pod1: "+reason+own)
		wish := nodestate.Release{Function: vf}
		if _, err := s.administrators().Release(t.Context(), wish); err == nil ||
			!strings.Contains(err.Error(), "is still quarantined: "+reason) {
			t.Errorf("released: %v", err)
		}

		s.pods.Set()
		s.rebind(vf, own)
		outcome, err := s.administrators().Release(t.Context(), wish)
		if err != nil || outcome != "Function "+vf.String()+": is as it was" {
			t.Errorf("outcome %q, error %v", outcome, err)
		}

		s.wantHealthy(s.vfs...)
		s.wantPorts()
	})
}
