// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
)

// checkCode fails the test unless an error is a CNI error with the code and contains the text.
func checkCode(t testing.TB, err error, code uint, text string) {
	t.Helper()
	var said *types.Error
	if !errors.As(err, &said) {
		t.Fatalf("error is %v (%T), want one of CNI with code %d", err, err, code)
	}
	if said.Code != code || !strings.Contains(said.Error(), text) {
		t.Errorf("error is %d, %q; want code %d and %q", said.Code, said.Error(), code, text)
	}
}

func TestAdd(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, gives(oneAddress)))
	s.set("prevResult",
		map[string]any{"cniVersion": "1.1.0", "interfaces": []any{map[string]any{"name": "eth0"}}})
	if err := s.add(t); err != nil {
		t.Fatal(err)
	}

	checkDiary(t, f.diary, "ipam ADD", "agent ADD")

	asked := f.asked(wire.Add)[0]
	var config map[string]any
	if err := json.Unmarshal(asked.Config, &config); err != nil {
		t.Fatal(err)
	}

	sent, err := json.Marshal(s.config)
	if err != nil {
		t.Fatal(err)
	}
	if string(asked.Config) != string(sent) {
		t.Errorf("the agent got the configuration %s, want %s", asked.Config, sent)
	}

	want := wire.Request{
		Version: wire.Version, Command: wire.Add, ContainerID: "c1", NetNS: "/run/netns/c1",
		IfName: "net1",
		Args:   "K8S_POD_NAME=a", Config: asked.Config, IPAM: asked.IPAM, At: now,
	}

	if diff := cmp.Diff(want, asked); diff != "" {
		t.Errorf("the agent got (-want +got):\n%s", diff)
	}
	if !strings.Contains(string(asked.IPAM), "192.0.2.7/24") {
		t.Errorf("the agent got the addresses %s", asked.IPAM)
	}
	if !strings.Contains(s.stdout.String(), "192.0.2.7/24") {
		t.Errorf("the result is %s", s.stdout.String())
	}
}

// TestAddInEveryVersion: the IPAM plugin's result for the agent and the result for the runtime are
// in the version of the configuration, whatever version the other side uses.
func TestAddInEveryVersion(t *testing.T) {
	for _, version := range []string{
		"", "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
	} {
		t.Run("version "+version, func(t *testing.T) {
			f := startAgent(t, attached)
			s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, gives(oneAddress)))
			s.set("cniVersion", version)
			if err := s.add(t); err != nil {
				t.Fatal(err)
			}

			want := version
			if version == "" {
				want = "0.1.0"
			}

			for name, data := range map[string][]byte{
				"IPAM": f.asked(wire.Add)[0].IPAM, "result": s.stdout.Bytes(),
			} {
				if version, err := create.DecodeVersion(data); version != want || err != nil {
					t.Errorf("%s is in version %s (%v), want %s", name, version, err, want)
				}

				result, err := DecodeResult(data, "")
				if err != nil {
					t.Fatalf("%s: %s: %v", name, data, err)
				}
				if len(result.IPs) != 1 {
					t.Errorf("%s has %d addresses, want 1: %s", name, len(result.IPs), data)
				}
			}
		})
	}
}

func TestAddWithoutIPAM(t *testing.T) {
	for name, ipam := range map[string]any{
		"absent": nil, "empty": map[string]any{}, "no type": map[string]any{"type": ""},
		"the agent's": map[string]any{"type": wire.IPAM},
	} {
		t.Run(name, func(t *testing.T) {
			f := startAgent(t, attached)
			s := newShim(t, f).set("ipam", ipam)
			if err := s.add(t); err != nil {
				t.Fatal(err)
			}

			checkDiary(t, f.diary, "agent ADD")
			if ipam := f.asked(wire.Add)[0].IPAM; ipam != nil {
				t.Errorf("the agent got addresses: %s", ipam)
			}
			if err := s.del(t); err != nil {
				t.Error(err)
			}
			if err := s.check(t); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAddFails(t *testing.T) {
	good := gives(oneAddress)
	for name, test := range map[string]struct {
		// answer is nil for an agent that does not run.
		answer func(wire.Request) *wire.Reply
		ipam   string
		code   uint
		text   string
		diary  []string
	}{
		"agent away": {
			nil, good, types.ErrTryAgainLater, "xpu-agent is away",
			[]string{"ipam ADD", "ipam DEL"},
		},
		"agent says no": {
			except(wire.Add, fails(7, "vlan: 5000")), good, 7, "vlan: 5000",
			[]string{"ipam ADD", "agent ADD", "ipam DEL"},
		},
		"agent says no, without a code": {
			except(wire.Add, fails(0, "what")), good, types.ErrInternal, "what",
			[]string{"ipam ADD", "agent ADD", "ipam DEL"},
		},
		"reply lost": {
			except(wire.Add, nil), good, types.ErrTryAgainLater, "no reply",
			[]string{"ipam ADD", "agent ADD", "agent DEL", "ipam DEL"},
		},
		"agent of another version": {
			except(wire.Add, &wire.Reply{Version: 2}), good, types.ErrTryAgainLater, "xpu-agent 2",
			[]string{"ipam ADD", "agent ADD", "ipam DEL"},
		},
		"no result": {
			except(wire.Add, &wire.Reply{}), good, types.ErrInternal, "no result",
			[]string{"ipam ADD", "agent ADD", "agent DEL", "ipam DEL"},
		},
		"bad result": {
			except(wire.Add, &wire.Reply{Result: json.RawMessage(`[]`)}), good, types.ErrInternal,
			"the result of",
			[]string{"ipam ADD", "agent ADD", "agent DEL", "ipam DEL"},
		},
		"result that cannot be undone": {
			func(request wire.Request) *wire.Reply {
				if request.Command == wire.Del {
					return fails(101, "stuck")
				}
				return &wire.Reply{}
			},
			good, types.ErrInternal, "not all of it is undone: stuck",
			[]string{"ipam ADD", "agent ADD", "agent DEL", "ipam DEL"},
		},
		"IPAM says no": {
			attached, refuses("ADD", ""), 100, "IPAM plugin fake; no; why not",
			[]string{"ipam ADD", "agent RESULT", "ipam DEL"},
		},
		"IPAM dies": {
			attached, "echo oops >&2; exit 3", types.ErrInternal, "exit status 3: oops",
			[]string{"ipam ADD", "agent RESULT", "ipam DEL"},
		},
		"IPAM gives nothing": {
			attached, gives(`{"cniVersion":"1.1.0"}`), types.ErrInvalidNetworkConfig, "no address",
			[]string{"ipam ADD", "agent RESULT", "ipam DEL"},
		},
		"IPAM gives garbage": {
			attached, gives(`{"ips":[null]}`), types.ErrInvalidNetworkConfig, "ips[0] is null",
			[]string{"ipam ADD", "agent RESULT", "ipam DEL"},
		},
		"IPAM gives garbage twice": {
			attached,
			gives(
				`{"cniVersion":"0.4.0","ips":[null],"IPs":[{"version":"4","address":"192.0.2.7/24"}]}`,
			),
			types.ErrInvalidNetworkConfig, "ips[0] is null",
			[]string{"ipam ADD", "agent RESULT", "ipam DEL"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newAgent(t)
			if test.answer != nil {
				f = startAgent(t, test.answer)
			}

			s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, test.ipam))
			checkCode(t, s.add(t), test.code, test.text)
			checkDiary(t, f.diary, test.diary...)
			if s.stdout.Len() != 0 {
				t.Errorf("there is a result: %s", s.stdout.String())
			}
			if spooled := s.spooled(t); len(spooled) != 0 {
				t.Errorf("spooled: %v", spooled)
			}
		})
	}
}

// TestAddWhoseAgentDies: the agent received the request and died. Its work is undone once it runs
// again, because the DEL has a later time than the attachment.
func TestAddWhoseAgentDies(t *testing.T) {
	f := newAgent(t)
	s := newShim(t, f)
	f.serve = func(net.Conn, wire.Request) { s.ahead.Store(int64(time.Second)) }
	f.start()
	checkCode(t, s.add(t), types.ErrTryAgainLater, "no reply")
	got := s.spooled(t)["DEL:c1:net1.json"]
	if got.Command != wire.Del || got.ContainerID != "c1" || got.At.Before(now.Add(time.Second)) {
		t.Errorf("spooled: %v, want DEL", s.spooled(t))
	}
}

// TestSpoolDirOfOthers: the author of a network configuration must not be able to have files
// written anywhere.
func TestSpoolDirOfOthers(t *testing.T) {
	for name, test := range map[string]struct {
		make func(dir string) error
		text string
	}{
		"not private": {func(dir string) error {
			return os.Mkdir(dir,
				0o755)
		}, "must have mode 0700"},
		"a link": {func(dir string) error {
			return os.Symlink(t.TempDir(),
				dir)
		}, "must be a directory"},
		"a file": {func(dir string) error {
			return os.WriteFile(dir,
				nil, 0o600)
		}, "must be a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newShim(t, newAgent(t))
			if err := errors.Join(os.Mkdir(filepath.Dir(s.spool), 0o755),
				test.make(s.spool)); err != nil {
				t.Fatal(err)
			}

			checkCode(t, s.del(t), types.ErrIOFailure, test.text)
			if left, _ := os.ReadDir(s.spool); len(left) > 0 {
				t.Errorf("there is %v", left)
			}
		})
	}
}

// TestGCOfALongName: a network's name may be as long as the name of a file, which has additional
// parts.
func TestGCOfALongName(t *testing.T) {
	s := newShim(t, newAgent(t)).set("name", strings.Repeat("n", 253))
	if err := s.gc(t); err != nil || len(s.spooled(t)) != 1 {
		t.Errorf("spooled %v, error %v", s.spooled(t), err)
	}
}

// TestDeviceInfoElsewhere: the author of a network configuration must not be able to have files
// written or removed anywhere.
func TestDeviceInfoElsewhere(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f)
	for name, file := range map[string]string{
		"elsewhere":  filepath.Join(t.TempDir(), "shadow"),
		"below":      filepath.Join(s.devices, "a", "b"),
		"above":      s.devices + "/../b",
		"the parent": s.devices + "/..",
		"itself":     s.devices + "/",
	} {
		t.Run(name, func(t *testing.T) {
			if err := errors.Join(os.MkdirAll(s.devices, 0o755),
				os.MkdirAll(filepath.Dir(file), 0o755)); err != nil {
				t.Fatal(err)
			}

			_ = os.WriteFile(file, []byte("precious"), 0o600) // fails if it is a directory
			s.set("runtimeConfig", map[string]any{"CNIDeviceInfoFile": file})
			checkCode(t, s.add(t), types.ErrInvalidNetworkConfig, "CNIDeviceInfoFile")
			if err := s.del(t); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(file); err != nil {
				t.Error(err)
			}
		})
	}

	if asked := f.asked(wire.Add); len(asked) > 0 {
		t.Errorf("the agent was asked: %v", asked)
	}
}

func TestAddTakesTooLong(t *testing.T) {
	t.Run("agent", func(t *testing.T) {
		hang := make(chan struct{})
		t.Cleanup(func() { close(hang) })

		f := startAgent(t, func(request wire.Request) *wire.Reply {
			if request.Command == wire.Add {
				<-hang
				return nil
			}
			return attached(request)
		})

		checkCode(t, newShim(t, f).set("timeout", "500ms").add(t), types.ErrTryAgainLater,
			"deadline")
		checkDiary(t, f.diary, "agent ADD", "agent DEL")
	})
	t.Run("IPAM plugin", func(t *testing.T) {
		f := startAgent(t, attached)
		// The plugin receives SIGTERM, and can release its addresses.
		body := "[ $CNI_COMMAND != ADD ] || { trap 'echo ipam ended >>" + f.diary.path +
			"; exit 1' TERM; while :; do :; done; }"
		s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, body)).set("timeout",
			"1s")
		checkCode(t, s.add(t), types.ErrTryAgainLater, "ADD took too long")
		checkDiary(t, f.diary, "ipam ADD", "ipam ended", "ipam DEL")
	})
}

// TestSecondAdd: if an IPAM plugin refuses to give a container a second address, a second ADD still
// returns the result of the first one, whose addresses stay.
func TestSecondAdd(t *testing.T) {
	first := &wire.Reply{Result: json.RawMessage(oneAddress)}
	f := startAgent(t, except(wire.Result, first))
	s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, refuses("ADD", "")))
	if err := s.add(t); err != nil {
		t.Fatal(err)
	}

	checkDiary(t, f.diary, "ipam ADD", "agent RESULT")
	if !strings.Contains(s.stdout.String(), "192.0.2.7/24") {
		t.Errorf("the result is %s", s.stdout.String())
	}
}

func TestAddWithDHCP(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f).withIPAM("dhcp", ipamPlugin(t, "dhcp", f.diary, gives(oneAddress)))
	if err := s.add(t); err != nil {
		t.Fatal(err)
	}

	checkDiary(t, f.diary, "agent ADD", "ipam ADD", "agent ADDRESS")
	if ipam := f.asked(wire.Add)[0].IPAM; ipam != nil {
		t.Errorf("ADD has addresses: %s", ipam)
	}
	if ipam := f.asked(wire.Address)[0].IPAM; !strings.Contains(string(ipam), "192.0.2.7/24") {
		t.Errorf("ADDRESS has the addresses %s", ipam)
	}
	if !strings.Contains(s.stdout.String(), "192.0.2.7/24") {
		t.Errorf("the result is %s", s.stdout.String())
	}
	if err := s.del(t); err != nil {
		t.Fatal(err)
	}

	checkDiary(t, f.diary, "agent ADD", "ipam ADD", "agent ADDRESS", "ipam DEL", "agent DEL")
}

func TestAddWithDHCPFails(t *testing.T) {
	good := gives(oneAddress)
	for name, test := range map[string]struct {
		answer func(wire.Request) *wire.Reply
		ipam   string
		code   uint
		diary  []string
	}{
		"not attached": {
			except(wire.Add, fails(11, "busy")), good, 11,
			[]string{"agent ADD"},
		},
		"no lease": {
			attached, refuses("ADD", ""), 100,
			[]string{"agent ADD", "ipam ADD", "ipam DEL", "agent DEL"},
		},
		"address not set": {
			except(wire.Address, fails(102, "no")), good, 102,
			[]string{"agent ADD", "ipam ADD", "agent ADDRESS", "ipam DEL", "agent DEL"},
		},
		"reply of ADDRESS lost": {
			except(wire.Address, nil), good, types.ErrTryAgainLater,
			[]string{"agent ADD", "ipam ADD", "agent ADDRESS", "ipam DEL", "agent DEL"},
		},
		"no result": {
			except(wire.Address, &wire.Reply{}), good, types.ErrInternal,
			[]string{"agent ADD", "ipam ADD", "agent ADDRESS", "ipam DEL", "agent DEL"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := startAgent(t, test.answer)
			s := newShim(t, f).withIPAM("dhcp", ipamPlugin(t, "dhcp", f.diary, test.ipam))
			file := filepath.Join(s.devices, "net-c1_net1")
			s.set("runtimeConfig", map[string]any{"CNIDeviceInfoFile": file})
			checkCode(t, s.add(t), test.code, "")
			checkDiary(t, f.diary, test.diary...)
			if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("device information is left: %v", err)
			}
		})
	}
}

func TestDeviceInfo(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f)
	file := filepath.Join(s.devices, "net-c1_net1")
	s.set("runtimeConfig", map[string]any{"CNIDeviceInfoFile": file})

	for range 2 { // a repeated ADD finds a file
		if err := s.add(t); err != nil {
			t.Fatal(err)
		}
		if data, err := os.ReadFile(file); err != nil ||
			string(data) != `{"type":"pci","version":"1.1.0"}` {
			t.Fatalf("device information is %q, %v", data, err)
		}
	}

	for range 2 {
		if err := s.del(t); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("device information is left: %v", err)
		}
	}
}

func TestDeviceInfoThatCannotBeWritten(t *testing.T) {
	f := startAgent(t, attached)
	occupied := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(occupied, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, gives(oneAddress)))
	s.devices = occupied
	s.set("runtimeConfig", map[string]any{"CNIDeviceInfoFile": occupied + "/net-c1_net1"})
	checkCode(t, s.add(t), types.ErrIOFailure, "device information")
	checkDiary(t, f.diary, "ipam ADD", "agent ADD", "agent DEL", "ipam DEL")
}

func TestDel(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, ""))
	s.args.Netns = "" // the container is gone
	if err := s.del(t); err != nil {
		t.Fatal(err)
	}

	checkDiary(t, f.diary, "agent DEL", "ipam DEL")
	got := f.asked(wire.Del)[0]
	if got.ContainerID != "c1" || got.IfName != "net1" || got.NetNS != "" || !got.At.Equal(now) {
		t.Errorf("the agent got %+v", got)
	}
	if spooled := s.spooled(t); len(spooled) != 0 {
		t.Errorf("spooled: %v", spooled)
	}
}

// TestDelOfWhatAddRefuses: a configuration that ADD refuses does not keep a pod from ending.
func TestDelOfWhatAddRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		field string
		value any
		diary []string
	}{
		"timeout":    {"timeout", 90, []string{"agent DEL", "ipam DEL"}},
		"spool":      {"spoolDir", "spool", []string{"agent DEL", "ipam DEL"}},
		"path":       {"ipam", map[string]any{"type": "../fake"}, []string{"agent DEL"}},
		"no object":  {"ipam", "fake", []string{"agent DEL"}},
		"of another": {"vlan", "one hundred", []string{"agent DEL", "ipam DEL"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := startAgent(t, attached)
			s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, "")).set(test.field,
				test.value)
			if err := s.del(t); err != nil {
				t.Fatal(err)
			}
			checkDiary(t, f.diary, test.diary...)
		})
	}
}

// TestDelFails: DEL calls both the agent and the IPAM plugin, whichever fails.
func TestDelFails(t *testing.T) {
	for name, test := range map[string]struct {
		answer func(wire.Request) *wire.Reply
		ipam   string
		code   uint
		text   string
	}{
		"agent": {except(wire.Del, fails(101, "stuck")), "", 101, "stuck"},
		"IPAM":  {attached, refuses("DEL", ""), 100, "IPAM plugin fake; no; why not"},
		"both": {except(wire.Del, fails(101, "stuck")), refuses("DEL", ""), 101,
			"stuck; IPAM plugin fake; no"},
	} {
		t.Run(name, func(t *testing.T) {
			f := startAgent(t, test.answer)
			s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, test.ipam))
			checkCode(t, s.del(t), test.code, test.text)
			checkDiary(t, f.diary, "agent DEL", "ipam DEL")
			if spooled := s.spooled(t); len(spooled) != 0 {
				t.Errorf("spooled: %v", spooled)
			}
		})
	}
}

func TestIPAMPluginThatIsNotThere(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f).withIPAM("fake", t.TempDir()+":"+t.TempDir())
	checkCode(t, s.add(t), types.ErrInvalidNetworkConfig,
		"ipam.type: there is no such file in CNI_PATH")
	checkCode(t, s.del(t), types.ErrInvalidNetworkConfig, "IPAM plugin fake")
}

// TestIPAMOutputIsBounded checks that an IPAM plugin that writes without end fails like any other one,
// and that its text does not become a long error.
func TestIPAMOutputIsBounded(t *testing.T) {
	const endless = "head -c 3000000 /dev/zero | tr '\\0' x"
	for name, test := range map[string]struct {
		body string
		code uint
		text string
	}{
		"result": {endless, types.ErrInvalidNetworkConfig, "has more than 1048576 bytes"},
		"messages": {
			endless + " >&2; exit 3", types.ErrInternal, "exit status 3: xxx",
		},
		"error": {
			`printf '{"code":100,"msg":"no '; head -c 500000 /dev/zero | tr '\0' x; echo '"}'; exit 1`,
			100, "no xxx",
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := startAgent(t, attached)
			s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, test.body))
			err := s.add(t)
			checkCode(t, err, test.code, test.text)
			if n := len(err.Error()); n > 3*maxDetails { // the DEL fails too
				t.Errorf("the error has %d bytes", n)
			}
		})
	}
}

// away returns agents that do not accept a request, for different reasons.
func away(t *testing.T) map[string]*fakeAgent {
	return map[string]*fakeAgent{
		"no socket":  newAgent(t),
		"reply lost": startAgent(t, func(wire.Request) *wire.Reply { return nil }),
		"another version": startAgent(t, func(wire.Request) *wire.Reply {
			return &wire.Reply{Version: 2}
		}),
	}
}

func TestDelWhileTheAgentIsAway(t *testing.T) {
	for name, f := range away(t) {
		t.Run(name, func(t *testing.T) {
			s := newShim(t, f).withIPAM("fake",
				ipamPlugin(t, "fake", diary{f.diary.path + "-ipam"}, ""))
			for range 2 {
				if err := s.del(t); err != nil {
					t.Fatal(err)
				}
			}

			checkDiary(t, diary{f.diary.path + "-ipam"}, "ipam DEL", "ipam DEL")

			want := map[string]wire.Request{"DEL:c1:net1.json": {
				Version: wire.Version, Command: wire.Del, ContainerID: "c1", NetNS: "/run/netns/c1",
				IfName: "net1",
				Args:   "K8S_POD_NAME=a", Config: json.RawMessage("null"), At: now,
			}}

			if diff := cmp.Diff(want, s.spooled(t)); diff != "" {
				t.Errorf("spool (-want +got):\n%s", diff)
			}
			if !strings.Contains(s.stderr.String(), "DEL is left for xpu-agent in "+s.spool) {
				t.Errorf("nobody is told: %q", s.stderr.String())
			}

			s.args.IfName = "net2"
			if err := s.del(t); err != nil || len(s.spooled(t)) != 2 {
				t.Errorf("another interface: %v, spooled %v", err, s.spooled(t))
			}

			checkMode(t, s.spool, 0o700|fs.ModeDir)
			checkMode(t, filepath.Join(s.spool, "DEL:c1:net1.json"), 0o600)
		})
	}
}

func checkMode(t *testing.T, path string, want fs.FileMode) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != want {
		t.Errorf("%s has mode %v, want %v", path, info.Mode(), want)
	}
}

func TestDelWithoutAgentAndSpool(t *testing.T) {
	s := newShim(t, newAgent(t))
	occupied := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(occupied, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	for name, dir := range map[string]string{
		"is a file": occupied, "is below a file": occupied + "/spool",
	} {
		t.Run(name, func(t *testing.T) {
			s.spool = dir
			err := s.del(t)
			checkCode(t, err, types.ErrIOFailure, "spool")
			checkCode(t, err, types.ErrIOFailure, "xpu-agent is away")
		})
	}
}

func TestGC(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f).withIPAM("fake",
		ipamPlugin(t, "fake", f.diary, `echo "$config" >>`+f.diary.path))
	s.set("cni.dev/valid-attachments", []any{map[string]any{"containerID": "c1", "ifname": "net1"}})
	if err := s.gc(t); err != nil {
		t.Fatal(err)
	}

	config, err := json.Marshal(s.config)
	if err != nil {
		t.Fatal(err)
	}

	checkDiary(t, f.diary, "agent GC", "ipam GC", string(config))
	needed := json.RawMessage(
		`{"cniVersion":"1.1.0","name":"net","cni.dev/valid-attachments":[{"containerID":"c1","ifname":"net1"}]}`,
	)
	want := wire.Request{Version: wire.Version, Command: wire.GC, Config: needed, At: now}
	if diff := cmp.Diff(want, f.asked(wire.GC)[0]); diff != "" {
		t.Errorf("the agent got (-want +got):\n%s", diff)
	}
}

func TestGCFails(t *testing.T) {
	f := startAgent(t, except(wire.GC, fails(101, "stuck")))
	s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, refuses("GC", "")))
	checkCode(t, s.gc(t), 101, "stuck; IPAM plugin fake; no")
	checkDiary(t, f.diary, "agent GC", "ipam GC")
}

// TestGCWhileTheAgentIsAway: the last list of valid attachments counts.
func TestGCWhileTheAgentIsAway(t *testing.T) {
	s := newShim(t, newAgent(t))
	for _, container := range []string{"c1", "c2"} {
		s.set("cni.dev/valid-attachments",
			[]any{map[string]any{"containerID": container, "ifname": "net1"}})
		if err := s.gc(t); err != nil {
			t.Fatal(err)
		}
	}

	got := s.spooled(t)
	if len(got) != 1 || !strings.Contains(string(got["GC:net.json"].Config), `"containerID":"c2"`) {
		t.Errorf("spooled: %v", got)
	}
}

func TestCheck(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, ""))
	if err := s.check(t); err != nil {
		t.Fatal(err)
	}

	checkDiary(t, f.diary, "ipam CHECK", "agent CHECK")
	if got := f.asked(wire.Check)[0]; got.ContainerID != "c1" || got.NetNS != "/run/netns/c1" {
		t.Errorf("the agent got %+v", got)
	}
}

func TestCheckFails(t *testing.T) {
	f := startAgent(t, except(wire.Check, fails(103, "mtu is 1400, want 9000")))
	checkCode(t, newShim(t, f).check(t), 103, "mtu is 1400")
	checkCode(t, newShim(t, newAgent(t)).check(t), types.ErrTryAgainLater, "away")
	f = startAgent(t, attached)
	s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, refuses("CHECK", "")))
	checkCode(t, s.check(t), 100, "why not")
}

func TestStatus(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, ""))
	if err := s.status(t); err != nil {
		t.Fatal(err)
	}
	checkDiary(t, f.diary, "agent STATUS", "ipam STATUS")
}

func TestStatusFails(t *testing.T) {
	for name, f := range away(t) {
		t.Run(name, func(t *testing.T) {
			s := newShim(t, f)
			checkCode(t, s.status(t), types.ErrPluginNotAvailable, "xpu-agent")
			if spooled := s.spooled(t); len(spooled) != 0 {
				t.Errorf("spooled: %v", spooled)
			}
		})
	}

	f := startAgent(t, except(wire.Status, fails(51, "not synced")))
	checkCode(t, newShim(t, f).status(t), types.ErrLimitedConnectivity, "not synced")
	f = startAgent(t, attached)
	s := newShim(t, f).withIPAM("fake", ipamPlugin(t, "fake", f.diary, refuses("STATUS", "")))
	checkCode(t, s.status(t), 100, "why not")
}

// TestHugeConfiguration: DEL needs nothing of the configuration, and GC needs only the list of
// valid attachments.
func TestHugeConfiguration(t *testing.T) {
	for name, f := range map[string]*fakeAgent{
		"agent": startAgent(t, attached), "spool": newAgent(t),
	} {
		t.Run(name, func(t *testing.T) {
			s := newShim(t, f).set("args", strings.Repeat("x", wire.MaxMessage))
			s.args.Args = "K8S_POD_NAME=a;X=" + strings.Repeat("x", wire.MaxMessage)
			s.set("cni.dev/valid-attachments", []any{})

			if name == "agent" {
				checkCode(t, s.add(t), types.ErrInvalidNetworkConfig,
					"the network configuration has")
				checkCode(t, s.check(t), types.ErrInvalidNetworkConfig, "CNI_ARGS")
			}

			if err := errors.Join(s.del(t), s.gc(t)); err != nil {
				t.Error(err)
			}

			s.set("cni.dev/valid-attachments", strings.Repeat("x", wire.MaxMessage))
			checkCode(t, s.gc(t), types.ErrInvalidNetworkConfig, "bytes")
		})
	}
}

// TestPathsAreTheNodes: nothing is created or opened in directories and sockets that a tenant's
// configuration names.
func TestPathsAreTheNodes(t *testing.T) {
	for _, field := range []string{"socket", "spoolDir", "SpoolDir"} {
		t.Run(field, func(t *testing.T) {
			elsewhere := filepath.Join(t.TempDir(), "nologin")
			s := newShim(t, newAgent(t)).set(field, elsewhere)
			for command, err := range map[string]error{
				"ADD": s.add(t), "CHECK": s.check(t), "GC": s.gc(t), "STATUS": s.status(t),
			} {
				t.Log(command)
				checkCode(t, err, types.ErrInvalidNetworkConfig, "is not this node's")
			}

			if err := s.del(t); err != nil || len(s.spooled(t)) != 1 {
				t.Errorf("DEL: error %v, spooled %v", err, s.spooled(t))
			}
			if _, err := os.Lstat(elsewhere); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s was made", elsewhere)
			}
		})
	}

	f := startAgent(t, attached)
	s := newShim(t, f)
	if err := s.set("socket", s.socket).set("spoolDir", s.spool).add(t); err != nil {
		t.Errorf("the node's own paths: %v", err)
	}

	s.pathsError = errors.New("xpu-cni.json: is broken")
	checkCode(t, s.add(t), types.ErrIOFailure, "is broken")
	checkCode(t, s.del(t), types.ErrIOFailure, "is broken")
}

func TestReadPaths(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		mode fs.FileMode
		want Paths
		err  string
	}{
		"both": {
			`{"socket":"/run/a","spoolDir":"/var/b"}`, 0o644, Paths{"/run/a", "/var/b"}, "",
		},
		"one": {`{"socket":"/run/a"}`, 0o600, Paths{"/run/a", wire.DefaultSpoolDir}, ""},
		"relative": {
			`{"spoolDir":"spool"}`, 0o644, Paths{}, `spoolDir: "spool" must be an absolute path`,
		},
		"unknown": {`{"sockets":"/run/a"}`, 0o644, Paths{}, "sockets"},
		"no JSON": {`socket=/run/a`, 0o644, Paths{}, "invalid"},
		"large": {
			`{"socket":"/` + strings.Repeat("x", maxPathsFile) + `"}`, 0o644, Paths{}, "bytes",
		},
		"for everyone": {`{}`, 0o666, Paths{}, "must belong to root"},
	} {
		t.Run(name, func(t *testing.T) {
			file := PathsFile(filepath.Join(t.TempDir(), "xpu-cni"))
			if err := errors.Join(os.WriteFile(file, []byte(test.text), test.mode),
				os.Chmod(file, test.mode)); err != nil {
				t.Fatal(err)
			}

			got, err := ReadPaths(file)
			if got != test.want || (err == nil) != (test.err == "") || err != nil &&
				!strings.Contains(err.Error(), test.err) {
				t.Errorf("%v, %v; want %v, %q", got, err, test.want, test.err)
			}
		})
	}

	if got, err := ReadPaths(filepath.Join(t.TempDir(), "none")); err != nil ||
		got != DefaultPaths() {
		t.Errorf("without a file: %v, %v", got, err)
	}
	if _, err := ReadPaths(t.TempDir()); err == nil {
		t.Error("a directory was read")
	}
}

// TestDeviceInfoOfAnotherPod: the file of another pod's interface is neither replaced nor removed.
func TestDeviceInfoOfAnotherPod(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f)
	file := filepath.Join(s.devices, "default-net-c2_net1")
	if err := errors.Join(os.MkdirAll(s.devices, 0o755),
		os.WriteFile(file, []byte("c2's"), 0o444)); err != nil {
		t.Fatal(err)
	}

	s.set("runtimeConfig", map[string]any{"CNIDeviceInfoFile": file})
	checkCode(t, s.add(t), types.ErrInvalidNetworkConfig,
		"must have the container ID c1 in its name")
	if err := s.del(t); err != nil {
		t.Error(err)
	}
	if text, err := os.ReadFile(file); string(text) != "c2's" {
		t.Errorf("the file has %q (%v)", text, err)
	}
	if asked := f.asked(wire.Add); len(asked) > 0 {
		t.Errorf("the agent was asked: %v", asked)
	}
}

// TestDHCPPluginThatIsNotThere: a missing plugin is an error before the interface is attached.
func TestDHCPPluginThatIsNotThere(t *testing.T) {
	f := startAgent(t, attached)
	s := newShim(t, f).withIPAM("dhcp", t.TempDir())
	checkCode(t, s.add(t), types.ErrInvalidNetworkConfig, "ipam.type: there is no such file")
	if asked := f.asked(wire.Add); len(asked) > 0 {
		t.Errorf("the agent was asked: %v", asked)
	}
}

// TestConfiguration: an error about a huge configuration is short. Other configurations that are
// refused are in pkg/node/cniserver/testdata/refused.txtar.
func TestConfiguration(t *testing.T) {
	here := site{DefaultPaths(), "/devinfo", "c1"}
	_, err := parseConfig([]byte(`{"name":"`+strings.Repeat("n", 1<<20)+`","socket":"`+
		strings.Repeat("é", 1<<20)+`"}`), here)
	checkCode(t, err, types.ErrInvalidNetworkConfig, "socket")
	if n := len(err.Error()); n > maxDetails+2*maxNetwork {
		t.Errorf("the error has %d bytes", n)
	}

	got, err := parseConfig([]byte(`{"name":"n","ipam":null,"runtimeConfig":null,"timeout":null}`),
		here)
	if err != nil {
		t.Fatal(err)
	}

	want := config{
		CNIVersion: "0.1.0", Name: "n", Timeout: addTimeout,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(
		`{"name":"n","timeout":1,"ipam":[],"socket":"s","runtimeConfig":{"CNIDeviceInfoFile":1}}`,
	))

	f.Add(
		[]byte(
			`{"cniVersion":"1.1.0","name":"n","ipam":{"type":"static"},"timeout":"90s","socket":"/run/s"}`,
		),
	)

	f.Add([]byte(`{`))
	f.Add([]byte(`{"ipam":null,"timeout":null,"runtimeConfig":{"CNIDeviceInfoFile":"/run/d"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parseConfig(data, site{DefaultPaths(), "/run", "c1"})
		if said := (*types.Error)(nil); err != nil && !errors.As(err, &said) {
			t.Fatalf("error of no kind: %v", err)
		}

		file := c.RuntimeConfig.DeviceInfoFile
		if c.Timeout <= 0 || strings.Contains(c.IPAM.Type, "/") || c.IPAM.Type == pluginName ||
			file != "" && (filepath.Dir(file) != "/run" || !strings.Contains(file, "c1")) {
			t.Fatalf("taken: %+v", c)
		}
	})
}

func FuzzParsePaths(f *testing.F) {
	for _, seed := range []string{
		"", "{}", "null", `{"socket":"/run/a","spoolDir":"b"}`, `{"socket":1}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if p, err := parsePaths(data); err == nil &&
			(!filepath.IsAbs(p.Socket) || !filepath.IsAbs(p.SpoolDir)) {
			t.Fatalf("taken: %+v", p)
		}
	})
}

// FuzzDecodeResult: any output of a plugin is either refused, or can be converted to every version,
// or the conversion returns an error.
func FuzzDecodeResult(f *testing.F) {
	for _, seed := range []string{
		oneAddress,
		`{"cniVersion":"0.3.1","ips":[{"version":"4","address":"192.0.2.7/24","interface":0}]}`,
		`{"cniVersion":"0.2.0","ip4":{"ip":"192.0.2.7/24","routes":[{"dst":"0.0.0.0/0"}]}}`,
		`{"interfaces":[{"name":"net1"}],"routes":[{"dst":"2001:db8::/32","gw":"::1"}],"dns":{}}`,
		`{"ips":[null]}`, `null`, `{"cniVersion":""}`, `{"cniVersion":"9.9.9"}`,
	} {
		f.Add([]byte(seed), "1.1.0")
		f.Add([]byte(seed), "0.4.0")
		f.Add([]byte(seed), "0.2.0")
	}
	f.Fuzz(func(t *testing.T, data []byte, version string) {
		result, err := DecodeResult(data, version)
		if err != nil {
			return
		}

		for _, other := range []string{"0.1.0", "0.2.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
			if converted, err := result.GetAsVersion(other); err == nil &&
				converted.Version() != other {
				t.Errorf("version %s asked for, %s got", other, converted.Version())
			}
		}
	})
}
