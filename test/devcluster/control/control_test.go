// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func serve(t *testing.T, socket string, handler http.Handler) {
	t.Helper()
	listener, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: handler}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
}

func TestClient(t *testing.T) {
	mux := http.NewServeMux()
	mux.Handle("GET /node", Handler(func(*http.Request) (any, error) {
		return Node{
			Name: "node1", Connected: true,
		}, nil
	}))

	mux.Handle("POST /echo", Handler(func(r *http.Request) (any, error) {
		content, err := io.ReadAll(r.Body)
		return string(content), err
	}))

	mux.Handle("POST /fail", Handler(func(*http.Request) (any, error) {
		return nil,
			errors.New("node9 is stopped")
	}))

	socket := filepath.Join(t.TempDir(), "s")
	serve(t, socket, mux)
	client := NewClient(socket)

	var node Node
	if err := client.Get(t.Context(), "/node", &node); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Node{Name: "node1", Connected: true}, node); diff != "" {
		t.Errorf("GET (-want +got):\n%s", diff)
	}

	var echo string
	if err := client.Post(t.Context(), "/echo", strings.NewReader("body"), &echo); err != nil ||
		echo != "body" {
		t.Errorf("POST: %q, %v", echo, err)
	}
	if err := client.Post(t.Context(), "/fail", nil, nil); err == nil ||
		err.Error() != "node9 is stopped" {
		t.Errorf("the server's error came as %v", err)
	}
	if err := client.Get(t.Context(), "/none", nil); err == nil ||
		!strings.Contains(err.Error(), "404") {
		t.Errorf("an unknown path: %v", err)
	}
}

func TestListenIsPrivateAndReplaces(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	// A killed process leaves the file behind.
	if err := os.WriteFile(socket, nil, 0o644); err != nil {
		t.Fatal(err)
	}

	listener, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()

	info, err := os.Stat(socket)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, want 0600", info.Mode())
	}
}

func TestServerPID(t *testing.T) {
	dir := t.TempDir()
	serve(t, filepath.Join(dir, "s"), http.NotFoundHandler())
	got, err := ServerPID(t.Context(), filepath.Join(dir, "s"))
	if err != nil || got != os.Getpid() {
		t.Errorf("got %d, %v; want %d", got, err, os.Getpid())
	}
}

func TestDialLongPath(t *testing.T) {
	dir := t.TempDir()
	long := filepath.Join(dir, strings.Repeat("x", 120))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}

	serve(t, filepath.Join(dir, "s"), http.NotFoundHandler())
	socket := filepath.Join(long, "s")
	if err := os.Link(filepath.Join(dir, "s"), socket); err != nil {
		t.Fatal(err)
	}

	conn, err := Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}

	conn.Close()
}

func TestEvents(t *testing.T) {
	for _, test := range []struct {
		name   string
		report func(*Reporter)
		stages []string
		want   string // error
	}{
		{"ready", func(r *Reporter) {
			r.Stage("%s Ready", "node1")
			r.Finish(nil)
		}, []string{"node1 Ready"}, ""},
		{"failed", func(r *Reporter) {
			r.Stage("one")
			r.Finish(errors.New("no disk"))
		}, []string{"one"}, "no disk"},
		{"ended", func(r *Reporter) {
			r.Stage("one")
			r.out.Close()
		}, []string{"one"}, ErrEnded.Error()},
	} {
		t.Run(test.name, func(t *testing.T) {
			in, out := io.Pipe()
			go test.report(NewReporter(out))
			var stages []string
			err := Follow(in, func(e Event) { stages = append(stages, e.Stage) })
			if diff := cmp.Diff(test.stages, stages); diff != "" {
				t.Errorf("stages (-want +got):\n%s", diff)
			}
			if got := errorString(err); got != test.want {
				t.Errorf("error %q, want %q", got, test.want)
			}
		})
	}
}

func errorString(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
