// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
)

// DefaultSocket is the agent's socket for administrators, in the directory of its journal.
const DefaultSocket = "/var/lib/xpu-agent/admin.sock"

// Paths of the HTTP requests that an agent serves: GET of a [State], the same with a new
// [Verification], POST of a [Release], and, at a separate socket, GET of its readiness.
const (
	StatePath   = "/state"
	VerifyPath  = "/verify"
	ReleasePath = "/release"
	ReadyPath   = "/readyz"
)

// MaxMessage bounds a request and a State, in bytes. A State has some hundred bytes per Function.
const MaxMessage = 64 << 20

// Client is a client of the agent behind a unix socket on this machine.
type Client struct {
	Socket string
}

// State returns the current state of the node.
func (c Client) State(ctx context.Context) (*State, error) { return c.state(ctx, StatePath) }

// Verify has the agent compare its inventory with sriovnet, and returns the state of the node with
// the result.
func (c Client) Verify(ctx context.Context) (*State, error) { return c.state(ctx, VerifyPath) }

func (c Client) state(ctx context.Context, path string) (*State, error) {
	answer, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}

	state, err := Decode(answer)
	if err != nil {
		return nil, fmt.Errorf("answer of xpu-agent: %w", err)
	}
	return state, nil
}

// Decode decodes a State from an agent of any version. It skips unknown fields. A text longer than
// [MaxMessage] is an error.
func Decode(answer []byte) (*State, error) {
	if len(answer) > MaxMessage {
		return nil, fmt.Errorf("is longer than %d bytes", MaxMessage)
	}

	var state *State
	if err := json.Unmarshal(answer, &state); err != nil {
		return nil, fmt.Errorf("is no state of a node: %w", err)
	}
	if state == nil {
		return nil, errors.New("is no state of a node: it is null")
	}

	return state, nil
}

// Ready returns nil if the agent is ready, or an error with the reason.
func (c Client) Ready(ctx context.Context) error {
	_, err := c.do(ctx, http.MethodGet, ReadyPath, nil)
	return err
}

// Release gives up a hook or ends a quarantine, and returns the result as one line. It does not
// wait for the next hook.
func (c Client) Release(ctx context.Context, r Release) (outcome string, err error) {
	body, err := json.Marshal(r)
	if err != nil {
		return "", err
	}
	answer, err := c.do(ctx, http.MethodPost, ReleasePath, body)
	return strings.TrimSpace(string(answer)), err
}

func (c Client) do(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	transport := &http.Transport{DialContext: func(
		ctx context.Context, _, _ string,
	) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", c.Socket)
	}}

	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, method, "http://xpu-agent"+path,
		bytes.NewReader(body))
	if err != nil {
		return nil, err
	}

	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		if cause := (*net.OpError)(nil); errors.As(err, &cause) {
			err = cause
		}
		return nil, fmt.Errorf("xpu-agent is away: %w", err)
	}

	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, MaxMessage+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("answer of xpu-agent: %w", err)
	case len(answer) > MaxMessage:
		return nil, fmt.Errorf("answer of xpu-agent: is longer than %d bytes", MaxMessage)
	case response.StatusCode != http.StatusOK:
		return nil, errors.New(strings.TrimSpace(string(answer)))
	}

	return answer, nil
}

// Runs reports whether an agent listens, as far as this process may find out.
func (c Client) Runs() bool {
	conn, err := net.Dial("unix", c.Socket)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}
