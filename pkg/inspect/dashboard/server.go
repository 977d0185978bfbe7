// SPDX-License-Identifier: Apache-2.0

package dashboard

import (
	"bytes"
	"context"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate/view"
)

// Bounds of the server.
const (
	maxConnections = 64
	maxStreams     = 8       // pages that are open
	maxRequests    = 4       // questions to the cluster at the same time
	maxMessage     = 1 << 18 // bytes of records in one message, so that the page parses it at once
	// writeTimeout is how long a page may take for a message. A slower one is cut off, and begins
	// anew.
	writeTimeout = 10 * time.Second
	// heartbeat lets the page notice that the server is gone.
	heartbeat = 10 * time.Second
)

//go:embed page
var page embed.FS

// files are the page's files and their types.
var files = [...]struct{ name, kind string }{
	{"index.html", "text/html; charset=utf-8"},
	{"style.css", "text/css; charset=utf-8"},
	{"app.js", "text/javascript; charset=utf-8"},
	{"icon.svg", "image/svg+xml"},
}

// policy lets the page use its own files only, and no text of the cluster become markup.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; " +
	"img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

// handler serves the page at an address: to those who know the token, under names of the loopback
// interface only. A page of another site that has its name resolved to 127.0.0.1 sends its own name
// as Host.
func (d *Dashboard) handler(address string) http.Handler {
	_, port, _ := net.SplitHostPort(address)
	hosts := []string{"127.0.0.1:" + port, "localhost:" + port, "[::1]:" + port}
	routes := d.routes()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		// Otherwise the last request's would be in force.
		longest := time.Now().Add(requestTimeout + writeTimeout)
		_ = http.NewResponseController(w).SetWriteDeadline(longest)

		token, rest, found := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		switch {
		case !slices.Contains(hosts, strings.ToLower(r.Host)):
			http.Error(w, "the Host must be "+strings.Join(hosts, ", ")+": forward the same port "+
				"number, as in ssh -L "+port+":127.0.0.1:"+port, http.StatusMisdirectedRequest)
		case subtle.ConstantTimeCompare([]byte(token), []byte(d.token)) != 1 || !found:
			http.Error(w, "the token is missing or wrong: use the address that xpuctl dashboard "+
				"printed last", http.StatusForbidden)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "the page only reads", http.StatusMethodNotAllowed)
		case routes[rest] == nil:
			http.Error(w, "there is no such page", http.StatusNotFound)
		default:
			routes[rest](w, r)
		}
	})
}

func (d *Dashboard) routes() map[string]http.HandlerFunc {
	routes := map[string]http.HandlerFunc{
		"events": d.events, "explain": d.explain, "node": d.node,
	}
	for _, file := range files {
		content, err := page.ReadFile("page/" + file.name)
		serve := func(w http.ResponseWriter, _ *http.Request) {
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", file.kind)
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
			_, _ = w.Write(content)
		}
		routes[file.name] = serve
		if file.name == "index.html" {
			routes[""] = serve
		}
	}
	return routes
}

// explain answers with the explanation of the pod in the parameters namespace and name.
func (d *Dashboard) explain(w http.ResponseWriter, r *http.Request) {
	key := types.NamespacedName{Namespace: r.FormValue("namespace"), Name: r.FormValue("name")}
	for _, name := range []string{key.Namespace, key.Name} {
		if wrong := validation.IsDNS1123Subdomain(name); len(wrong) > 0 {
			http.Error(w, fmt.Sprintf("%q: %s", name, wrong[0]), http.StatusBadRequest)
			return
		}
	}

	d.answer(w, r, func(ctx context.Context) (any, error) {
		pod, err := d.options.Explain(ctx, key)
		if err != nil {
			return nil, err
		}
		return newExplanation(pod), nil
	})
}

// Explanation is an explanation of a pod, with the titles that its text form has.
type Explanation struct {
	*explain.Pod
	Titles []string                  `json:"titles"` // of the interfaces
	Marks  map[explain.Status]string `json:"marks"`
}

func newExplanation(pod *explain.Pod) Explanation {
	out := Explanation{Pod: pod, Titles: []string{}, Marks: marks()}
	for _, i := range pod.Interfaces {
		out.Titles = append(out.Titles, i.Title())
	}
	return out
}

// marks returns the character of each status.
func marks() map[explain.Status]string {
	out := map[explain.Status]string{}
	for _, s := range []explain.Status{
		explain.Done, explain.Waiting, explain.Failed, explain.Skipped, explain.Unknown,
	} {
		out[s] = s.Mark()
	}
	return out
}

// node answers with what the agent of the node in the parameter name says.
func (d *Dashboard) node(w http.ResponseWriter, r *http.Request) {
	name := r.FormValue("name")
	if wrong := validation.IsDNS1123Subdomain(name); len(wrong) > 0 {
		http.Error(w, fmt.Sprintf("%q: %s", name, wrong[0]), http.StatusBadRequest)
		return
	}

	d.answer(w, r, func(ctx context.Context) (any, error) {
		state, err := d.options.State(ctx, name)
		switch {
		case apierrors.IsForbidden(err) || err != nil && strings.Contains(err.Error(), "forbidden"):
			return nil, fmt.Errorf("%w; whoever may create pods/exec in namespace %s can ask the "+
				"agent: an administrator can bind such a role to you", err, d.options.AgentNamespace)
		case err != nil:
			return nil, err
		}
		return view.NewNode(state), nil
	})
}

// answer writes what a question to the cluster gives, as JSON, or its error as text.
func (d *Dashboard) answer(
	w http.ResponseWriter, r *http.Request, ask func(context.Context) (any, error),
) {
	ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()

	select {
	case d.requests <- struct{}{}:
		defer func() { <-d.requests }()
	case <-ctx.Done():
		http.Error(w, "too many questions at the same time: try again", http.StatusServiceUnavailable)
		return
	}

	found, err := ask(ctx)
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(found)
}

// events sends all records and then changes, as Server-Sent Events
// (https://html.spec.whatwg.org/multipage/server-sent-events.html): "begin" with what never
// changes, "records" with some of the records and the keys of those that are gone, "whole" when all
// have been sent, and "alive" when there is nothing else to send. Changes that a slow page has not
// got yet become one.
func (d *Dashboard) events(w http.ResponseWriter, r *http.Request) {
	select {
	case d.streams <- struct{}{}:
		defer func() { <-d.streams }()
	default:
		http.Error(w, fmt.Sprintf("%d pages are open already: close one", maxStreams),
			http.StatusServiceUnavailable)
		return
	}

	w.Header().Set("Content-Type", "text/event-stream")
	s := &stream{to: w, control: http.NewResponseController(w)}
	begin, _ := json.Marshal(map[string]any{"cluster": d.options.Cluster, "marks": marks()})
	if s.send("begin", begin) != nil {
		return
	}

	alive := time.NewTicker(heartbeat)
	defer alive.Stop()
	var sent snapshot
	for {
		next, outdated := d.snapshot()
		if next != nil {
			if s.difference(sent, next) != nil {
				return
			}
			sent = next
		}

		if !s.wait(r.Context(), outdated, alive.C) {
			return
		}
	}
}

// stream writes events to a page.
type stream struct {
	to      io.Writer
	control *http.ResponseController
}

// wait returns true when there is something to send. Meanwhile it shows the page that the server is
// there. It returns false when the page is gone.
func (s *stream) wait(
	ctx context.Context, outdated <-chan struct{}, alive <-chan time.Time,
) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-outdated:
			return true
		case <-alive:
			if s.send("alive", []byte("{}")) != nil {
				return false
			}
		}
	}
}

// difference sends what makes one snapshot of another.
func (s *stream) difference(from, to snapshot) error {
	var set bytes.Buffer
	for _, key := range slices.Sorted(maps.Keys(to)) {
		if from[key] == to[key] {
			continue
		}
		if set.Len() > 0 {
			set.WriteByte(',')
		}
		name, err := json.Marshal(key)
		if err != nil {
			return err
		}
		set.Write(name)
		set.WriteByte(':')
		set.Write(to[key].json)
		if set.Len() < maxMessage {
			continue
		}
		if err := s.send("records", []byte(`{"set":{`+set.String()+`}}`)); err != nil {
			return err
		}
		set.Reset()
	}

	gone := []string{}
	for key := range from {
		if to[key] == nil {
			gone = append(gone, key)
		}
	}
	slices.Sort(gone)
	keys, err := json.Marshal(gone)
	if err != nil {
		return err
	}
	if set.Len() > 0 || len(gone) > 0 {
		if err := s.send("records",
			[]byte(`{"set":{`+set.String()+`},"gone":`+string(keys)+`}`)); err != nil {
			return err
		}
	}
	if from == nil {
		return s.send("whole", []byte("{}"))
	}
	return nil
}

// send writes an event. The page has a limited time to take it.
func (s *stream) send(event string, data []byte) error {
	if err := s.control.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(s.to, "event: %s\ndata: %s\n\n", event, data); err != nil {
		return err
	}
	return s.control.Flush()
}
