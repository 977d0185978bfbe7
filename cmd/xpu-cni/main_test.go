// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// ipamVersion is the version of the IPAM plugins of containernetworking/plugins.
const ipamVersion = "v1.9.1"

// built is a directory with the shim as it is shipped and real IPAM plugins. It is for CNI_PATH.
var built string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "xpu-cni")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}

	built = dir
	if err = build(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}

	code := 1
	if err == nil {
		code = m.Run()
	}

	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func build(dir string) error {
	plugins := "github.com/containernetworking/plugins/plugins/ipam/"
	for _, args := range [][]string{
		{"build", "-ldflags", "-s -w", "-o", filepath.Join(dir, "xpu-cni"), "."},
		{"install", plugins + "host-local@" + ipamVersion},
		{"install", plugins + "static@" + ipamVersion},
	} {
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "GOBIN="+dir, "CGO_ENABLED=0")
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, output)
		}
	}

	return nil
}

// TestSize: the shim must be small, because it is copied to every node and started for every
// interface of every pod.
func TestSize(t *testing.T) {
	info, err := os.Stat(filepath.Join(built, "xpu-cni"))
	if err != nil {
		t.Fatal(err)
	}
	if limit := int64(5_000_000); info.Size() >= limit {
		t.Errorf("the shim has %d bytes, fewer than %d are wanted", info.Size(), limit)
	}
}

// TestImports: the shim imports no package that is large, or that works on devices or clusters.
func TestImports(t *testing.T) {
	output, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}

	packages := strings.Fields(string(output))
	allowed := regexp.MustCompile(`^(github\.com/containernetworking/cni/pkg/(ns|skel|types|utils|version)` +
		`|github\.com/vishvananda/netns|golang\.org/x/sys/unix` +
		`|github\.com/opiproject/xpu-device-plugin/(cni/wire|cni|cmd/xpu-cni|pkg/kernel/uptime|pkg/version))(/|$)`)
	forbidden := regexp.MustCompile(
		`^(net/http|net/rpc|html|reflect/internal|crypto/tls|database)(/|$)`,
	)
	if !slices.Contains(packages, "github.com/opiproject/xpu-device-plugin/cni") {
		t.Fatalf("this is not the shim: %q", packages)
	}

	for _, path := range packages {
		first, _, _ := strings.Cut(path, "/")
		foreign := strings.Contains(first, ".")
		if foreign && !allowed.MatchString(path) || forbidden.MatchString(path) {
			t.Errorf("the shim needs %s", path)
		}
	}
}

func TestAbout(t *testing.T) {
	for _, args := range [][]string{nil, {"--version"}, {"--help"}} {
		cmd := exec.Command(filepath.Join(built, "xpu-cni"), args...)
		cmd.Env = []string{}
		output, err := cmd.CombinedOutput()
		if err != nil || !strings.HasPrefix(string(output), "xpu-cni ") ||
			!strings.Contains(string(output), "1.1.0") {
			t.Errorf("%q: %v, %s", args, err, output)
		}
	}
}

// node is an agent that remembers which container has which interface, like the real one, and the
// files that one network needs.
type node struct {
	t       testing.TB
	dir     string
	ipam    map[string]any
	version string

	mutex    sync.Mutex
	listener net.Listener
	// attached has the results of ADD by container.
	attached map[string]json.RawMessage
	answer   func(wire.Request) *wire.Reply

	installed sync.Once
}

// startNode starts a node whose networks have addresses from an IPAM plugin.
func startNode(t testing.TB, ipam map[string]any) *node {
	t.Helper()
	dir := must.SocketDir(t)
	n := &node{t: t, dir: dir, ipam: ipam, version: "1.1.0", attached: map[string]json.RawMessage{}}
	n.start()
	t.Cleanup(n.stop)
	return n
}

func (n *node) socket() string { return filepath.Join(n.dir, "s") }
func (n *node) spool() string  { return filepath.Join(n.dir, "spool") }

// start starts the agent, and stop stops it.
func (n *node) start() {
	n.t.Helper()
	listener, err := net.Listen("unix", n.socket())
	if err != nil {
		n.t.Fatal(err)
	}

	n.listener = listener
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go n.handle(conn)
		}
	}()
}

func (n *node) stop() { n.listener.Close() }

func (n *node) handle(conn net.Conn) {
	defer conn.Close()
	data, err := io.ReadAll(conn)
	if err != nil {
		return // the shim was killed
	}

	var request wire.Request
	if err := json.Unmarshal(data, &request); err != nil {
		n.t.Errorf("request %q: %v", data, err)
		return
	}

	reply := n.serve(request)
	reply.Version = wire.Version
	_ = json.NewEncoder(conn).Encode(reply) // the shim may be gone
}

func (n *node) serve(request wire.Request) wire.Reply {
	n.mutex.Lock()
	answer := n.answer
	n.mutex.Unlock()

	if answer != nil {
		if reply := answer(request); reply != nil {
			return *reply
		}
	}

	n.mutex.Lock()
	defer n.mutex.Unlock()

	before, known := n.attached[request.ContainerID]
	switch request.Command {
	case wire.Add:
		if !known {
			before = result(n.t, request)
			n.attached[request.ContainerID] = before
		}
		return wire.Reply{Result: before}
	case wire.Result:
		if !known {
			return wire.Reply{
				Error: &types.Error{Code: types.ErrUnknownContainer, Msg: "nothing is attached"},
			}
		}
		return wire.Reply{Result: before}
	case wire.Del:
		delete(n.attached, request.ContainerID)
	}

	return wire.Reply{}
}

// on makes the agent answer with a function, if the function returns an answer.
func (n *node) on(answer func(wire.Request) *wire.Reply) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.answer = answer
}

// result returns the result of an interface with the addresses of the IPAM plugin.
func result(t testing.TB, request wire.Request) json.RawMessage {
	fields := map[string]any{"cniVersion": "1.1.0"}
	if request.IPAM != nil {
		if err := json.Unmarshal(request.IPAM, &fields); err != nil {
			t.Error(err)
		}
	}

	fields["interfaces"] = []any{map[string]any{"name": request.IfName, "sandbox": request.NetNS}}
	data, err := json.Marshal(fields)
	if err != nil {
		t.Error(err)
	}

	return data
}

// attachments returns the number of containers that the agent has.
func (n *node) attachments() int {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return len(n.attached)
}

// shim returns the binary as it is installed on the node, next to the file that says where the
// agent is. It may be called concurrently.
func (n *node) shim() string {
	binary := filepath.Join(n.dir, "xpu-cni")
	n.installed.Do(func() {
		n.t.Cleanup(func() { os.Remove(binary) })
		text, err := json.Marshal(cni.Paths{Socket: n.socket(), SpoolDir: n.spool()})
		if err == nil {
			err = os.WriteFile(cni.PathsFile(binary), text, 0o644)
		}
		if err == nil {
			err = os.Link(filepath.Join(built, "xpu-cni"), binary)
		}
		if err != nil {
			n.t.Error(err)
		}
	})

	return binary
}

// cni returns the shim as a runtime starts it.
func (n *node) cni(command, container string) *exec.Cmd {
	config := map[string]any{
		"cniVersion": n.version, "name": "net", "type": "xpu-cni",
		"deviceID": "0000:3b:02.1", "ipam": n.ipam,
	}

	if command == "GC" {
		config["cni.dev/valid-attachments"] = []any{}
	}

	data, err := json.Marshal(config)
	if err != nil {
		n.t.Fatal(err)
	}

	cmd := exec.Command(n.shim())
	cmd.Env = []string{
		"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + container, "CNI_IFNAME=net1",
		"CNI_NETNS=" + filepath.Join(n.dir, "netns-"+container), "CNI_PATH=" + built,
	}

	cmd.Stdin = bytes.NewReader(data)
	return cmd
}

// run runs the shim to its end, and returns the result or the error that it printed.
func (n *node) run(command, container string) (*types100.Result, error) {
	var stdout, stderr bytes.Buffer
	cmd := n.cni(command, container)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		var said types.Error
		if wrong := json.Unmarshal(stdout.Bytes(), &said); wrong != nil {
			return nil, fmt.Errorf("%w; %w: %s%s", err, wrong, stdout.Bytes(), stderr.Bytes())
		}
		return nil, &said
	}

	if command != "ADD" {
		if stdout.Len() != 0 {
			return nil, fmt.Errorf("%s has a result: %s", command, stdout.Bytes())
		}
		return nil, nil
	}

	result, err := types100.NewResult(stdout.Bytes())
	if err != nil {
		return nil, err
	}

	return result.(*types100.Result), nil
}

// must is run for a command that must succeed.
func (n *node) must(command, container string) *types100.Result {
	n.t.Helper()
	result, err := n.run(command, container)
	if err != nil {
		n.t.Fatalf("%s of %s: %v", command, container, err)
	}
	return result
}

// reserved returns the addresses that host-local has reserved.
func (n *node) reserved() []string {
	n.t.Helper()
	files, err := filepath.Glob(filepath.Join(n.dir, "ipam/net/*.*"))
	if err != nil {
		n.t.Fatal(err)
	}

	var reserved []string
	for _, file := range files {
		if name := filepath.Base(file); !strings.HasPrefix(name, "last_reserved_ip") {
			reserved = append(reserved, name)
		}
	}

	return reserved
}

// hostLocal starts a node with the IPAM plugin host-local.
func hostLocal(t testing.TB) *node {
	t.Helper()
	n := startNode(t, nil)
	n.ipam = map[string]any{
		"type": "host-local", "dataDir": filepath.Join(n.dir, "ipam"), "resolvConf": "",
		"ranges": []any{[]any{map[string]any{"subnet": "192.0.2.0/24"}}},
	}
	return n
}

func (n *node) check(attachments int, reserved ...string) {
	n.t.Helper()
	if got := n.attachments(); got != attachments {
		n.t.Errorf("%d attachments, want %d", got, attachments)
	}
	if got := n.reserved(); !slices.Equal(got, reserved) {
		n.t.Errorf("reserved addresses: %q, want %q", got, reserved)
	}
}

func TestHostLocal(t *testing.T) {
	n := hostLocal(t)
	result := n.must("ADD", "c1")
	if len(result.IPs) != 1 || result.IPs[0].Address.String() != "192.0.2.2/24" {
		t.Errorf("addresses are %v, want 192.0.2.2/24", result.IPs)
	}
	if len(result.Interfaces) != 1 || result.Interfaces[0].Name != "net1" {
		t.Errorf("interfaces are %v, want net1", result.Interfaces)
	}

	n.check(1, "192.0.2.2")
	for _, command := range []string{"CHECK", "STATUS", "GC"} {
		n.must(command, "c1")
	}

	for range 2 {
		n.must("DEL", "c1")
		n.check(0)
	}
}

func TestStatic(t *testing.T) {
	n := startNode(t, map[string]any{"type": "static", "addresses": []any{
		map[string]any{"address": "192.0.2.7/24", "gateway": "192.0.2.1"},
		map[string]any{"address": "2001:db8::7/64"},
	}})
	for _, version := range []string{"1.0.0", "1.1.0"} {
		n.version = version
		result := n.must("ADD", "c1")
		var got []string
		for _, ip := range result.IPs {
			got = append(got, ip.Address.String())
		}
		if want := []string{"192.0.2.7/24", "2001:db8::7/64"}; !slices.Equal(got, want) ||
			result.CNIVersion != version {
			t.Errorf("%s: version %s, addresses %q, want %q", version, result.CNIVersion, got, want)
		}

		n.must("DEL", "c1")
	}
}

func TestStaticWithoutAddress(t *testing.T) {
	n := startNode(t, map[string]any{"type": "static"})
	_, err := n.run("ADD", "c1")
	var said *types.Error
	if !errors.As(err, &said) || said.Code != types.ErrInvalidNetworkConfig {
		t.Fatalf("error is %v, want one with code %d", err, types.ErrInvalidNetworkConfig)
	}
	if !strings.Contains(said.Details, "no address") {
		t.Errorf("error is %v, want that there is no address", err)
	}
}

func TestSecondAddHasTheFirstResult(t *testing.T) {
	n := hostLocal(t)
	first, second := n.must("ADD", "c1"), n.must("ADD", "c1")
	if got, want := second.IPs[0].Address.String(), first.IPs[0].Address.String(); got != want {
		t.Errorf("the second ADD has the address %s, the first %s", got, want)
	}
	n.check(1, "192.0.2.2")
}

func TestAddressesOfAFailedAddAreFree(t *testing.T) {
	n := hostLocal(t)
	n.on(func(request wire.Request) *wire.Reply {
		return &wire.Reply{
			Error: &types.Error{Code: 104, Msg: "no such Function", Details: "0000:3b:02.1"},
		}
	})

	_, err := n.run("ADD", "c1")
	var said *types.Error
	if !errors.As(err, &said) || said.Code != 104 || said.Details != "0000:3b:02.1" {
		t.Errorf("error is %v, want that of the agent", err)
	}

	n.check(0)
}

func TestAgentAway(t *testing.T) {
	n := hostLocal(t)
	n.must("ADD", "c1")
	n.stop()

	for command, code := range map[string]uint{
		"ADD": types.ErrTryAgainLater, "CHECK": types.ErrTryAgainLater,
		"STATUS": types.ErrPluginNotAvailable,
	} {
		container := "c1"
		if command == "ADD" {
			container = "c2"
		}

		_, err := n.run(command, container)
		var said *types.Error
		if !errors.As(err, &said) || said.Code != code {
			t.Errorf("%s: error is %v, want one with code %d", command, err, code)
		}
	}

	n.check(1, "192.0.2.2")
	n.must("DEL", "c1")
	n.must("GC", "")
	n.check(1) // until the agent has read its spool

	// The agent runs again and handles the requests in the spool.
	files, err := filepath.Glob(filepath.Join(n.spool(), "*.json"))
	if err != nil || len(files) != 2 {
		t.Fatalf("spool has %q, %v; want DEL and GC", files, err)
	}

	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}

		var request wire.Request
		if err := json.Unmarshal(data, &request); err != nil {
			t.Fatal(err)
		}
		if reply := n.serve(request); reply.Error != nil {
			t.Error(reply.Error)
		}
	}

	n.check(0)
}

// TestKilledBeforeTheAgentIsDone: whatever a shim has done when it is killed, DEL undoes all of it.
func TestKilledBeforeTheAgentIsDone(t *testing.T) {
	for _, done := range []bool{false, true} {
		t.Run(fmt.Sprintf("agent done: %v", done), func(t *testing.T) {
			n := hostLocal(t)
			asked, hang := make(chan struct{}), make(chan struct{})
			t.Cleanup(func() { close(hang) })

			n.on(func(request wire.Request) *wire.Reply {
				if request.Command != wire.Add {
					return nil
				}

				if done {
					n.mutex.Lock()
					n.attached[request.ContainerID] = result(t, request)
					n.mutex.Unlock()
				}

				close(asked)
				<-hang

				return &wire.Reply{}
			})

			shim := n.cni("ADD", "c1")
			if err := shim.Start(); err != nil {
				t.Fatal(err)
			}

			<-asked
			if err := shim.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := shim.Wait(); err == nil {
				t.Error("the shim ended well although it was killed")
			}
			if got := n.reserved(); len(got) != 1 {
				t.Errorf("reserved addresses: %q, want one", got)
			}

			n.must("DEL", "c1")
			n.check(0)
		})
	}
}

func TestManyAtOnce(t *testing.T) {
	n := hostLocal(t)
	const containers = 64
	var group sync.WaitGroup
	addresses := make([]string, containers)
	for i := range containers {
		group.Go(func() {
			result, err := n.run("ADD", fmt.Sprintf("c%d", i))
			if err != nil {
				t.Errorf("ADD of c%d: %v", i, err)
				return
			}
			addresses[i] = result.IPs[0].Address.String()
		})
	}

	group.Wait()
	slices.SortFunc(addresses, cmp.Compare)

	if distinct := slices.Compact(addresses); len(distinct) != containers ||
		n.attachments() != containers {
		t.Errorf("%d addresses and %d attachments, want %d", len(distinct), n.attachments(),
			containers)
	}

	n.stop() // all DELs meet in the spool
	for i := range containers {
		group.Go(func() {
			if _, err := n.run("DEL", fmt.Sprintf("c%d", i)); err != nil {
				t.Errorf("DEL of c%d: %v", i, err)
			}
		})
	}

	group.Wait()
	files, err := os.ReadDir(n.spool())
	if err != nil || len(files) != containers {
		t.Errorf("spool has %d files (%v), want %d", len(files), err, containers)
	}
	if got := n.reserved(); len(got) != 0 {
		t.Errorf("reserved addresses: %q, want none", got)
	}
}
