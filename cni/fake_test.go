// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// now is the clock of tests.
var now = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)

// diary records the order of the calls of the agent and the IPAM plugin: one line for each command,
// "agent ADD" or "ipam DEL". It is a file because IPAM plugins are processes.
type diary struct{ path string }

func (d diary) add(t testing.TB, line string) {
	t.Helper()
	file, err := os.OpenFile(d.path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Error(err)
		return
	}
	defer file.Close()

	if _, err := file.WriteString(line + "\n"); err != nil {
		t.Error(err)
	}
}

func (d diary) lines(t testing.TB) []string {
	t.Helper()
	data, err := os.ReadFile(d.path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

// fakeAgent serves the agent's socket. The test determines its answers.
type fakeAgent struct {
	t      testing.TB
	socket string
	diary  diary
	serve  func(net.Conn, wire.Request)

	mutex    sync.Mutex
	requests []wire.Request
}

// startAgent starts an agent that answers every request with answer. A nil reply closes the
// connection without a reply.
func startAgent(t testing.TB, answer func(wire.Request) *wire.Reply) *fakeAgent {
	t.Helper()
	f := newAgent(t)
	f.serve = func(conn net.Conn, request wire.Request) {
		reply := answer(request)
		if reply == nil {
			return
		}

		if reply.Version == 0 {
			reply.Version = wire.Version
		}
		if err := json.NewEncoder(conn).Encode(reply); err != nil {
			t.Error(err)
		}
	}

	f.start()
	return f
}

// newAgent returns an agent that does not run until it is started.
func newAgent(t testing.TB) *fakeAgent {
	t.Helper()
	dir := must.SocketDir(t)
	return &fakeAgent{
		t: t, socket: filepath.Join(dir, "s"), diary: diary{filepath.Join(dir, "diary")},
	}
}

func (f *fakeAgent) start() {
	f.t.Helper()
	listener, err := net.Listen("unix", f.socket)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { listener.Close() })

	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go f.handle(conn)
		}
	}()
}

func (f *fakeAgent) handle(conn net.Conn) {
	defer conn.Close()
	data, err := io.ReadAll(conn)
	if err != nil {
		f.t.Error(err)
		return
	}

	var request wire.Request
	if err := json.Unmarshal(data, &request); err != nil {
		f.t.Errorf("request %q: %v", data, err)
		return
	}

	f.diary.add(f.t, "agent "+string(request.Command))
	f.mutex.Lock()
	f.requests = append(f.requests, request)
	f.mutex.Unlock()
	f.serve(conn, request)
}

// asked returns the requests for a command so far.
func (f *fakeAgent) asked(command wire.Command) []wire.Request {
	f.mutex.Lock()
	defer f.mutex.Unlock()

	var asked []wire.Request
	for _, request := range f.requests {
		if request.Command == command {
			asked = append(asked, request)
		}
	}

	return asked
}

// attached returns the answer of an agent that succeeds: the interface, with the addresses of the
// IPAM plugin.
func attached(request wire.Request) *wire.Reply {
	switch request.Command {
	case wire.Add, wire.Address:
		result := map[string]any{"cniVersion": "1.1.0"}
		if request.IPAM != nil {
			if err := json.Unmarshal(request.IPAM, &result); err != nil {
				return fails(999, err.Error())
			}
		}

		if strings.HasPrefix(result["cniVersion"].(string), "0.2") {
			return &wire.Reply{Result: request.IPAM}
		}

		result["interfaces"] = []any{
			map[string]any{"name": request.IfName, "sandbox": request.NetNS},
		}
		data, err := json.Marshal(result)
		if err != nil {
			return fails(999, err.Error())
		}

		return &wire.Reply{
			Result: data, DeviceInfo: json.RawMessage(`{"type":"pci","version":"1.1.0"}`),
		}
	case wire.Result:
		return fails(3, "nothing is attached")
	}
	return &wire.Reply{}
}

func fails(code uint, msg string) *wire.Reply {
	return &wire.Reply{Error: &types.Error{Code: code, Msg: msg}}
}

// except returns a function that is [attached] for all commands but one.
func except(command wire.Command, reply *wire.Reply) func(wire.Request) *wire.Reply {
	return func(request wire.Request) *wire.Reply {
		if request.Command == command {
			return reply
		}
		return attached(request)
	}
}

// oneAddress is the result of an IPAM plugin, from version 1.0 on.
const oneAddress = `{"cniVersion":"1.1.0","ips":[{"address":"192.0.2.7/24","gateway":"192.0.2.1"}]}`

// ipamPlugin makes an IPAM plugin of a shell script that writes each command to a diary. The
// script's body has the configuration in $config and the command in $CNI_COMMAND. The directory is
// for CNI_PATH.
func ipamPlugin(t testing.TB, name string, notes diary, body string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	script := "#!/bin/sh\nconfig=$(cat)\necho \"ipam $CNI_COMMAND\" >>" + notes.path + "\n" +
		body + "\n"
	if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// gives returns the body of an IPAM plugin that has a result for ADD.
func gives(result string) string {
	return "[ $CNI_COMMAND != ADD ] || echo '" + result + "'"
}

// refuses returns the body of an IPAM plugin that fails for one command.
func refuses(command, otherwise string) string {
	return "if [ $CNI_COMMAND = " + command + " ]; then echo '" +
		`{"cniVersion":"1.1.0","code":100,"msg":"no","details":"why not"}` +
		"'; exit 1; fi\n" + otherwise
}

// shim has one network configuration and the runtime's arguments for it.
type shim struct {
	stdout, stderr bytes.Buffer
	config         map[string]any
	args           skel.CmdArgs
	socket, spool  string
	pathsError     error
	// devices is the directory for descriptions of devices.
	devices string
	// ahead is how far the clock is ahead of now, in ns.
	ahead atomic.Int64
}

// newShim returns a shim for an agent.
func newShim(t testing.TB, f *fakeAgent) *shim {
	dir := t.TempDir()
	spool := filepath.Join(dir, "state", "spool")
	return &shim{
		socket: f.socket, spool: spool,
		devices: filepath.Join(dir, "devinfo", "cni"),
		config: map[string]any{
			"cniVersion": "1.1.0", "name": "net", "type": "xpu-cni",
			"deviceID": "0000:3b:02.1", "vlan": 100,
		},
		args: skel.CmdArgs{
			ContainerID: "c1", Netns: "/run/netns/c1", IfName: "net1", Args: "K8S_POD_NAME=a",
		},
	}
}

// withIPAM makes the shim run an IPAM plugin in the directory.
func (s *shim) withIPAM(plugin, dir string) *shim {
	s.config["ipam"] = map[string]any{"type": plugin}
	s.args.Path = dir
	return s
}

func (s *shim) set(field string, value any) *shim {
	s.config[field] = value
	return s
}

// run runs one command.
func (s *shim) run(t testing.TB, command func(skel.CNIFuncs) func(*skel.CmdArgs) error) error {
	t.Helper()
	config, err := json.Marshal(s.config)
	if err != nil {
		t.Fatal(err)
	}

	args := s.args
	args.StdinData = config

	plugin := Plugin{
		DeviceInfoDir: s.devices, Stdout: &s.stdout, Stderr: &s.stderr, Now: func() time.Time {
			return now.Add(time.Duration(s.ahead.Load()))
		},
		Paths: func() (Paths, error) { return Paths{s.socket, s.spool}, s.pathsError },
	}

	return command(plugin.Funcs())(&args)
}

func (s *shim) add(t testing.TB) error {
	return s.run(t, func(f skel.CNIFuncs) func(*skel.CmdArgs) error { return f.Add })
}

func (s *shim) del(t testing.TB) error {
	return s.run(t, func(f skel.CNIFuncs) func(*skel.CmdArgs) error { return f.Del })
}

func (s *shim) check(t testing.TB) error {
	return s.run(t, func(f skel.CNIFuncs) func(*skel.CmdArgs) error { return f.Check })
}

func (s *shim) gc(t testing.TB) error {
	return s.run(t, func(f skel.CNIFuncs) func(*skel.CmdArgs) error { return f.GC })
}

func (s *shim) status(t testing.TB) error {
	return s.run(t, func(f skel.CNIFuncs) func(*skel.CmdArgs) error { return f.Status })
}

// spooled returns the requests in the spool by the names of their files.
func (s *shim) spooled(t testing.TB) map[string]wire.Request {
	t.Helper()
	return spooled(t, s.spool)
}

func spooled(t testing.TB, dir string) map[string]wire.Request {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}

	requests := map[string]wire.Request{}
	for _, entry := range entries {
		data, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			t.Fatal(err)
		}

		var request wire.Request
		if err := json.Unmarshal(data, &request); err != nil {
			t.Fatalf("%s: %v", entry.Name(), err)
		}
		requests[entry.Name()] = request
	}

	return requests
}

func checkDiary(t testing.TB, notes diary, want ...string) {
	t.Helper()
	if got := notes.lines(t); !slices.Equal(got, want) {
		t.Errorf("asked: %q, want %q", got, want)
	}
}
