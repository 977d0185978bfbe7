// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestParseEndpoint(t *testing.T) {
	for text, want := range map[string]string{
		"dpu:50151": "tcp dpu:50151", "[fe80::1%eth0]:8085": "tcp [fe80::1%eth0]:8085",
		"unix:/run/a": "unix /run/a", "unix:///run/a": "unix /run/a", "unix:a": "unix a",
		"dpu": "", "dpu:0": "", "dpu:65536": "", "dpu:x": "", ":1": "", "unix:": "",
		"unix://run/a": "", "unix:" + strings.Repeat("x", 108): "", "": "",
	} {
		got, err := ParseEndpoint(text)
		if (err == nil) != (want != "") || err == nil && got.Network+" "+got.Address != want {
			t.Errorf("%q: %+v, %v, want %q", text, got, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{"dpu:1", "unix:/x", "c1pf0vf0=02:11:22:33:44:55", "3000-3199"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if e, err := ParseEndpoint(text); err == nil {
			if again, err := ParseEndpoint(e.String()); err != nil || again != e {
				t.Errorf("%q: %+v is written %q, which is %+v, %v", text, e, e, again, err)
			}
		}
		if p, err := ParsePort(text); err == nil && !idForm.MatchString(p.ID) {
			t.Errorf("%q: port %+v", text, p)
		}
		limits := Range{2, 4093}
		if r, err := ParseRange(text, limits, 3); err == nil &&
			(r.First < limits.First || r.Last > limits.Last || r.size() < 3) {
			t.Errorf("%q: range %+v", text, r)
		}
	})
}

func TestLacks(t *testing.T) {
	full := Access([]byte{2, 0, 0, 0, 0, 1}, "b1")
	trunk := TrunkPort([]byte{2, 0, 0, 0, 0, 1}, "b1", "b2")
	for name, test := range map[string]struct {
		got, want proto.Message
		says      string
	}{
		"the same":      {full, full, ""},
		"another order": {trunk, TrunkPort([]byte{2, 0, 0, 0, 0, 1}, "b2", "b1"), ""},
		"more":          {full, &evpn.BridgePortSpec{MacAddress: full.MacAddress}, ""},
		"nothing":       {nil, full, "no spec"},
		"less": {
			&evpn.BridgePortSpec{}, full,
			"logical_bridges is , want b1; mac_address is , want 02:00:00:00:00:01; ptype",
		},
		"another VNI": {
			&evpn.LogicalBridgeSpec{Vni: proto.Uint32(1)},
			&evpn.LogicalBridgeSpec{Vni: proto.Uint32(2)}, "vni is 1, want 2",
		},
		"a zero VNI": {
			&evpn.LogicalBridgeSpec{}, &evpn.LogicalBridgeSpec{Vni: proto.Uint32(0)}, "",
		},
	} {
		got := Lacks(test.got, test.want)
		if (got == "") != (test.says == "") || !strings.Contains(got, test.says) {
			t.Errorf("%s: %q, want %q", name, got, test.says)
		}
	}
}

func TestNumbers(t *testing.T) {
	n := numbers{in: Range{10, 12}, foreign: map[uint32]bool{11: true}}
	for i, want := range []uint32{10, 12, 10} {
		if got, ok := n.next(); !ok || got != want {
			t.Errorf("%d. %d, %t, want %d", i, got, ok, want)
		}
	}
	n.foreign[10], n.foreign[12] = true, true
	if got, ok := n.next(); ok {
		t.Errorf("%d, want none", got)
	}
}

// TestCommands checks what commands of hooks get, and how they fail.
func TestCommands(t *testing.T) {
	dir := t.TempDir()
	script := func(name, text string) string {
		path := filepath.Join(dir, name)
		must.Succeed(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700))
		return path
	}
	out := filepath.Join(dir, "out")
	port := Port{ID: "ocabcp1", MAC: []byte{2, 17, 0, 0, 0, 1}}
	endpoint := Endpoint{Network: "tcp", Address: "dpu:1"}

	c := Commands{
		MakePort: script("make", `echo "$1 $OPI_CONFORMANCE_PORT_ID $OPI_CONFORMANCE_PORT_MAC `+
			`$OPI_CONFORMANCE_RUN $OPI_CONFORMANCE_ENDPOINT" >`+out) + "  word",
		RemovePort: script("fail", "echo no such port >&2; exit 3"),
		Restart:    script("hang", "exec sleep 100"),
		Timeout:    time.Minute,
	}
	hooks := c.Hooks("ocabc", endpoint)
	must.Succeed(t, hooks.MakePort(t.Context(), port))
	text, err := os.ReadFile(out)
	must.Succeed(t, err)
	if want := "word ocabcp1 02:11:00:00:00:01 ocabc dpu:1\n"; string(text) != want {
		t.Errorf("make got %q, want %q", text, want)
	}

	if err := hooks.RemovePort(t.Context(), port); err == nil ||
		!strings.Contains(err.Error(), "exit status 3: no such port") {
		t.Errorf("remove: %v", err)
	}

	c.Timeout = time.Millisecond
	if err := c.Hooks("ocabc", endpoint).Restart(t.Context(), Killed); err == nil ||
		!strings.Contains(err.Error(), "took longer than 1ms") {
		t.Errorf("restart: %v", err)
	}
	if none := (Commands{MakePort: " "}).Hooks("ocabc", endpoint); none.MakePort != nil ||
		none.RemovePort != nil || none.Restart != nil {
		t.Errorf("hooks without commands: %+v", none)
	}
}

// TestVerdicts checks what results of cases mean for their profile.
func TestVerdicts(t *testing.T) {
	const unserved = "not served: X"
	for name, test := range map[string]struct {
		results []Result
		want    Verdict
	}{
		"nothing":  {nil, NotTested},
		"passed":   {[]Result{{Outcome: Passed}}, Conformant},
		"deviates": {[]Result{{Outcome: Passed}, {Outcome: Deviates}}, Conformant},
		"no hook":  {[]Result{{Outcome: Passed}, {Outcome: Skipped, Text: "needs x"}}, Conformant},
		"hooks":    {[]Result{{Outcome: Skipped, Text: "needs x"}}, NotTested},
		"failed":   {[]Result{{Outcome: Passed}, {Outcome: Failed}}, NotConformant},
		"blocked":  {[]Result{{Outcome: Passed}, {Outcome: Blocked}}, NotConformant},
		"in part":  {[]Result{{Outcome: Passed}, {Outcome: Skipped, Text: unserved}}, Partial},
		"unserved": {[]Result{{Outcome: Skipped, Text: unserved}}, NotServed},
		"ended":    {[]Result{{Outcome: Passed}, {Outcome: NotRun}}, NotTested},
	} {
		for i := range test.results {
			test.results[i].Case = Case{Profile: L2Core, Name: "x/y"}
		}
		p := ProfileReport{Name: L2Core}
		p.count(append(test.results, Result{Case: Case{Profile: AIP}, Outcome: Failed}))
		if p.Verdict != test.want {
			t.Errorf("%s: %s, want %s", name, p.Verdict, test.want)
		}
	}
}

// TestReport checks that reports are read as they were written, whatever agents answered.
func TestReport(t *testing.T) {
	r := Report{Format: reportFormat, Profiles: []ProfileReport{{Name: L2Core}}}
	r.add(Result{Case: Case{Profile: L2Core, Name: "x/a"}, Outcome: Passed})
	r.add(Result{Case: Case{Profile: L2Core, Name: "x/b"}, Outcome: Failed, Text: "\x00\x1b\n<&\""})
	r.add(Result{Case: Case{Profile: L2Core, Name: "x/c"}, Outcome: Blocked})
	r.finish(time.Second, nil)

	var out bytes.Buffer
	must.Succeed(t, r.WriteJSON(&out))
	var again Report
	if err := json.Unmarshal(out.Bytes(), &again); err != nil || len(again.Cases) != 3 ||
		again.Cases[1] != r.Cases[1] || again.Profiles[0] != r.Profiles[0] {
		t.Errorf("%v: %+v\n%s", err, again, &out)
	}

	out.Reset()
	must.Succeed(t, r.WriteJUnit(&out))
	var suites junitSuites
	if err := xml.Unmarshal(out.Bytes(), &suites); err != nil || len(suites.Suites) != 1 ||
		suites.Suites[0].Tests != 3 || suites.Suites[0].Failures != 1 ||
		suites.Suites[0].Errors != 1 {
		t.Errorf("%v: %+v\n%s", err, suites, &out)
	}
}
