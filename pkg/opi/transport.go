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

// silence is for how long the kernel gets no answer from the agent before it gives the connection
// up.
const silence = 5 * time.Second

// newDialer makes a dialer of connections that detect by TCP that the peer is gone. HTTP/2 pings
// cannot be used for that: a gRPC server with default settings, such as the reference agent, closes
// the connection of a client that pings more often than every 5 minutes.
func newDialer() *net.Dialer {
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3,
		},
		Control: limitSilence,
	}
}

// limitSilence bounds for how long the kernel retransmits what the peer does not acknowledge
// (TCP_USER_TIMEOUT in tcp(7)). The default is about 15 minutes, and the kernel sends no
// keep-alives meanwhile.
func limitSilence(_, _ string, socket syscall.RawConn) (err error) {
	controlErr := socket.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT,
			int(silence.Milliseconds()))
	})
	return errors.Join(controlErr, err)
}

// TLSConfig makes the configuration for an agent that authenticates its clients (mTLS) from PEM:
// the client's certificate chain, its private key, and the certificates of the authorities that may
// have signed the agent's certificate. serverName is the name expected in the agent's certificate;
// empty is the host of the endpoint. No error carries any part of the key.
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
		MinVersion:   tls.VersionTLS12, // the least the reference agent speaks
		Certificates: []tls.Certificate{pair},
		RootCAs:      roots,
		ServerName:   serverName,
	}, nil
}

func (c Config) credentials() credentials.TransportCredentials {
	switch {
	case c.ReloadTLS != nil:
		return &reloading{TransportCredentials: credentials.NewTLS(nil), load: c.ReloadTLS}
	case c.TLS != nil:
		return credentials.NewTLS(c.TLS)
	}
	return insecure.NewCredentials()
}

// reloading are TLS credentials of a client that are read anew for each connection.
type reloading struct {
	credentials.TransportCredentials // for what does not depend on the configuration
	load                             func() (*tls.Config, error)
}

func (r *reloading) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	config, err := r.load()
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(config).ClientHandshake(ctx, authority, conn)
}

func (r *reloading) Clone() credentials.TransportCredentials { return r }

// limited limits the calls that change something, and those that do not, to [maxInFlight] at once
// each: an agent that takes long for the former is still asked how it is. A call that changes
// nothing is bounded by [rpcTimeout] once it runs.
func limited() grpc.UnaryClientInterceptor {
	changing, looking := semaphore.NewWeighted(maxInFlight), semaphore.NewWeighted(maxInFlight)
	return func(
		ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
		invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		slots := looking
		if isChange(method) {
			slots = changing
		}
		if err := slots.Acquire(ctx, 1); err != nil {
			return status.FromContextError(err).Err()
		}
		defer slots.Release(1)

		if slots == looking {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, rpcTimeout)
			defer cancel()
		}

		return invoke(ctx, method, req, reply, cc, opts...)
	}
}

// isChange says whether a method of gRPC, "/package.Service/CreateBridgePort", changes something.
// All of OPI are named alike (https://google.aip.dev/130).
func isChange(method string) bool {
	name := path.Base(method)
	return strings.HasPrefix(name, "Create") || strings.HasPrefix(name, "Update") ||
		strings.HasPrefix(name, "Delete")
}
