package opi

import (
	"context"
	"crypto/tls"
	"net"

	"google.golang.org/grpc/credentials"
)

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
