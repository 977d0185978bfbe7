// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// numberedPort returns the port of VF 1 in a VLAN.
func numberedPort(vlan uint16) opi.Port {
	return opi.Port{
		ID: "pf0vf1", MAC: net.HardwareAddr{2, 1, 0, 0, 0, 1}, Networks: []string{"net-blue"},
		VLANs: []uint16{vlan},
	}
}

// startPlugin returns an agent of dpu-operator, and a connected client.
func startPlugin(
	t *testing.T, plugin opitest.Plugin, change ...func(*opi.Config),
) (*opitest.DPUOperator, *opi.Client) {
	t.Helper()
	a := opitest.StartDPUOperator(t, plugin)
	cfg := a.Config()
	for _, c := range change {
		c(&cfg)
	}
	c := dial(t, cfg)
	ok(t, c.Check(t.Context()))
	return a, c
}

func wantCalls(t *testing.T, a *opitest.DPUOperator, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, a.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

// TestUnverifiedPort checks which calls an agent gets that reports nothing.
func TestUnverifiedPort(t *testing.T) {
	ctx := context.Background()
	ensure := func(t *testing.T, c *opi.Client, vlan uint16) {
		t.Helper()
		ok(t, c.EnsurePort(ctx, numberedPort(vlan)))
	}
	remove := func(t *testing.T, c *opi.Client) {
		t.Helper()
		ok(t, c.DeletePort(ctx, "pf0vf1"))
	}

	for name, test := range map[string]struct {
		do    func(t *testing.T, a *opitest.DPUOperator, c *opi.Client)
		calls []string
		ports map[string]string
	}{
		"created once on a connection": {
			func(t *testing.T, _ *opitest.DPUOperator, c *opi.Client) {
				ensure(t, c, 10)
				ensure(t, c, 10)
			}, []string{"create host0-1"}, map[string]string{"host0-1": "10"},
		},
		"deleted before it gets another VLAN": {
			func(t *testing.T, _ *opitest.DPUOperator, c *opi.Client) {
				ensure(t, c, 10)
				ensure(t, c, 20)
			}, []string{"create host0-1", "delete host0-1", "create host0-1"},
			map[string]string{"host0-1": "20"},
		},
		"deletion is always sent": {
			func(t *testing.T, _ *opitest.DPUOperator, c *opi.Client) {
				remove(t, c)
				ensure(t, c, 10)
				remove(t, c)
				remove(t, c)
			}, []string{"delete host0-1", "create host0-1", "delete host0-1", "delete host0-1"},
			map[string]string{},
		},
		"created again after a lost answer": {
			func(t *testing.T, a *opitest.DPUOperator, c *opi.Client) {
				a.Drop("create host0-1")
				wantError(t, c.EnsurePort(ctx, numberedPort(10)), opi.ErrUnavailable)
				ensure(t, c, 10)
			}, []string{"create host0-1", "create host0-1"}, map[string]string{"host0-1": "10"},
		},
		"deleted again after a lost creation could still come": {
			func(t *testing.T, a *opitest.DPUOperator, c *opi.Client) {
				a.Drop("create host0-1")
				wantError(t, c.EnsurePort(ctx, numberedPort(10)), opi.ErrUnavailable)
				remove(t, c)
			}, []string{"create host0-1", "delete host0-1", "delete host0-1"}, map[string]string{},
		},
		"created after a lost deletion cannot come any more": {
			func(t *testing.T, a *opitest.DPUOperator, c *opi.Client) {
				ensure(t, c, 10)
				a.Drop("delete host0-1")
				wantError(t, c.DeletePort(ctx, "pf0vf1"), opi.ErrUnavailable)
				short, cancel := context.WithTimeout(ctx, lateness/2)
				defer cancel()
				wantError(t, c.EnsurePort(short, numberedPort(10)), opi.ErrTimeout)
				ensure(t, c, 10)
			}, []string{"create host0-1", "delete host0-1", "create host0-1"},
			map[string]string{"host0-1": "10"},
		},
		"created again by a new connection": {
			func(t *testing.T, a *opitest.DPUOperator, c *opi.Client) {
				ensure(t, c, 10)
				a.Stop()
				a.Forget()
				ok(t, a.Run())
				must.EventuallySucceed(t, "the agent answers",
					func() error { return c.Check(ctx) })
				ensure(t, c, 10)
			}, []string{"create host0-1", "create host0-1"}, map[string]string{"host0-1": "10"},
		},
		"a refused deletion is no success": {
			func(t *testing.T, a *opitest.DPUOperator, c *opi.Client) {
				ensure(t, c, 10)
				a.Refuse("delete host0-1", "exit status 1")
				wantError(t, c.DeletePort(ctx, "pf0vf1"), opi.ErrFailed)
				a.Refuse("delete host0-1", "")
				remove(t, c)
			}, []string{"create host0-1", "delete host0-1", "delete host0-1"}, map[string]string{},
		},
	} {
		for _, plugin := range []opitest.Plugin{opitest.NetSec, opitest.Marvell, opitest.IPU} {
			t.Run(name+" by "+string(plugin), func(t *testing.T) {
				t.Parallel()
				a, c := startPlugin(t, plugin, func(cfg *opi.Config) {
					cfg.Dialect.Traits.Timing.Late = lateness
				})
				test.do(t, a, c)
				wantCalls(t, a, test.calls...)
				if diff := cmp.Diff(test.ports, a.Ports()); diff != "" {
					t.Errorf("ports (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// lateness is how long an agent of the tests may carry out a call whose answer was lost.
const lateness = 300 * time.Millisecond

// TestUnverifiedRefuses checks what an agent that reports nothing is never asked.
func TestUnverifiedRefuses(t *testing.T) {
	a, c := startPlugin(t, opitest.NetSec)
	ctx := t.Context()

	trunk, noVF, otherPF := numberedPort(10), numberedPort(10), numberedPort(10)
	trunk.Trunk, noVF.ID, otherPF.ID = true, "vf-0000-3b-02-1", "c1pf0vf1"
	wantError(t, c.EnsurePort(ctx, trunk), opi.ErrNoTrunks)
	for _, port := range []opi.Port{noVF, otherPF} {
		wantError(t, c.EnsurePort(ctx, port), opi.ErrInvalid)
	}
	wantError(t, c.DeletePort(ctx, "vf-0000-3b-02-1"), opi.ErrInvalid)
	vni := uint32(10)
	wantError(t, c.EnsureNetwork(ctx, opi.Network{ID: "net-blue", VLAN: 10, VNI: &vni}), opi.ErrInvalid)

	_, err := c.GetPort(ctx, "pf0vf1")
	wantError(t, err, opi.ErrUnsupported)
	_, err = c.ListPorts(ctx)
	wantError(t, err, opi.ErrUnsupported)
	_, err = c.ListNetworks(ctx)
	wantError(t, err, opi.ErrUnsupported)
	wantCalls(t, a)
}

// TestSlowUnverifiedPort checks that a call that takes longer than its caller waits is not repeated.
func TestSlowUnverifiedPort(t *testing.T) {
	a, c := startPlugin(t, opitest.NetSec)
	a.Slow(300 * time.Millisecond)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()

	wantError(t, c.EnsurePort(short, numberedPort(10)), opi.ErrTimeout)
	ok(t, c.EnsurePort(t.Context(), numberedPort(10)))
	wantCalls(t, a, "create host0-1")
}
