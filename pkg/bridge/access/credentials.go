// SPDX-License-Identifier: Apache-2.0

package access

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// CredentialFiles are the files by which the server and its clients authenticate each other.
type CredentialFiles struct {
	// Cert, Key and ClientCA are PEM files: the server's certificate chain, its key, and the
	// certificate authorities of its clients.
	Cert, Key, ClientCA string
	// Authorization is a YAML file, see [Authorization]. If it is "", every client with a
	// certificate may do anything.
	Authorization string
}

// Credentials are the contents of the files as they were last read without an error.
type Credentials struct {
	files    CredentialFiles
	contents [][]byte // of the files
	current  atomic.Pointer[parsed]
}

// parsed is the meaning of the files' contents.
type parsed struct {
	tls           *tls.Config
	authorization *Authorization // nil for none
}

// OpenCredentials reads the files. Its errors contain no part of the key.
func OpenCredentials(files CredentialFiles) (*Credentials, error) {
	c := &Credentials{files: files}
	_, err := c.load()
	return c, err
}

// load reads the files, and uses them if one of them has changed.
func (c *Credentials) load() (changed bool, err error) {
	var contents [][]byte
	for _, path := range c.files.paths() {
		content, err := os.ReadFile(path)
		if err != nil {
			return false, fmt.Errorf("credentials: %w", err)
		}
		contents = append(contents, content)
	}

	if slices.EqualFunc(contents, c.contents, bytes.Equal) {
		return false, nil
	}

	next := &parsed{}
	if next.tls, err = c.files.tls(contents[0], contents[1], contents[2]); err != nil {
		return false, err
	}

	if c.files.Authorization != "" {
		if next.authorization, err = ParseAuthorization(contents[3]); err != nil {
			return false, fmt.Errorf("authorization %s: %w", c.files.Authorization, err)
		}
	}

	c.current.Store(next)
	c.contents = contents

	return true, nil
}

// paths returns the paths of the files that are configured.
func (f CredentialFiles) paths() []string {
	paths := []string{f.Cert, f.Key, f.ClientCA}
	if f.Authorization != "" {
		paths = append(paths, f.Authorization)
	}
	return paths
}

// After a change in a directory, the files are read once nothing has changed for quietPeriod,
// because files that belong together change one after the other. They are read after maxDelay at
// the latest, because other programs may write to the directory all the time.
const quietPeriod, maxDelay = 100 * time.Millisecond, time.Second

// Follow reads the files again whenever something in their directories changes, until ctx ends. An
// error is logged, and the credentials stay as they are. Follow must not be called twice.
func (c *Credentials) Follow(ctx context.Context, log logr.Logger) error {
	var dirs []string
	for _, p := range c.files.paths() {
		dirs = append(dirs, filepath.Dir(p))
	}

	slices.Sort(dirs)

	all, ctx := errgroup.WithContext(ctx)
	changes := make(chan struct{}, 1)
	for _, dir := range slices.Compact(dirs) {
		all.Go(func() error {
			if err := watchdir.Notify(ctx, dir, changes); err != nil {
				return fmt.Errorf("credentials: %w", err)
			}
			return nil
		})
	}

	all.Go(func() error {
		for failed := ""; loop.Wait(ctx, changes, 0); {
			loop.Debounce(ctx, changes, quietPeriod, maxDelay)
			switch changed, err := c.load(); {
			case err != nil && err.Error() != failed:
				failed = err.Error()
				log.Error(err, "credentials stay as they were")
			case err == nil:
				failed = ""
				if changed {
					log.Info("credentials read")
				}
			}
		}
		return nil
	})

	return all.Wait()
}

// TLS returns the configuration of a server for a protocol, "h2" or "http/1.1". Each new connection
// uses the current credentials.
func (c *Credentials) TLS(protocol string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{protocol},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			config := c.current.Load().tls.Clone()
			config.NextProtos = []string{protocol}
			return config, nil
		},
	}
}

// AuthorizeMetrics serves metrics only to clients that may know of all networks and ports, because
// metrics name them. Without authorization, these are all clients with a certificate.
func (c *Credentials) AuthorizeMetrics(serve http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var certificates []*x509.Certificate
		if r.TLS != nil {
			certificates = r.TLS.PeerCertificates
		}

		client := c.current.Load().authorization.Client(certificates)
		if !client.CanSeeAll() {
			const format = "metrics name all networks and ports: the rule of --authorization for " +
				"the client %q " +
				`needs networks: ["*"] and ports: ["*"], and may be readOnly`
			http.Error(w, fmt.Sprintf(format, client.Subject), http.StatusForbidden)
			return
		}

		serve.ServeHTTP(w, r)
	})
}

// ServerOptions make a gRPC server use the credentials for each new connection, and put the client
// into the context of each call: see [FromContext].
func (c *Credentials) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(credentials.NewTLS(c.TLS("h2"))), grpc.ChainUnaryInterceptor(c.identify),
	}
}

func (c *Credentials) identify(
	ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	var certificates []*x509.Certificate
	if p, ok := peer.FromContext(ctx); ok {
		if tls, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			certificates = tls.State.PeerCertificates
		}
	}

	client := c.current.Load().authorization.Client(certificates)
	return handle(NewContext(ctx, client), req)
}

// tls makes the configuration of a server from the contents of the files.
func (f CredentialFiles) tls(cert, key, clientCA []byte) (*tls.Config, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("TLS certificate %s and key %s: %w", f.Cert, f.Key, err)
	}

	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(clientCA) {
		return nil, errors.New("TLS client CA " + f.ClientCA + ": no PEM certificate in it")
	}

	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{pair},
		ClientCAs:    clients,
		ClientAuth:   tls.RequireAndVerifyClientCert,
	}, nil
}
