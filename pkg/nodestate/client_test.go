// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// serve serves an agent's socket until the test ends.
func serve(t *testing.T, answer http.HandlerFunc) Client {
	t.Helper()
	c := Client{Socket: filepath.Join(must.SocketDir(t), "admin.sock")}
	listener, err := net.Listen("unix", c.Socket)
	must.Succeed(t, err)
	server := &http.Server{Handler: answer}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return c
}

// TestClient checks that only a complete answer of an agent that succeeded is a result.
func TestClient(t *testing.T) {
	says := func(status int, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write([]byte(text))
		}
	}
	for name, test := range map[string]struct {
		answer  http.HandlerFunc
		problem string // "" for success
	}{
		"a state":  {says(http.StatusOK, `{"node": "node1"}`), ""},
		"an error": {says(http.StatusServiceUnavailable, "the pools are not known\n"), "the pools"},
		"another status": {
			says(http.StatusCreated, `{"node": "node1"}`), `{"node": "node1"}`,
		},
		"a part": {
			func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Length", "100")
				_, _ = w.Write([]byte(`{"node": "node1"}`))
			}, "answer of xpu-agent: unexpected EOF",
		},
		"too long": {
			says(http.StatusOK, strings.Repeat(" ", MaxMessage+1)),
			"answer of xpu-agent: is longer than 67108864 bytes",
		},
		"no answer": {
			func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
			"xpu-agent is away: ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := serve(t, test.answer)
			state, err := c.State(t.Context())
			for _, err := range []error{err, c.Ready(t.Context())} {
				if (err == nil) != (test.problem == "") ||
					err != nil && !strings.HasPrefix(err.Error(), test.problem) {
					t.Errorf("error %v, want %q", err, test.problem)
				}
			}
			if (state == nil) != (err != nil) || state != nil && state.Node != "node1" {
				t.Errorf("the state is %+v, error %v", state, err)
			}
		})
	}
}

// TestClientWithoutAgent checks that the error for a missing agent has the socket and no URL,
// which is of no use to people.
func TestClientWithoutAgent(t *testing.T) {
	c := Client{Socket: filepath.Join(must.SocketDir(t), "admin.sock")}
	_, err := c.State(t.Context())
	want := "xpu-agent is away: dial unix " + c.Socket + ": connect: no such file or directory"
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	if c.Runs() {
		t.Error("an agent runs without a socket")
	}
	if !serve(t, nil).Runs() {
		t.Error("no agent runs at a socket that is served")
	}
}

// TestClientPaths checks what each method requests.
func TestClientPaths(t *testing.T) {
	var got string
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		got = r.Method + " " + r.URL.Path
		_, _ = w.Write([]byte("{}\n"))
	})
	for want, call := range map[string]func() (any, error){
		"GET /state":    func() (any, error) { return c.State(t.Context()) },
		"GET /verify":   func() (any, error) { return c.Verify(t.Context()) },
		"GET /readyz":   func() (any, error) { return nil, c.Ready(t.Context()) },
		"POST /release": func() (any, error) { return c.Release(t.Context(), Release{}) },
	} {
		answer, err := call()
		if err != nil || got != want {
			t.Errorf("requested %s, error %v, want %s", got, err, want)
		}
		if outcome, isText := answer.(string); isText && outcome != "{}" {
			t.Errorf("the outcome is %q, want one line", outcome)
		}
	}
}
