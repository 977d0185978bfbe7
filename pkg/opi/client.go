// SPDX-License-Identifier: Apache-2.0

// Package opi speaks to an xPU's OPI agent in terms of Networks and Ports.
//
// OPI agents are asynchronous and promise little: a successful Create proves nothing, and most
// errors are Unknown. Each method of [Client] therefore looks at what the agent has, does what is
// missing, and returns nil only when the agent says that exactly the wanted state is there. It may
// be called again at any time, also when the outcome of an earlier call is unknown.
package opi

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/stats"
)

const (
	// maxInFlight bounds the RPCs that run on one agent at once: those that change something, and
	// those that do not. The reference agent has one task queue and answers a larger burst with
	// "busy" and delays of seconds.
	maxInFlight = 8
	// rpcTimeout bounds one RPC that changes nothing; the methods of Client are bounded by their
	// context. Agents answer such within milliseconds.
	rpcTimeout = 5 * time.Second

	maxMessage = 1 << 20  // bytes of an answer; a page of ports has some 100 KiB
	maxHeaders = 64 << 10 // bytes of an answer's headers, an error's text among them

	// buffer is the size in bytes of a connection's buffers for reading and for writing. A thousand
	// agents have a connection each, which is idle nearly always; gRPC's default is 32 KiB.
	buffer = 4 << 10
)

// Config says how to reach an OPI agent.
type Config struct {
	Endpoint string      // host:port
	TLS      *tls.Config // see [TLSConfig]; nil is plaintext
	Dialect  Dialect
	// Installation marks what is the caller's at the agent. What is not is never replaced, changed
	// or deleted.
	Installation Installation
	// FailedGrace is how long a port or network that the agent says has failed may take to come up
	// by itself, as the reference agent tries again after 2 s. Default 3 s.
	FailedGrace time.Duration
	// Claimed, where set, says whose a port of the installation is that is not this client's, such
	// as that of another node which has a Function of the same address; "" for this client's.
	Claimed func(PortStatus) string
	// Stats, where set, is told about each call, such as for traces.
	Stats stats.Handler

	// ReloadTLS, where set, replaces TLS. It is called for each new connection, which then uses
	// renewed certificates. An error of it makes the connection fail.
	ReloadTLS func() (*tls.Config, error)
}

// authority is the endpoint as gRPC names it to the agent: without the zone, which is this host's
// alone. Under TLS the host is the name that is expected in the agent's certificate.
func (c Config) authority() string {
	if c.TLS != nil && c.TLS.ServerName != "" {
		return c.TLS.ServerName
	}
	host, port, _ := net.SplitHostPort(c.Endpoint)
	host, _, _ = strings.Cut(host, "%")
	return net.JoinHostPort(host, port)
}

// CheckEndpoint says what is wrong with an endpoint. It does not connect.
func CheckEndpoint(endpoint string) error {
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil || host == "" {
		return fmt.Errorf("opi: endpoint %q is not host:port", endpoint)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("opi: endpoint %q: the port must be a number from 1 to 65535", endpoint)
	}
	return nil
}

// NormalEndpoint returns the endpoint in a form in which two that are written differently for one
// address are equal. Names are not resolved, but for localhost.
func NormalEndpoint(endpoint string) string {
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil {
		return endpoint
	}

	host = strings.TrimSuffix(strings.ToLower(host), ".")
	if host == "localhost" {
		host = "127.0.0.1"
	}

	if address, err := netip.ParseAddr(host); err == nil {
		if host = address.Unmap().String(); address.Unmap() == netip.IPv6Loopback() {
			host = "127.0.0.1"
		}
	}

	if number, err := strconv.ParseUint(port, 10, 16); err == nil {
		port = strconv.FormatUint(number, 10)
	}

	return net.JoinHostPort(host, port)
}

// Client is a connection to one OPI agent. Its methods may be called from several goroutines at
// once; calls for the same id should not be, as they would undo each other's work.
type Client struct {
	endpoint     string
	installation Installation
	claimed      func(PortStatus) string
	failedGrace  time.Duration
	conn         *grpc.ClientConn
	agent        Agent

	ports, networks kind
	changes         changes

	noOptions atomic.Bool // the agent is known to have no [Options]
	mtus      sync.Map    // int by network: see MTU

	peer        atomic.Value // string: see Peer
	connections atomic.Int64 // how many there were
}

// Dial makes a Client. It does not connect: the first call or [Client.Watch] does.
func Dial(cfg Config) (*Client, error) {
	if cfg.Dialect == nil {
		return nil, errors.New("opi: no dialect is given")
	}
	if cfg.Installation == "" {
		return nil, errors.New("opi: no installation is given")
	}
	if err := CheckEndpoint(cfg.Endpoint); err != nil {
		return nil, err
	}

	c := &Client{
		endpoint: cfg.Endpoint, installation: cfg.Installation, claimed: cfg.Claimed,
		failedGrace: cmp.Or(cfg.FailedGrace, 3*time.Second),
	}

	dialer := newDialer()
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := dialer.DialContext(ctx, "tcp", cfg.Endpoint)
		if err == nil {
			c.peer.Store(conn.RemoteAddr().String())
			c.connections.Add(1)
		}
		return conn, err
	}

	// Not a target of gRPC's own, which is a URI: the zone of an IPv6 address would be taken for an
	// escape.
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(cfg.credentials()),
		grpc.WithAuthority(cfg.authority()),
		grpc.WithNoProxy(),
		grpc.WithContextDialer(dial),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2,
				MaxDelay: 5 * time.Second,
			},
			MinConnectTimeout: rpcTimeout,
		}),
		grpc.WithUnaryInterceptor(limited()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithReadBufferSize(buffer),
		grpc.WithWriteBufferSize(buffer),
	}

	if cfg.Stats != nil {
		options = append(options, grpc.WithStatsHandler(cfg.Stats))
	}

	conn, err := grpc.NewClient("passthrough:///agent", options...)
	if err != nil {
		return nil, fmt.Errorf("opi: endpoint %q: %w", cfg.Endpoint, err)
	}

	c.conn, c.agent = conn, cfg.Dialect(conn)
	c.ports = kind{noun: "port", delete: c.agent.DeletePort, again: true}
	c.ports.status = func(ctx context.Context, id string) (Status, bool, error) {
		got, err := c.agent.Port(ctx, id)
		// whose it is: it is waited for
		untold := got.State == StateDeleting && len(got.Networks) == 0
		return got.Status, untold || c.ownerOf(got) == "", err
	}

	c.networks = kind{noun: "network", delete: c.agent.DeleteNetwork}
	c.networks.status = func(ctx context.Context, id string) (Status, bool, error) {
		got, err := c.agent.Network(ctx, id)
		return got.Status, c.installation.Owns(id), err
	}

	return c, nil
}

// ownerOf says whose a port is that is not this client's, "" for this client's.
func (c *Client) ownerOf(p PortStatus) string {
	switch {
	case !c.installation.OwnsPort(p.Port):
		return fmt.Sprintf("somebody else, in networks %q, while those of this installation "+
			"begin with %s-", p.Networks, c.installation)
	case c.claimed != nil:
		return c.claimed(p)
	}
	return ""
}

// Close ends the connection. Calls in flight fail with ErrUnavailable.
func (c *Client) Close() error { return c.conn.Close() }

// Check tells whether the agent is alive.
func (c *Client) Check(ctx context.Context) error {
	return c.failure(ctx, "check agent", c.endpoint, c.agent.Alive(ctx))
}

// Peer is the address and port of the agent at the last attempt to connect, "" before. Endpoints
// with several names for one agent have the same.
func (c *Client) Peer() string {
	peer, _ := c.peer.Load().(string)
	return peer
}

// Connected tells whether the connection is up now. A Client connects when it is first used.
func (c *Client) Connected() bool { return c.conn.GetState() == connectivity.Ready }

// Watch keeps the connection up until the context ends, and returns the context's error. It calls
// changed, from one goroutine, with true each time the connection came up, and with false each time
// it went down or the first attempt failed.
//
// After true every Port must be verified: the API has no boot id, and an agent forgets its ports
// when it restarts.
func (c *Client) Watch(ctx context.Context, changed func(connected bool)) error {
	var last connectivity.State = -1
	var connection int64 // the one that was told of last

	report := func(s connectivity.State) {
		if s != last {
			last = s
			c.noOptions.Store(false) // an agent that was restarted may be another release
			c.agent.Reconnected()
			changed(s == connectivity.Ready)
		}
	}

	for {
		state := c.conn.GetState()
		switch state {
		case connectivity.Ready:
			if made := c.connections.Load(); made != connection {
				if last == connectivity.Ready { // the last one went unnoticed
					report(connectivity.TransientFailure)
				}
				connection = made
			}
			report(state)
		case connectivity.TransientFailure:
			report(state)
		case connectivity.Idle:
			c.conn.Connect()
		case connectivity.Shutdown:
			return errors.New("opi: " + c.endpoint + ": the client is closed")
		}

		if !c.conn.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}

		if state == connectivity.Ready {
			// Report this even if the connection is up again: it is a new one, perhaps to an agent
			// that was restarted.
			report(connectivity.TransientFailure)
		}
	}
}
