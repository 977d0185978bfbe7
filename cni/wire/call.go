// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
)

// Errors of [Call]. Call also fails for a request that is larger than [MaxMessage]. Errors of the
// agent itself are in [Reply.Error].
var (
	// ErrAway: no process listens at the socket. The request was not sent.
	ErrAway = errors.New("xpu-agent is away")
	// ErrNoReply: there was no valid reply. The request may be done, partly done, or still running.
	ErrNoReply = errors.New("no reply of xpu-agent")
	// ErrVersion: the other side uses another [Version] and did nothing.
	ErrVersion = errors.New("another version of the agent's contract")
)

// Call sends a request to the agent that listens on a unix socket and waits for its reply. It sets
// [Request.Version]. The deadline of ctx limits the whole call. When ctx ends, the connection is
// closed, which the agent notices.
func Call(ctx context.Context, socket string, request Request) (Reply, error) {
	request.Version = Version
	message, err := Encode(request)
	if err != nil {
		return Reply{}, err
	}

	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return Reply{}, fmt.Errorf("%w: %w", ErrAway, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()

	var reply []byte
	_, err = conn.Write(message)
	if err == nil {
		err = conn.(*net.UnixConn).CloseWrite()
	}

	if err == nil {
		// one byte more than is allowed
		reply, err = io.ReadAll(io.LimitReader(conn, MaxMessage+1))
	}

	if ctx.Err() != nil {
		err = ctx.Err() // the connection was closed because of it
	}
	if err != nil {
		return Reply{}, fmt.Errorf("%w: %w", ErrNoReply, err)
	}

	return DecodeReply(reply)
}

// Encode returns the message of a request. If the message would be larger than [MaxMessage], the
// error says which part is large.
func Encode(request Request) ([]byte, error) {
	message, err := json.Marshal(request)
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", request.Command, err)
	}

	if len(message) > MaxMessage {
		return nil, fmt.Errorf("request %s has %d bytes, at most %d are allowed: the network "+
			"configuration has %d, with what the "+
			"plugins before put into prevResult, the IPAM plugin's result %d, CNI_ARGS %d",
			request.Command, len(message), MaxMessage, len(request.Config), len(request.IPAM),
			len(request.Args))
	}

	return message, nil
}

// DecodeReply decodes the message of a reply. The error is [ErrVersion] or [ErrNoReply].
func DecodeReply(data []byte) (Reply, error) {
	const missing = -1
	reply := Reply{Version: missing}
	// decodes the version even if other fields have the form of another version
	err := json.Unmarshal(data, &reply)
	switch {
	case len(data) > MaxMessage:
		return Reply{}, fmt.Errorf("%w: it has more than %d bytes", ErrNoReply, MaxMessage)
	case len(data) == 0:
		return Reply{}, fmt.Errorf("%w: the connection was closed", ErrNoReply)
	case reply.Version != missing && reply.Version != Version:
		return Reply{},
			fmt.Errorf("%w: this side speaks %d, xpu-agent %d; install both from one release",
				ErrVersion, Version, reply.Version)
	case err != nil:
		return Reply{}, fmt.Errorf("%w: %w", ErrNoReply, err)
	case reply.Version == missing:
		return Reply{}, fmt.Errorf("%w: it has no version", ErrNoReply)
	}

	for _, raw := range []*json.RawMessage{&reply.Result, &reply.DeviceInfo} {
		if string(*raw) == "null" { // null means the same as a missing field
			*raw = nil
		}
	}

	return reply, nil
}
