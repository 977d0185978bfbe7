// SPDX-License-Identifier: Apache-2.0

package machine_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/qemu/host"
)

// TestRequests checks that QEMU gets the requests of a test in the guest (package host). QEMU here
// is a process of this test binary, which also plays the guest.
func TestRequests(t *testing.T) {
	if os.Getenv(playQEMU) != "" {
		play(t)
		return
	}

	m := fake(t, `exec env `+playQEMU+`=1 `+os.Args[0]+` -test.run='^TestRequests$' -- "$@" >&2`)
	m.Cards = 2
	_, err := m.Run(t.Context(), func(string) {})
	if err == nil || !strings.Contains(err.Error(), "played to the end") {
		t.Errorf("QEMU's side: %v", err)
	}
}

// playQEMU in the environment makes this binary play QEMU.
const playQEMU = "XPU_TEST_PLAY_QEMU"

func play(t *testing.T) {
	args := strings.Join(os.Args, " ")
	dir, _, found := strings.Cut(args[strings.Index(args, "path=")+len("path="):], "/monitor")
	if !found {
		t.Fatalf("no socket of the monitor in %q", args)
	}

	monitor, guest := dial(t, filepath.Join(dir, "monitor")), dial(t,
		filepath.Join(dir, "requests"))
	monitor.send(`{"QMP": {"version": {}}}`)
	monitor.receive(t, `{"execute":"qmp_capabilities"}`)
	monitor.send(`{"return": {}}`)

	for _, test := range []struct {
		request  host.Request
		commands []string   // sent to QEMU
		answers  [][]string // sent by QEMU, by command
		answer   host.Answer
	}{
		{
			request:  host.Request{Operation: host.OperationUnplug, Card: 1},
			commands: []string{`{"arguments":{"id":"card1"},"execute":"device_del"}`},
			answers: [][]string{{
				`{"return": {}}`, `{"event": "DEVICE_DELETED", "data": {"path": "/machine/x"}}`,
				`{"event": "DEVICE_DELETED", "data": {"device": "card1"}}`,
			}},
		},
		{
			request: host.Request{Operation: host.OperationPlug, Card: 1},
			commands: []string{`{"arguments":{"bus":"slot1","driver":"igb","id":"card1","mac":"52:54:00:aa:00:02",` +
				`"netdev":"wire1","romfile":""},"execute":"device_add"}`},
			answers: [][]string{{`{"event": "NIC_RX_FILTER_CHANGED"}`, `{"return": {}}`}},
		},
		{
			request:  host.Request{Operation: host.OperationLinkDown},
			commands: []string{`{"arguments":{"name":"card0","up":false},"execute":"set_link"}`},
			answers:  [][]string{{`{"return": {}}`}},
		},
		{
			request:  host.Request{Operation: host.OperationLinkUp},
			commands: []string{`{"arguments":{"name":"card0","up":true},"execute":"set_link"}`},
			answers: [][]string{
				{`{"error": {"class": "DeviceNotFound", "desc": "Device 'card0' not found"}}`},
			},
			answer: host.Answer{Error: "set_link: Device 'card0' not found"},
		},
		{
			request: host.Request{Operation: host.OperationPlug, Card: 2},
			answer:  host.Answer{Error: "there is no card 2, only 0 to 1"},
		},
		{request: host.Request{Operation: "burn"},
			answer: host.Answer{Error: `operation "burn" is none of package host`}},
	} {
		line, err := json.Marshal(test.request)
		if err != nil {
			t.Fatal(err)
		}

		guest.send(string(line))
		for i, command := range test.commands {
			monitor.receive(t, command)
			for _, answer := range test.answers[i] {
				monitor.send(answer)
			}
		}

		want, err := json.Marshal(test.answer)
		if err != nil {
			t.Fatal(err)
		}

		guest.receive(t, string(want))
	}

	fmt.Fprintln(os.Stderr, "played to the end")
}

// peer is a connection that carries lines.
type peer struct {
	conn  net.Conn
	lines *json.Decoder
}

func dial(t *testing.T, path string) peer {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return peer{conn, json.NewDecoder(bufio.NewReader(conn))}
}

func (p peer) send(line string) { _, _ = fmt.Fprintln(p.conn, line) }

// receive checks that the next line is want.
func (p peer) receive(t *testing.T, want string) {
	t.Helper()
	var got json.RawMessage
	if err := p.lines.Decode(&got); err != nil {
		t.Fatalf("%v; want %s", err, want)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
}
