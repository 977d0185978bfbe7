// SPDX-License-Identifier: Apache-2.0

// Package opi is a client for the OPI agent of an xPU, in terms of Networks and Ports.
//
// OPI agents are asynchronous and promise little: a successful Create proves nothing, and most
// errors are Unknown. Each method of [Client] therefore reads the agent's state, does what is
// missing, and returns nil only when the agent reports exactly the wanted state. A method may be
// called again at any time, even if the outcome of an earlier call is unknown. For agents that
// report nothing, see [Traits].
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
	// connectTimeout bounds an attempt to connect.
	connectTimeout = 5 * time.Second

	// bytes of a response; a page of ports has some 100 KiB, and 1 MiB if all are trunks with
	// [MaxNetworks] networks
	maxMessage = 2 << 20
	maxHeaders = 64 << 10 // bytes of a response's headers, including an error's text

	// buffer is the size of a connection's read and write buffers, in bytes. It is smaller than
	// gRPC's default of 32 KiB, because each of a thousand agents has a connection that is mostly
	// idle.
	buffer = 4 << 10
)

// Config configures the connection to an OPI agent.
type Config struct {
	Endpoint string      // host:port
	TLS      *tls.Config // see [TLSConfig]; nil means plaintext
	Dialect  Dialect
	// Installation marks the caller's objects at the agent. Other objects are never replaced,
	// changed or deleted.
	Installation Installation
	// FailedGrace is how long a failed port or network may take to recover by itself. The default
	// is the dialect's [Timing.Recovery].
	FailedGrace time.Duration
	// Claimed returns the owner of a port of the installation, or "" if the port is this client's.
	// It distinguishes ports of Functions that have the same address on different nodes. It may be
	// nil.
	Claimed func(PortStatus) string
	// VTEP is the address of the xPU that new networks with a VNI are sent from. If it is zero, the
	// agent chooses one. A network that the agent has keeps its address.
	VTEP netip.Addr
	// Stats receives the events of each call, for example for traces. It may be nil.
	Stats stats.Handler

	// ReloadTLS replaces TLS if it is not nil. It is called for each new connection, so that
	// renewed certificates are used. If it fails, the connection fails.
	ReloadTLS func() (*tls.Config, error)
}

// authority returns the authority that is sent to the agent: the endpoint without an IPv6 zone,
// because a zone has a meaning only on this host. Under TLS, its host is the name expected in the
// agent's certificate.
func (c Config) authority() string {
	if c.TLS != nil && c.TLS.ServerName != "" {
		return c.TLS.ServerName
	}
	host, port, _ := net.SplitHostPort(c.Endpoint)
	host, _, _ = strings.Cut(host, "%")
	return net.JoinHostPort(host, port)
}

// CheckEndpoint returns what is wrong with an endpoint. It does not connect.
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

// NormalEndpoint returns a canonical form of the endpoint: two spellings of one address have the
// same form. Names are not resolved, except localhost.
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

// Client is a connection to one OPI agent. Its methods are safe for concurrent use, but concurrent
// calls for the same id would undo each other's work.
type Client struct {
	endpoint     string
	installation Installation
	claimed      func(PortStatus) string
	failedGrace  time.Duration
	conn         *grpc.ClientConn
	traits       Traits
	agent        Agent
	vtep         netip.Addr

	ports, networks, vrfs, gateways objectKind

	changes  changes
	vrfUses  vrfUses
	accepted accepted // for agents that do not report their ports

	noOptions  atomic.Bool // the agent is known not to implement [Options]
	hasOptions atomic.Bool // the agent is known to implement [Options]
	mtus       sync.Map    // network id to int, see MTU

	peer        atomic.Value // string: see Peer
	connections atomic.Int64 // number of connections so far
}

// Dial returns a Client. It does not connect; the first call or [Client.Watch] does.
func Dial(cfg Config) (*Client, error) {
	if cfg.Dialect.New == nil {
		return nil, errors.New("opi: no dialect is given")
	}
	if cfg.Installation == "" {
		return nil, errors.New("opi: no installation is given")
	}
	if err := CheckEndpoint(cfg.Endpoint); err != nil {
		return nil, err
	}

	traits := cfg.Dialect.Traits
	c := &Client{
		endpoint: cfg.Endpoint, installation: cfg.Installation, claimed: cfg.Claimed,
		failedGrace: cmp.Or(cfg.FailedGrace, traits.Timing.Recovery), vtep: cfg.VTEP,
		traits: traits, changes: changes{timing: traits.Timing},
	}

	// A target of gRPC's own schemes is a URI, in which the zone of an IPv6 address would be taken
	// for an escape sequence.
	conn, err := grpc.NewClient("passthrough:///agent", c.dialOptions(cfg)...)
	if err != nil {
		return nil, fmt.Errorf("opi: endpoint %q: %w", cfg.Endpoint, err)
	}

	c.conn, c.agent = conn, cfg.Dialect.New(conn)
	c.setKinds()

	return c, nil
}

// dialOptions returns the options of the connection. Each attempt to connect sets peer and
// connections.
func (c *Client) dialOptions(cfg Config) []grpc.DialOption {
	dialer := newDialer()
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := dialer.DialContext(ctx, "tcp", cfg.Endpoint)
		if err == nil {
			c.peer.Store(conn.RemoteAddr().String())
			c.connections.Add(1)
		}
		return conn, err
	}

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
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithUnaryInterceptor(limitConcurrency(c.traits.Timing)),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithReadBufferSize(buffer),
		grpc.WithWriteBufferSize(buffer),
	}

	if cfg.Stats != nil {
		options = append(options, grpc.WithStatsHandler(cfg.Stats))
	}

	return options
}

// setKinds sets the calls for each kind of objects.
func (c *Client) setKinds() {
	c.ports = objectKind{noun: "port", delete: c.agent.DeletePort,
		deleteAgain: c.traits.Timing.DeleteAgain}
	c.ports.status = func(ctx context.Context, id string) (Status, bool, error) {
		got, err := c.agent.Port(ctx, id)
		// A port that is being deleted may have lost its networks, and so its owner. It is waited
		// for.
		ownerUnknown := got.State == StateDeleting && len(got.Networks) == 0
		return got.Status, ownerUnknown || c.ownerOf(got) == "", err
	}

	c.networks = objectKind{noun: "network", delete: c.agent.DeleteNetwork}
	c.networks.status = func(ctx context.Context, id string) (Status, bool, error) {
		got, err := c.agent.Network(ctx, id)
		return got.Status, c.installation.Owns(id), err
	}

	c.vrfs = objectKind{noun: "VRF", delete: c.agent.DeleteVRF}
	c.vrfs.status = func(ctx context.Context, id string) (Status, bool, error) {
		got, err := c.agent.VRF(ctx, id)
		return got.Status, c.installation.Owns(id), err
	}

	c.gateways = objectKind{noun: "gateway", delete: c.agent.DeleteGateway}
	c.gateways.status = func(ctx context.Context, id string) (Status, bool, error) {
		got, err := c.agent.Gateway(ctx, id)
		return got.Status, c.installation.Owns(id), err
	}
}

// ownerOf returns the owner of a port that is not this client's, or "" if the port is this
// client's.
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

// Close closes the connection. Running calls fail with ErrUnavailable.
func (c *Client) Close() error { return c.conn.Close() }

// Check returns nil if the agent answers.
func (c *Client) Check(ctx context.Context) error {
	return c.failure(ctx, "check agent", c.endpoint, c.agent.Alive(ctx))
}

// Peer returns the address and port of the agent at the last attempt to connect, or "" before the
// first. It is the same for different names of one agent.
func (c *Client) Peer() string {
	peer, _ := c.peer.Load().(string)
	return peer
}

// Connected reports whether the connection is up. A Client connects when it is first used.
func (c *Client) Connected() bool { return c.conn.GetState() == connectivity.Ready }

// Watch keeps the connection up until ctx ends, and returns the error of ctx. It calls changed from
// one goroutine: with true each time the connection has come up, and with false each time it has
// gone down or the first attempt has failed.
//
// After true, the caller must verify every Port, because the API has no boot id and an agent
// forgets its ports when it restarts.
func (c *Client) Watch(ctx context.Context, changed func(connected bool)) error {
	var last connectivity.State = -1
	var reported int64 // number of the last reported connection

	report := func(s connectivity.State) {
		if s != last {
			last = s
			c.noOptions.Store(false) // the agent may have been upgraded meanwhile
			c.hasOptions.Store(false)
			c.agent.Reconnected()
			changed(s == connectivity.Ready)
		}
	}

	for {
		state := c.conn.GetState()
		switch state {
		case connectivity.Ready:
			if made := c.connections.Load(); made != reported {
				if last == connectivity.Ready { // the end of the last connection went unnoticed
					report(connectivity.TransientFailure)
				}
				reported = made
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
			// Report this even if the connection is up again, because the new connection may lead
			// to a restarted agent.
			report(connectivity.TransientFailure)
		}
	}
}
