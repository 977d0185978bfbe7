// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/needs"
)

func TestMedian(t *testing.T) {
	for name, test := range map[string]struct {
		samples []float64
		want    float64
	}{
		"none": {nil, 0},
		"one":  {[]float64{3}, 3},
		"odd":  {[]float64{9, 1, 2}, 2},
		"even": {[]float64{4, 1, 100, 2}, 3},
	} {
		if got := median(test.samples); got != test.want {
			t.Errorf("%s: median is %g, want %g", name, got, test.want)
		}
	}
}

func TestMissed(t *testing.T) {
	three := []float64{1, 2, 9} // median 2
	for name, test := range map[string]struct {
		m    Measurement
		want bool
	}{
		"no goal":           {Measurement{Samples: three}, false},
		"less":              {Measurement{Samples: three, Goal: lessThan(3)}, false},
		"not less":          {Measurement{Samples: three, Goal: lessThan(2)}, true},
		"at most":           {Measurement{Samples: three, Goal: atMost(2)}, false},
		"more than at most": {Measurement{Samples: three, Goal: atMost(1)}, true},
		"nothing measured":  {Measurement{Goal: atMost(1)}, true},
		"within the factor": {
			Measurement{Samples: three, ReferenceSamples: []float64{1}, Goal: atMostTimes(2)},
			false,
		},
		"beyond the factor": {
			Measurement{Samples: three, ReferenceSamples: []float64{1}, Goal: atMostTimes(1.9)},
			true,
		},
		"factor of no reference": {Measurement{Samples: three, Goal: atMostTimes(100)}, true},
		"less than the factor": {
			Measurement{Samples: three, ReferenceSamples: []float64{2.1}, Goal: lessThanTimes(1)},
			false,
		},
		"the very factor": {
			Measurement{Samples: three, ReferenceSamples: []float64{2}, Goal: lessThanTimes(1)},
			true,
		},
	} {
		if got := test.m.missed(); got != test.want {
			t.Errorf("%s: missed is %t, want %t", name, got, test.want)
		}
	}
}

func TestPercentile(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i)
	}

	for name, test := range map[string]struct {
		samples []float64
		percent int
		want    float64
	}{
		"none":   {nil, 99, 0},
		"one":    {[]float64{7}, 99, 7},
		"middle": {hundred, 50, 50},
		"p99":    {hundred, 99, 99},
		"all":    {hundred, 100, 100},
	} {
		if got := percentile(test.samples, test.percent); got != test.want {
			t.Errorf("%s: percentile %d is %g, want %g", name, test.percent, got, test.want)
		}
	}
}

func TestWithout(t *testing.T) {
	if diff := cmp.Diff([]float64{8, 18},
		without([]float64{1, 2, 50}, []float64{10, 20})); diff != "" {
		t.Errorf("samples (-want +got):\n%s", diff)
	}
}

func TestUnits(t *testing.T) {
	for want, got := range map[string]string{
		"1.25 s": Seconds(1.25), "404 ms": Seconds(0.404), "2.5 ms": Seconds(0.0025),
		"652 us":  Seconds(0.000652),
		"47.1 MB": Bytes(47.1e6), "0": Count(0), "5.25": PerPod(5.25),
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestPrintTable(t *testing.T) {
	var out bytes.Buffer
	err := printTable(&out, []Measurement{
		{What: "fast", Unit: Seconds, Samples: []float64{0.001, 0.003, 0.002}, Reference: "bare",
			ReferenceSamples: []float64{0.001}, Goal: atMostTimes(3)},
		{What: "many", Unit: Count, Samples: []float64{5}, Goal: atMost(4),
			Details: []string{"5 create things"}},
	})

	if err != nil {
		t.Fatal(err)
	}

	want := []string{
		"what  median  min - max        reference     ratio  goal",
		"fast  2.0 ms  1.0 ms - 3.0 ms  bare: 1.0 ms  2.00x  <= 3x  ok",
		"many  5                        -                    <= 4   MISSED",
		"", "many:", "  5 create things",
		"", "2 measurements, 1 goals missed", "",
	}

	var got []string
	for line := range strings.Lines(out.String() + "\n") {
		got = append(got, strings.TrimRight(line, " \n"))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
}

func TestWritesSince(t *testing.T) {
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	line := func(at time.Time, user, verb, resource, subresource string) string {
		return `{"verb":"` + verb + `","user":{"username":"` + user +
			`"},"objectRef":{"resource":"` + resource +
			`","subresource":"` + subresource + `","namespace":"` + namespace +
			`"},"requestReceivedTimestamp":"` + at.Format(time.RFC3339Nano) + `"}`
	}

	path := filepath.Join(t.TempDir(), "audit.log")
	log := strings.Join([]string{
		line(begin.Add(-time.Second), agentUser, "create", "resourceslices", ""),
		line(begin, agentUser, "update", "resourceclaims", "status"),
		line(begin, "system:node:node1", "update", "pods", "status"),
		line(begin, "system:serviceaccount:xpu-system:xpu-controller", "update", "leases", ""),
		line(begin.Add(time.Second), agentUser, "update", "resourceclaims", "status"),
		`{"verb":"is being wri`,
	}, "\n")

	if err := os.WriteFile(path, []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}

	writes, err := writesSince(path, begin, product)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"2 update resourceclaims/status by xpu-agent"},
		kinds(writes, product)); diff != "" {
		t.Errorf("writes (-want +got):\n%s", diff)
	}
}

// TestQuick checks that every benchmark runs, not its speed.
func TestQuick(t *testing.T) {
	runQuick(t, nil,
		"start to 64 VFs published", "restart with 64 VFs, writes", "idle for 2s, writes",
		"memory (RSS) idle", "Prepare a claim",
		"Prepare 4 claims at once", "attach a Function", "detach a Function",
		"Port up at opi-bridge", "size of the program",
		"start to 64 VFs in 1 pool registered", "start to 64 VFs in 1 pool listed", "VF added",
		"VF removed",
		"Allocate one of 64 VFs, p50", "Allocate one of 64 VFs, p99",
		"direct mode, memory (RSS) idle",
		"start of the shim", "ADD by the shim", "DEL by the shim", "4 ADDs at once",
		"shim, memory (RSS)",
		"ADD with a network, direct", "ADD with a network, crd", "leader killed",
		"one pod's life, writes",
	)
}

// TestQuickScale checks the same for the benchmarks of growth.
func TestQuickScale(t *testing.T) {
	runQuick(t, []string{"--scale"}, "xPU flaps: RPCs to others", "start: 4 xPUs",
		"a Port more, 16 there", "24 Ports and claims",
		"bytes to an agent while 8 nodes start", "largest object",
		"claims of others with 255 kB each", "2 tenants, 8 there", "the broker's writes for each")
}

// TestQuickSchedule checks the same for xpuctl schedule.
func TestQuickSchedule(t *testing.T) {
	runQuick(t, []string{"--schedule"}, "xpuctl schedule, 1 VF, 10 nodes x 128 VFs, 90 % taken",
		"where there are 4 with 32 VFs")
}

func runQuick(t *testing.T, args []string, rows ...string) {
	t.Helper()
	needs.Root(t, "for network namespaces and containers")

	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}

	needs.Built(t, filepath.Join(root, "bin", "images", "xpu-agent.tar"), "images")

	program := filepath.Join(t.TempDir(), "bench")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program,
		".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	cmd := exec.CommandContext(t.Context(), program, append(args, "--quick")...)
	cmd.Dir = root
	var problems bytes.Buffer
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, &problems)
	}

	t.Logf("\n%s", out)
	for _, row := range rows {
		if !strings.Contains(string(out), row) {
			t.Errorf("the table lacks %q", row)
		}
	}
}

// TestAsDeployed checks that measured programs have the memory settings of deployed ones.
func TestAsDeployed(t *testing.T) {
	for file, variable := range asDeployed {
		deployment, err := os.ReadFile(filepath.Join("../../deploy", file))
		if err != nil {
			t.Fatal(err)
		}

		name, value, _ := strings.Cut(variable, "=")
		want := "{name: " + name + ", value: " + value + "}"
		if !strings.Contains(string(deployment), want) {
			t.Errorf("%s has no variable %s", file, want)
		}
	}
}
