// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// peerTimeout is how long the kernel waits for an answer from the agent's host before it closes the
// connection.
const peerTimeout = 5 * time.Second

// newDialer returns a dialer whose connections detect by TCP keep-alives that the peer is gone.
// HTTP/2 pings cannot be used: a gRPC server with default settings, such as the reference agent,
// closes the connection of a client that pings more often than every 5 minutes.
func newDialer() *net.Dialer {
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3,
		},
		Control: setUserTimeout,
	}
}

// setUserTimeout bounds how long the kernel retransmits unacknowledged data (TCP_USER_TIMEOUT in
// tcp(7)). The default is about 15 minutes, during which the kernel sends no keep-alives.
func setUserTimeout(_, _ string, socket syscall.RawConn) (err error) {
	controlErr := socket.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT,
			int(peerTimeout.Milliseconds()))
	})
	return errors.Join(controlErr, err)
}

// TLSConfig returns the configuration for an agent with mutual TLS. The arguments are PEM: the
// client's certificate chain, its private key, and the certificates of the authorities that may
// have signed the agent's certificate. serverName is the name expected in the agent's certificate;
// if empty, it is the host of the endpoint. Errors contain no part of the key.
func TLSConfig(cert, key, ca []byte, serverName string) (*tls.Config, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("opi: client certificate and key: %w", err)
	}

	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("opi: CA: no PEM certificate in it")
	}

	return &tls.Config{
		MinVersion:   tls.VersionTLS12, // the minimum that the reference agent supports
		Certificates: []tls.Certificate{pair},
		RootCAs:      roots,
		ServerName:   serverName,
	}, nil
}

func (c Config) credentials() credentials.TransportCredentials {
	switch {
	case c.ReloadTLS != nil:
		return &reloadingTLS{TransportCredentials: credentials.NewTLS(nil), load: c.ReloadTLS}
	case c.TLS != nil:
		return credentials.NewTLS(c.TLS)
	}
	return insecure.NewCredentials()
}

// reloadingTLS are client TLS credentials that are loaded for each connection.
type reloadingTLS struct {
	credentials.TransportCredentials // for the methods that do not depend on the configuration
	load                             func() (*tls.Config, error)
}

func (r *reloadingTLS) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	config, err := r.load()
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(config).ClientHandshake(ctx, authority, conn)
}

func (r *reloadingTLS) Clone() credentials.TransportCredentials { return r }

// limitConcurrency limits changing and reading calls to [Timing.InFlight] at once each, so that
// slow changes do not block health checks. Once a reading call runs, it is bounded by
// [Timing.Read].
func limitConcurrency(timing Timing) grpc.UnaryClientInterceptor {
	changing := semaphore.NewWeighted(timing.InFlight)
	reading := semaphore.NewWeighted(timing.InFlight)
	return func(
		ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
		invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		slots := reading
		if isChange(method) {
			slots = changing
		}
		if err := slots.Acquire(ctx, 1); err != nil {
			return status.FromContextError(err).Err()
		}
		defer slots.Release(1)

		if slots == reading {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, timing.Read)
			defer cancel()
		}

		return invoke(ctx, method, req, reply, cc, opts...)
	}
}

// isChange reports whether a gRPC method, such as "/package.Service/CreateBridgePort", changes
// something. OPI methods follow the naming rules of https://google.aip.dev/130.
func isChange(method string) bool {
	name := path.Base(method)
	return strings.HasPrefix(name, "Create") || strings.HasPrefix(name, "Update") ||
		strings.HasPrefix(name, "Delete")
}
