// SPDX-License-Identifier: Apache-2.0

// Package control is the protocol between the parts of a running development cluster: from the
// devcluster command to a cluster's supervisor, and from the supervisor to its nodes. It is JSON
// over HTTP on unix sockets that only their owner may use, and, during a start, a stream of events
// on a pipe.
package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
)

// Cluster is the output of inspect.
type Cluster struct {
	Name              string `json:"name"`
	KubernetesVersion string `json:"kubernetesVersion"`
	Kubeconfig        string `json:"kubeconfig"` // path on the machine
	// URL of the API server on the machine's loopback
	API string `json:"api"`
	// the supervisor, in the machine's PID namespace
	InitPID    int         `json:"initPID"`
	NetNS      string      `json:"netns"` // of the control plane and the bridge
	Bridge     string      `json:"bridge"`
	Subnet     string      `json:"subnet"` // CIDR of the bridge
	Logs       string      `json:"logs"`   // directory that contains audit.log
	Components []Component `json:"components"`
	Nodes      []Node      `json:"nodes"`
}

// Component is a program of the cluster or of a node.
type Component struct {
	Name    string `json:"name"`
	Running bool   `json:"running"`
	Reason  string `json:"reason,omitempty"` // why it is not running
}

// States of a node.
const (
	NodeStarting = "starting"
	NodeRunning  = "running"
	NodeStopped  = "stopped"
	NodeFailed   = "failed"
)

// Node is a node of a Cluster. PID, NetNS and Root are set while it runs.
type Node struct {
	Name      string `json:"name"`
	IP        string `json:"ip"`
	PodSubnet string `json:"podSubnet"` // CIDR
	State     string `json:"state"`
	Reason    string `json:"reason,omitempty"` // why it failed
	Connected bool   `json:"connected"`        // false after cut
	PID       int    `json:"pid,omitempty"`    // the node's PID 1, in the machine's PID namespace
	NetNS     string `json:"netns,omitempty"`
	Root      string `json:"root,omitempty"` // the node's file system as seen from the machine
	Cgroup    string `json:"cgroup"`         // path in every hierarchy

	Components []Component `json:"components"`
}

// Event is a line in the event stream of a starting process.
type Event struct {
	Stage   string  `json:"stage,omitempty"`   // a finished stage
	Seconds float64 `json:"seconds,omitempty"` // since the start
	Ready   bool    `json:"ready,omitempty"`   // everything is ready; the last event
	Error   string  `json:"error,omitempty"`   // the start failed; the last event
}

type failure struct {
	Error string `json:"error"`
}

// Handler answers a request with a value that is encoded as JSON.
type Handler func(r *http.Request) (any, error)

// ServeHTTP implements http.Handler.
func (h Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, err := h(r)
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		answer = failure{Error: err.Error()}
	}
	// If this fails, the client is gone.
	_ = json.NewEncoder(w).Encode(answer)
}

// Listen creates a unix socket at path for only the owner. It replaces a socket left by an ended
// process.
func Listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}

	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		listener.Close()
		return nil, err
	}

	return listener, nil
}

// Client is a client of one socket.
type Client struct {
	http   *http.Client
	socket string
}

// NewClient returns a client of the server at socket. It makes a new connection for every call.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) { return Dial(ctx, socket) }
	return &Client{
		socket: socket,
		http: &http.Client{
			Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true},
		},
	}
}

// Dial connects to a unix socket. If the path exceeds the kernel's limit for addresses (107 bytes),
// it reaches the socket through its directory.
func Dial(ctx context.Context, socket string) (net.Conn, error) {
	var dialer net.Dialer
	if len(socket) < 100 {
		return dialer.DialContext(ctx, "unix", socket)
	}

	slash := strings.LastIndex(socket, "/")
	dir, err := os.Open(socket[:slash])
	if err != nil {
		return nil, err
	}
	defer dir.Close()

	return dialer.DialContext(ctx, "unix",
		fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), socket[slash+1:]))
}

// Get requests path and decodes the answer into result.
func (c *Client) Get(ctx context.Context, path string, result any) error {
	return c.do(ctx, http.MethodGet, path, nil, result)
}

// Post sends body, which may be nil, and decodes the answer into result, which may be nil.
func (c *Client) Post(ctx context.Context, path string, body io.Reader, result any) error {
	return c.do(ctx, http.MethodPost, path, body, result)
}

func (c *Client) do(ctx context.Context, method, path string, body io.Reader, result any) error {
	request, err := http.NewRequestWithContext(ctx, method, "http://devcluster"+path, body)
	if err != nil {
		return err
	}

	response, err := c.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()

	content, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}

	if response.StatusCode != http.StatusOK {
		var f failure
		if json.Unmarshal(content, &f) == nil && f.Error != "" {
			return errors.New(f.Error)
		}
		return fmt.Errorf("%s %s: %s: %s", method, path, response.Status, bytes.TrimSpace(content))
	}

	if result == nil {
		return nil
	}

	return json.Unmarshal(content, result)
}
