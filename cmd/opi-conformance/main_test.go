// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/cases"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

var update = flag.Bool("update", false, "write the report of opi-bridge for the documents")

// programVariable makes the test binary run opi-conformance, in a network namespace of its own.
const programVariable = "XPU_TEST_OPI_CONFORMANCE"

func TestMain(m *testing.M) {
	if os.Getenv(programVariable) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// docsReport is the report of opi-bridge in the documents.
const docsReport = "../../docs/reference/opi-bridge-conformance.json"

// TestOPIBridge runs the program against opi-bridge with mTLS, with the hooks that the documents
// show. opi-bridge is killed again and again.
func TestOPIBridge(t *testing.T) {
	n, dir := netns.New(t), t.TempDir()
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skipf("the hooks need the program ip: scripts/preflight test installs it: %v", err)
	}
	bridge := filepath.Join(dir, "opi-bridge")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", bridge, "../opi-bridge")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	connectUplink(t, n)

	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		must.Succeed(t, os.WriteFile(path, data, 0o600))
		return path
	}
	ca := opitest.NewAuthority(t)
	cert, key := ca.Issue(t, "127.0.0.1")
	clientCert, clientKey := ca.Issue(t, "vendor")
	caFile := write("ca.crt", ca.PEM())
	agentArgs := []string{
		"--listen=0.0.0.0:50151", "--uplink=p0", "--representor=conf01*",
		"--data-plane=bridge-per-network", "--tls-cert", write("tls.crt", cert),
		"--tls-key", write("tls.key", key), "--tls-client-ca", caFile,
	}

	hooks, err := filepath.Abs("../../examples/opi-conformance")
	must.Succeed(t, err)
	report := filepath.Join(dir, "report.json")
	args := []string{
		"--endpoint", "127.0.0.1:50151", "--ca", caFile, "--cert", write("client.crt", clientCert),
		"--key", write("client.key", clientKey), "--prefix", "conf01", "--vtep", "198.51.100.1/24",
		"--make-port", hooks + "/make-port", "--remove-port", hooks + "/remove-port",
		"--wire", hooks + "/wire", "--restart-agent", hooks + "/restart-agent",
		"--implementation", "opi-bridge",
		"--report", report, "--junit", filepath.Join(dir, "report.xml"), "--run", withoutVRF,
	}

	executable, err := os.Executable()
	must.Succeed(t, err)
	must.Succeed(t, os.Symlink(executable, filepath.Join(dir, "opi-conformance")))
	env := append(os.Environ(), "AGENT_DIR="+dir, "OPI_BRIDGE="+bridge,
		"PATH="+dir+":"+os.Getenv("PATH"),
		"AGENT_ARGS="+strings.Join(agentArgs, " "), programVariable+"=1")
	t.Cleanup(func() { endAgent(t, filepath.Join(dir, "pid")) })
	output, err := inNamespace(t, n, env, exec.Command(hooks+"/start-agent"))
	if err != nil {
		t.Fatalf("start-agent: %v\n%s", err, output)
	}

	output, err = inNamespace(t, n, env, exec.Command("/proc/self/exe", args...))
	t.Logf("\n%s", verdicts(output))
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "log"))
		t.Fatalf("opi-conformance: %v\n%s\n%s", err, output, log)
	}
	checkReport(t, report)
	checkJUnit(t, filepath.Join(dir, "report.xml"))
}

// withoutVRF selects the cases that need no VRFs, which some kernels lack. The tests of pkg/bridge
// run all.
const withoutVRF = "/(logical-bridge|bridge-port|inventory|endpoint)/"

// verdicts returns the last part of the output.
func verdicts(output []byte) []byte {
	if i := bytes.LastIndex(output, []byte("PROFILE")); i >= 0 {
		return output[i:]
	}
	return output
}

// connectUplink makes the uplink p0, with an address and a carrier.
func connectUplink(t *testing.T, n *netns.Namespace) {
	t.Helper()
	netns.Connect(t, n, "p0", netns.New(t), "p0")
	link, err := n.Handle().LinkByName("p0")
	must.Succeed(t, err)
	address, err := netlink.ParseAddr("198.51.100.1/24")
	must.Succeed(t, err)
	must.Succeed(t, n.Handle().AddrAdd(link, address))
}

// inNamespace runs a command and returns its output.
func inNamespace(
	t *testing.T, n *netns.Namespace, env []string, command *exec.Cmd,
) (output []byte, err error) {
	t.Helper()
	command.Env = env
	var out bytes.Buffer
	command.Stdout, command.Stderr = &out, &out
	command.WaitDelay = time.Second
	err = n.Do(command.Start)
	if err == nil {
		err = command.Wait()
	}
	return out.Bytes(), err
}

// endAgent ends the agent whose process number is in a file.
func endAgent(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		return
	}
	var pid int
	must.Succeed(t, json.Unmarshal(bytes.TrimSpace(text), &pid))
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		t.Error(err)
	}
}

// checkReport checks that the report has every case, and that what the documents say still holds.
func checkReport(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	must.Succeed(t, err)
	var report conformance.Report
	must.Succeed(t, json.Unmarshal(text, &report))
	all := slices.DeleteFunc(cases.All(conformance.NewKinds()), func(c conformance.Case) bool {
		return !regexp.MustCompile(withoutVRF).MatchString(c.ID())
	})
	if len(report.Cases) != len(all) {
		t.Errorf("the report has %d cases, want %d", len(report.Cases), len(all))
	}
	if *update {
		report.Reproduce = documented(report.Reproduce)
		var out bytes.Buffer
		must.Succeed(t, report.WriteJSON(&out))
		must.Succeed(t, os.WriteFile(docsReport, out.Bytes(), 0o644))
	}

	text, err = os.ReadFile(docsReport)
	must.Succeed(t, err)
	var before conformance.Report
	must.Succeed(t, json.Unmarshal(text, &before))
	said := map[string]conformance.Outcome{}
	for _, c := range before.Cases {
		said[c.Name] = c.Outcome
	}
	for _, c := range report.Cases {
		if said[c.Name] == "" ||
			said[c.Name] == conformance.Passed && c.Outcome != conformance.Passed {
			t.Errorf("%s: %q, and %s says %q; write it anew with -update", c.Name, c.Outcome,
				docsReport, said[c.Name])
		}
	}
}

// TestPublishedReport checks that the report of opi-bridge with a VLAN-aware bridge, which is made in a
// guest, has every case, and that none failed.
func TestPublishedReport(t *testing.T) {
	const file = "../../docs/reference/opi-bridge-conformance-vlan-aware.json"
	text, err := os.ReadFile(file)
	must.Succeed(t, err)
	var report conformance.Report
	must.Succeed(t, json.Unmarshal(text, &report))

	said := map[string]conformance.Outcome{}
	for _, c := range report.Cases {
		said[c.Name] = c.Outcome
	}
	for _, c := range cases.All(conformance.NewKinds()) {
		switch outcome := said[c.ID()]; outcome {
		case conformance.Passed, conformance.Deviates, conformance.Skipped:
		default:
			t.Errorf("%s: %q; make %s anew: see test/conformance/report", c.ID(), outcome, file)
		}
	}
}

// documented returns a command line without the directories of a test.
func documented(args []string) []string {
	short := []string{"opi-conformance"}
	for _, arg := range args[1:] {
		if filepath.IsAbs(arg) {
			arg = filepath.Base(arg)
		}
		short = append(short, arg)
	}
	return short
}

func checkJUnit(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	must.Succeed(t, err)
	var suites struct {
		Suites []struct {
			Name  string `xml:"name,attr"`
			Tests int    `xml:"tests,attr"`
		} `xml:"testsuite"`
	}
	must.Succeed(t, xml.Unmarshal(text, &suites))
	if len(suites.Suites) != len(conformance.Profiles())-1 {
		t.Errorf("there are %d suites, want one for each profile but L3", len(suites.Suites))
	}
}

// TestFailure checks what a run says of an agent with faults, and its error.
func TestFailure(t *testing.T) {
	agent := opitest.Start(t)
	var out bytes.Buffer
	err := run(t, &out, "--endpoint", agent.Config().Endpoint, "--plaintext",
		"--run", "vlan-id-409[45]")
	if !errors.Is(err, errNo) {
		t.Errorf("got %v, want %v", err, errNo)
	}
	for _, want := range []string{
		"passed   L2-CORE/logical-bridge/vlan-id-4094-is-taken",
		"failed   L2-CORE/logical-bridge/vlan-id-4095-is-refused",
		"Create: OK with vlan_id:4095", "l2_xpu_infra_mgr.proto: the VLAN of the L2 domain",
		"L2-CORE  not conformant", "2 cases",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %q:\n%s", want, &out)
		}
	}
	if left := agent.Networks(); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestInterrupted checks that a run that is interrupted deletes what it made.
func TestInterrupted(t *testing.T) {
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.Held = true }) // what is waited for never comes
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		c := command([]string{"opi-conformance"})
		c.SetOut(io.Discard)
		c.SetArgs([]string{"--endpoint", agent.Config().Endpoint, "--plaintext"})
		ended <- c.ExecuteContext(ctx)
	}()

	must.Eventually(t, "the run has made something", func() bool {
		return len(agent.Networks()) > 0
	})
	cancel()
	if err := <-ended; !errors.Is(err, errNo) {
		t.Errorf("got %v, want %v", err, errNo)
	}
	if left := agent.Networks(); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestAnswerLost checks that an object is deleted of which the agent never told the name, whatever
// the agent puts before ids.
func TestAnswerLost(t *testing.T) {
	agent := opitest.Start(t)
	agent.DropNext("CreateLogicalBridge", 1)
	err := run(t, io.Discard, "--endpoint", agent.Config().Endpoint, "--plaintext",
		"--run", "logical-bridge/create-comes-up")
	if !errors.Is(err, errNo) {
		t.Errorf("got %v, want %v", err, errNo)
	}
	if left := agent.Networks(); len(left) > 0 || agent.Calls("CreateLogicalBridge") == 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestDeclared checks that what is claimed and not served fails.
func TestDeclared(t *testing.T) {
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) {
		for _, call := range []string{"Create", "Get", "Update", "Delete"} {
			b.Unimplemented = append(b.Unimplemented, call+"Vrf", call+"Svi")
		}
		b.Unimplemented = append(b.Unimplemented, "ListVrfs", "ListSvis")
	})
	endpoint := []string{"--endpoint", agent.Config().Endpoint, "--plaintext", "--run", "svi/get-"}
	if err := run(t, io.Discard, endpoint...); err != nil {
		t.Errorf("not declared: %v", err)
	}
	if err := run(t, io.Discard, append(endpoint, "--profiles", "l3")...); !errors.Is(err, errNo) {
		t.Errorf("declared: %v, want %v", err, errNo)
	}
}

// run runs the program.
func run(t *testing.T, out io.Writer, args ...string) error {
	t.Helper()
	c := command(append([]string{"opi-conformance"}, args...))
	c.SetOut(out)
	c.SetArgs(args)
	return c.ExecuteContext(t.Context())
}

func TestRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		args string
		says string
	}{
		"no endpoint":       {"--plaintext", "--endpoint is required"},
		"no port":           {"--endpoint dpu --plaintext", "must be host:port"},
		"port 0":            {"--endpoint dpu:0 --plaintext", "1-65535"},
		"no authority":      {"--endpoint dpu:1", "give --ca, or --plaintext"},
		"authority and not": {"--endpoint dpu:1 --ca x --plaintext", "none of the others can be"},
		"missing file":      {"--endpoint dpu:1 --ca /no/such", "--ca: open /no/such"},
		"half a pair":       {"--endpoint dpu:1 --ca x --cert y", "key"},
		"profile":           {"--list --profiles L4", `"L4": must be of L2-CORE`},
		"regexp":            {"--list --run (", "--run: "},
		"nothing":           {"--list --run no-such-case", "no case is selected"},
		"port id":           {"--endpoint a:1 --plaintext --ports P_1", "--ports: "},
		"port MAC":          {"--endpoint a:1 --plaintext --ports abcd=01:00:00:00:00:01", "unicast"},
		"VLANs":             {"--endpoint a:1 --plaintext --vlans 1-9", "--vlans: "},
		"VLANs, few":        {"--endpoint a:1 --plaintext --vlans 10-19", "at least 44"},
		"VTEP":              {"--endpoint a:1 --plaintext --vtep x", "--vtep: "},
		"prefix":            {"--endpoint a:1 --plaintext --prefix X", "prefix"},
		"scale":             {"--endpoint a:1 --plaintext --scale 0", "scale 0"},
		"hook timeout":      {"--endpoint a:1 --plaintext --hook-timeout 0", "--hook-timeout"},
		"arguments":         {"--list all", "all"},
		"no agent":          {"--endpoint 127.0.0.1:1 --plaintext --settle 1ms", "does not answer"},
	} {
		t.Run(name, func(t *testing.T) {
			err := run(t, io.Discard, strings.Fields(test.args)...)
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want an error with %q", err, test.says)
			}
		})
	}
}

func TestList(t *testing.T) {
	var out bytes.Buffer
	must.Succeed(t, run(t, &out, "--list"))
	lines := strings.Count(out.String(), "\n")
	if all := cases.All(conformance.NewKinds()); lines != len(all) {
		t.Errorf("%d lines, want %d", lines, len(all))
	}
}
