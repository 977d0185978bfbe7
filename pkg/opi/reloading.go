package opi

import (
	"context"
	"crypto/tls"
	"errors"
	"net"

	"google.golang.org/grpc/credentials"
)

// reloading are TLS credentials of a client that are read anew for each connection.
type reloading struct{ load func() (*tls.Config, error) }

func (r *reloading) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	config, err := r.load()
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(config).ClientHandshake(ctx, authority, conn)
}

func (r *reloading) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("opi: these are credentials of a client")
}

func (r *reloading) Info() credentials.ProtocolInfo { return credentials.NewTLS(nil).Info() }

func (r *reloading) Clone() credentials.TransportCredentials { return r }

// OverrideServerName is for grpc.WithAuthority, which is not used; the configuration has the name.
func (r *reloading) OverrideServerName(string) error { return nil }
