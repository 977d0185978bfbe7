// Package opi speaks to an xPU's OPI agent in terms of Networks and Ports.
//
// OPI agents are asynchronous and promise little: a successful Create proves nothing, and most errors are Unknown. Each method
// of [Client] therefore looks at what the agent has, does what is missing, and returns nil only when the agent says that
// exactly the wanted state is there. It may be called again at any time, also when the outcome of an earlier call is unknown.
package opi

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
)

const (
	// maxInFlight bounds the RPCs that run on one agent at once. The reference agent has one task queue and answers a
	// larger burst with "busy" and delays of seconds.
	maxInFlight = 8
	// rpcTimeout bounds one RPC; the methods of Client are bounded by their context. Agents answer within milliseconds.
	rpcTimeout = 5 * time.Second

	maxMessage = 1 << 20  // bytes of an answer; a page of ports has some 100 KiB
	maxHeaders = 64 << 10 // bytes of an answer's headers, an error's text among them
)

// Config says how to reach an OPI agent.
type Config struct {
	Endpoint string      // host:port
	TLS      *tls.Config // see [TLSConfig]; nil is plaintext
	Dialect  Dialect
	// Installation marks what is the caller's at the agent. What is not is never replaced, changed or deleted.
	Installation Installation

	// ReloadTLS, where set, replaces TLS. It is called for each new connection, which then uses renewed certificates. An
	// error of it makes the connection fail.
	ReloadTLS func() (*tls.Config, error)
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

// Client is a connection to one OPI agent. Its methods may be called from several goroutines at once; calls for the
// same id should not be, as they would undo each other's work.
type Client struct {
	endpoint     string
	installation Installation
	conn         *grpc.ClientConn
	agent        Agent

	ports, networks kind
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
	dialer := newDialer()
	conn, err := grpc.NewClient(cfg.Endpoint,
		grpc.WithTransportCredentials(cfg.credentials()),
		grpc.WithNoProxy(),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", addr) }),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: rpcTimeout,
		}),
		grpc.WithUnaryInterceptor(bounded()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithMaxHeaderListSize(maxHeaders),
	)
	if err != nil {
		return nil, fmt.Errorf("opi: endpoint %q: %w", cfg.Endpoint, err)
	}
	c := &Client{endpoint: cfg.Endpoint, installation: cfg.Installation, conn: conn, agent: cfg.Dialect(conn)}
	c.ports = kind{noun: "port", delete: c.agent.DeletePort, again: true}
	c.ports.status = func(ctx context.Context, id string) (Status, bool, error) {
		got, err := c.agent.Port(ctx, id)
		return got.Status, c.installation.OwnsPort(got.Port), err
	}
	c.networks = kind{noun: "network", delete: c.agent.DeleteNetwork}
	c.networks.status = func(ctx context.Context, id string) (Status, bool, error) {
		got, err := c.agent.Network(ctx, id)
		return got.Status, c.installation.Owns(id), err
	}
	return c, nil
}

// Close ends the connection. Calls in flight fail with ErrUnavailable.
func (c *Client) Close() error { return c.conn.Close() }

// Check tells whether the agent is alive.
func (c *Client) Check(ctx context.Context) error {
	return c.failure(ctx, "check agent", c.endpoint, c.agent.Alive(ctx))
}

// Connected tells whether the connection is up now. A Client connects when it is first used.
func (c *Client) Connected() bool { return c.conn.GetState() == connectivity.Ready }

// Watch keeps the connection up until the context ends, and returns the context's error. It calls changed, from one goroutine,
// with true each time the connection came up, and with false each time it went down or the first attempt failed.
//
// After true every Port must be verified: the API has no boot id, and an agent forgets its ports when it restarts.
func (c *Client) Watch(ctx context.Context, changed func(connected bool)) error {
	var last connectivity.State = -1
	report := func(s connectivity.State) {
		if s != last {
			last = s
			changed(s == connectivity.Ready)
		}
	}
	for {
		state := c.conn.GetState()
		switch state {
		case connectivity.Ready, connectivity.TransientFailure:
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
			// Report this even if the connection is up again: it is a new one, perhaps to an agent that was restarted.
			report(connectivity.TransientFailure)
		}
	}
}
