// SPDX-License-Identifier: Apache-2.0

package story

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestEnd checks that processes are ended whose programs are behind symbolic links, or are gone, and
// no others.
func TestEnd(t *testing.T) {
	built, link, links := t.TempDir(), filepath.Join(t.TempDir(), "bin"), t.TempDir()
	program := filepath.Join(built, "sleep")
	sleep, err := exec.LookPath("sleep")
	must.Succeed(t, err)
	content, err := os.ReadFile(sleep)
	must.Succeed(t, err)
	must.Succeed(t, os.WriteFile(program, content, 0o755))
	must.Succeed(t, os.Symlink(built, link))
	must.Succeed(t, os.Symlink(program, filepath.Join(links, "sleep")))

	for name, test := range map[string]struct {
		directories  []string
		isGone, want bool
	}{
		"a directory":            {[]string{built, ""}, false, true},
		"a link to a directory":  {[]string{"", link}, false, true},
		"links in a directory":   {[]string{links}, false, true},
		"a program that is gone": {[]string{link}, true, true},
		"another directory":      {[]string{t.TempDir()}, false, false},
		"no directory is given":  {[]string{"", ""}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(program, "60")
			must.Succeed(t, cmd.Start())
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			if test.isGone {
				must.Succeed(t, os.Remove(program))
				defer func() { must.Succeed(t, os.WriteFile(program, content, 0o755)) }()
			}

			must.Succeed(t, process{"sleep", cmd.Process.Pid}.end(t.Context(), test.directories...))
			if !test.want {
				must.Succeed(t, cmd.Process.Kill())
			}
			select {
			case err := <-ended:
				if isTerminated := err.Error() == "signal: terminated"; isTerminated != test.want {
					t.Errorf("%v, want the process to be ended: %t", err, test.want)
				}
			case <-time.After(10 * time.Second):
				t.Error("the process does not end")
				_ = cmd.Process.Kill()
			}
		})
	}
}

func TestGatesOff(t *testing.T) {
	const metrics = `# TYPE kubernetes_feature_enabled gauge
kubernetes_feature_enabled{name="DRAConsumableCapacity",stage="BETA"} 1
kubernetes_feature_enabled{name="DRADeviceBindingConditions",stage=""} 1
kubernetes_feature_enabled{name="DRADeviceTaintRules",stage="BETA"} 1
kubernetes_feature_enabled{name="DRADeviceTaints",stage="ALPHA"} 0
kubernetes_feature_enabled{name="DRAPartitionableDevices",stage="ALPHA"} 1
`
	if got := gatesOff(metrics); !slices.Equal(got, []string{"DRADeviceTaints", "DRAExtendedResource"}) {
		t.Errorf("off are %q", got)
	}
}
