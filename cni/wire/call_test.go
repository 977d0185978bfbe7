// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// listen serves each connection to a socket with serve, until the test ends.
func listen(t *testing.T, serve func(net.Conn)) (socket string) {
	t.Helper()
	dir := must.SocketDir(t)
	socket = filepath.Join(dir, "cni.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })

	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn)
			}()
		}
	}()

	return socket
}

// answer returns a function that reads the request and writes the text.
func answer(text string) func(net.Conn) {
	return func(conn net.Conn) {
		_, _ = io.ReadAll(conn)
		_, _ = io.WriteString(conn, text)
	}
}

func TestCall(t *testing.T) {
	asked := make(chan Request, 1)
	socket := listen(t, func(conn net.Conn) {
		var request Request
		data, err := io.ReadAll(conn) // the read ends, because the shim closes its direction
		if err = errors.Join(err, json.Unmarshal(data, &request)); err != nil {
			t.Error(err)
		}
		asked <- request
		_, _ = io.WriteString(conn,
			`{"version":1,"result":{"ips":[]},"deviceInfo":null,"new":"ignored"}`)
	})

	request := Request{
		Command: Add, ContainerID: "c1", NetNS: "/run/netns/c1", IfName: "net1",
		Args:   "K8S_POD_NAME=a",
		Config: json.RawMessage(`{"name":"n"}`), IPAM: json.RawMessage(`{"ips":[]}`),
		At: time.Unix(1, 2).UTC(),
	}

	reply, err := Call(t.Context(), socket, request)
	if err != nil {
		t.Fatal(err)
	}

	request.Version = Version
	if diff := cmp.Diff(request, <-asked); diff != "" {
		t.Errorf("the agent got (-want +got):\n%s", diff)
	}

	want := Reply{Version: Version, Result: json.RawMessage(`{"ips":[]}`)}
	if diff := cmp.Diff(want, reply); diff != "" {
		t.Errorf("reply (-want +got):\n%s", diff)
	}
}

func TestCallReturnsTheAgentsError(t *testing.T) {
	socket := listen(t,
		answer(`{"version":1,"error":{"code":11,"msg":"busy","details":"0000:3b:02.1"}}`))
	reply, err := Call(t.Context(), socket, Request{Command: Add, Config: json.RawMessage(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	if want := (&types.Error{Code: 11, Msg: "busy", Details: "0000:3b:02.1"}); !cmp.Equal(want,
		reply.Error) {
		t.Errorf("error is %v, want %v", reply.Error, want)
	}
	if got := reply.Error.Error(); got != "busy; 0000:3b:02.1" {
		t.Errorf("in words: %q", got)
	}
}

func TestCallFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	dead := func() string { // a socket whose listener was killed
		socket := filepath.Join(t.TempDir(), "s")
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(false)
		listener.Close()
		return socket
	}

	for name, test := range map[string]struct {
		socket string
		want   error
	}{
		"no socket":        {filepath.Join(t.TempDir(), "none"), ErrAway},
		"no socket at all": {file, ErrAway},
		"nobody listens":   {dead(), ErrAway},
		"closed at once":   {listen(t, func(net.Conn) {}), ErrNoReply},
		"no answer":        {listen(t, answer("")), ErrNoReply},
		"half an answer":   {listen(t, answer(`{"version":1,"result":{"i`)), ErrNoReply},
		"no JSON":          {listen(t, answer("HTTP/1.1 400 Bad Request\r\n")), ErrNoReply},
		"two answers":      {listen(t, answer(`{"version":1}{"version":1}`)), ErrNoReply},
		"null":             {listen(t, answer("null")), ErrNoReply},
		"no version":       {listen(t, answer("{}")), ErrNoReply},
		"another form":     {listen(t, answer(`{"version":1,"error":"failed"}`)), ErrNoReply},
		"huge": {
			listen(t, answer(`{"version":1,"x":"`+strings.Repeat("x", MaxMessage)+`"}`)),
			ErrNoReply,
		},
		"another version": {
			listen(t, answer(`{"version":2,"error":"in another form"}`)), ErrVersion,
		},
	} {
		t.Run(name, func(t *testing.T) {
			reply, err := Call(t.Context(), test.socket,
				Request{Command: Del, Config: json.RawMessage(`{}`)})
			if !errors.Is(err, test.want) {
				t.Errorf("error is %v, want %v", err, test.want)
			}
			if !cmp.Equal(reply, Reply{}) {
				t.Errorf("there is a reply: %v", reply)
			}
		})
	}
}

func TestCallOfAnAgentThatHangs(t *testing.T) {
	returned, sent := make(chan struct{}), make(chan error, 1)
	socket := listen(t, func(conn net.Conn) {
		_, _ = io.ReadAll(conn)
		<-returned
		_, err := io.WriteString(conn, `{"version":1}`)
		sent <- err
	})

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()

	_, err := Call(ctx, socket, Request{Command: Add, Config: json.RawMessage(`{}`)})
	close(returned)
	if !errors.Is(err, ErrNoReply) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error is %v, want that the deadline passed without a reply", err)
	}
	if err := <-sent; err == nil {
		t.Error("the connection is still open")
	}
}

func TestCallRefusesHugeRequests(t *testing.T) {
	config := json.RawMessage(`"` + strings.Repeat("x", MaxMessage) + `"`)
	_, err := Call(t.Context(), "/nowhere", Request{Command: GC, Config: config})
	if err == nil || errors.Is(err, ErrAway) || !strings.Contains(err.Error(), "bytes") {
		t.Errorf("error is %v, want that it is too large", err)
	}
}

func FuzzDecodeReply(f *testing.F) {
	for _, seed := range []string{
		"", "null", "{}", `{"version":1}`, `{"version":2}`, `{"version":1,"result":null}`,
		`{"version":1,"result":{"cniVersion":"1.1.0","interfaces":[{"name":"net1"}]},"deviceInfo":{"type":"pci"}}`,
		`{"version":1,"error":{"code":7,"msg":"vlan","details":"5000 is more than 4094"}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		reply, err := DecodeReply(data)
		if err != nil {
			if !errors.Is(err, ErrNoReply) && !errors.Is(err, ErrVersion) {
				t.Fatalf("error of no kind: %v", err)
			}
			return
		}

		if reply.Version != Version {
			t.Fatalf("version %d was taken", reply.Version)
		}

		for _, raw := range []json.RawMessage{reply.Result, reply.DeviceInfo} {
			if raw != nil && (!json.Valid(raw) || string(raw) == "null") {
				t.Fatalf("not a value: %q", raw)
			}
		}
	})
}
