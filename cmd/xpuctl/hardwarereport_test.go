// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestHardwareReportRefuses checks that a Function in use, or available to pods, is never touched.
func TestHardwareReportRefuses(t *testing.T) {
	free := nodestate.Function{
		ID: function.ID{Address: "0000:3b:02.7"}, Kind: function.VF,
		PF: "0000:3b:00.0", PFName: "ens1f0", Netdev: "no-such-netdev",
	}

	for name, c := range map[string]struct {
		change func(*nodestate.Function)
		want   string
	}{
		"in a pod": {func(f *nodestate.Function) {
			pod := nodestate.Pod{Namespace: "default", Name: "web"}
			f.Attachment = &nodestate.Attachment{State: "Attached", Pod: pod}
		}, "is Attached in pod default/web"},
		"in a pool": {func(f *nodestate.Function) {
			f.Pool = "fast"
		}, "belongs to DevicePool fast"},
		"PF":   {func(f *nodestate.Function) { f.Kind = function.PF }, "is no VF"},
		"gone": {func(f *nodestate.Function) { f.Gone = true }, "is not there"},
		"no netdev": {func(f *nodestate.Function) {
			f.Netdev, f.Driver = "", "vfio-pci"
		}, `its driver is "vfio-pci"`},
		"default route": {func(f *nodestate.Function) { f.DefaultRoute = true }, "default route"},
		"problem": {func(f *nodestate.Function) {
			f.Problems = []nodestate.Problem{{Message: "kept from others"}}
		}, "kept from others"},
		"not seen": {func(*nodestate.Function) {}, "cannot be read"},
	} {
		t.Run(name, func(t *testing.T) {
			f := free
			c.change(&f)
			state := &nodestate.State{Functions: []nodestate.Function{f}}
			_, err := chooseVF(state, "0000:3b:02.7")
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}

	if _, err := chooseVF(&nodestate.State{}, "0000:3b:02.7"); err == nil {
		t.Error("a Function that is not there is chosen")
	}
}

// TestHardwareReportFile: a file that cannot be written is found before a VF is touched. A failure
// leaves no file behind, and one that was there as it was.
func TestHardwareReportFile(t *testing.T) {
	dir := t.TempDir()
	old, fresh := filepath.Join(dir, "old.yaml"), filepath.Join(dir, "fresh.yaml")
	const before = "what an earlier report said"
	must.Succeed(t, os.WriteFile(old, []byte(strings.Repeat(before, 1000)), 0o600))
	card := personality.Personality{
		Name: "card", Title: "a card (mlx5_core)", PF: "mlx5_core", VF: "mlx5_core", Kernel: "6.12.1",
	}
	report := func(file string, failure error) (probed bool, err error) {
		c := &cobra.Command{}
		c.SetOut(io.Discard)
		c.SetErr(io.Discard)
		o := &reportOptions{file: file}
		err = o.report(c, func() (personality.Personality, error) {
			probed = true
			return card, failure
		})
		return probed, err
	}

	for _, file := range []string{dir, filepath.Join(dir, "none", "card.yaml")} {
		if probed, err := report(file, nil); probed || err == nil ||
			!strings.Contains(err.Error(), "--output-file") {
			t.Errorf("%s: VFs were touched: %t, error %v", file, probed, err)
		}
	}

	for _, file := range []string{old, fresh, "-", os.DevNull} {
		failure := errors.New("the VF is gone")
		if _, err := report(file, failure); !errors.Is(err, failure) {
			t.Errorf("%s: error %v, want the probe's", file, err)
		}
	}
	if text, err := os.ReadFile(old); err != nil || !strings.HasPrefix(string(text), before) {
		t.Errorf("after a failure the file has %q, %v", text, err)
	}
	if _, err := os.Stat(fresh); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a failure leaves a file: %v", err)
	}

	for _, file := range []string{old, fresh, "-", os.DevNull} {
		_, err := report(file, nil)
		must.Succeed(t, err)
	}
	for _, file := range []string{old, fresh} {
		text, err := os.ReadFile(file)
		must.Succeed(t, err)
		if _, err := personality.Parse(text); err != nil {
			t.Errorf("%s cannot be read: %v", file, err)
		}
	}
}
