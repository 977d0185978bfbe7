// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// lacking are the examples whose pods cannot start on every machine, or with simulated cards.
var lacking = map[string]struct {
	// needs is what the machine or the cluster must have.
	needs string
	// has reports whether the machine has it. Nil means that simulated cards and the demo's cluster
	// never have it.
	has func(*testing.T, *kept) bool
	// look is a command, and says what it prints in one line.
	look, says string
}{
	"bond": {"CONFIG_BONDING of the kernel", kernelHas("type bond"),
		"xpuctl explain pod bond", "the node's kernel has no bonds (CONFIG_BONDING, module bonding)"},
	"routed-networks": {"CONFIG_NET_VRF of the kernel", kernelHas("type vrf table 10"),
		"xpuctl explain pod web", "the kernel has no VRFs (CONFIG_NET_VRF, module vrf)"},
	"tagged-networks": {"an OPI agent with trunks, for which the kernel must have " +
		"CONFIG_BRIDGE_VLAN_FILTERING", kernelHas("type bridge vlan_filtering 1"),
		"xpuctl explain pod router", "NoTrunks: XPU xpu-"},
	"gpu-and-nic": {"a driver of GPUs", nil,
		"xpuctl explain pod gpu-and-nic", "there is no DeviceClass gpu.nvidia.com"},
	"dpdk": {"hugepages and an IOMMU", nil,
		"xpuctl explain pod dpdk", "the node is short of "},
	"rdma": {"VFs with RDMA devices", nil,
		"xpuctl explain pod rdma-client", "DeviceClass xpu-rdma, and can have 0"},
	"vdpa": {"VFs with vDPA devices, and hugepages", nil,
		"xpuctl explain pod vdpa", "the node is short of hugepages-1Gi: 1Gi requested, 0 left"},
}

// kernelHas returns whether the kernel makes a link.
func kernelHas(link string) func(*testing.T, *kept) bool {
	return func(t *testing.T, k *kept) bool {
		_, code, err := k.script(t.Context(), k.Source, "unshare --net ip link add probe "+link)
		must.Succeed(t, err)
		return code == 0
	}
}

// testExamples applies each example as it stands, and checks that its pods get Ready, or that the
// product says why not.
func (k *kept) testExamples(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(k.Source, "examples", "*.yaml"))
	must.Succeed(t, err)
	if len(files) < 10 {
		t.Fatalf("only %d examples were found", len(files))
	}

	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		k.try(t, name, func(t *testing.T) { k.apply(t, name) })
	}
	for name := range lacking {
		if _, err := os.Stat(filepath.Join(k.Source, "examples", name+".yaml")); err != nil {
			t.Errorf("lacking: %v", err)
		}
	}
}

func (k *kept) apply(t *testing.T, name string) {
	file := "examples/" + name + ".yaml"
	defer k.clear(t, file)
	out, code, err := k.script(t.Context(), k.Source, "kubectl apply -f "+file)
	must.Succeed(t, err)

	what, cannot := lacking[name]
	if cannot && (what.has == nil || !what.has(t, k)) {
		k.told(t, time.Minute, what.look, func(output string, _ int) string {
			if !strings.Contains(output, what.says) {
				return what.says
			}
			return ""
		})
		t.Logf("needs %s: %q", what.needs, what.says)
		return
	}

	if code != 0 {
		t.Fatalf("kubectl apply: %s", out)
	}
	k.told(t, 2*time.Minute, "kubectl get pods", func(output string, _ int) string {
		return unready(output)
	})
}

// unready returns what is missing in the output of kubectl get pods: pods, of which each is Ready.
func unready(output string) string {
	lines := strings.Split(strings.TrimSpace(output), "\n")
	if len(lines) < 2 {
		return "pods"
	}
	for _, line := range lines[1:] {
		if !strings.Contains(line, " 1/1 ") {
			return fmt.Sprintf("Ready in %q", line)
		}
	}
	return ""
}
