// SPDX-License-Identifier: Apache-2.0

package bridge

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

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// CredentialFiles are the files by which a server knows its clients, and they it.
type CredentialFiles struct {
	// Cert, Key and ClientCA are PEM files: the server's certificate chain, its key, and the
	// authorities of its clients.
	Cert, Key, ClientCA string
	// Authorization is a YAML file, see [Authorization]; "": whoever has a certificate may do
	// anything.
	Authorization string
}

// Credentials are what the files say. A call uses what they said last without an error.
type Credentials struct {
	files    CredentialFiles
	contents [][]byte // of the files, as they were read last
	current  atomic.Pointer[credentialsNow]
}

type credentialsNow struct {
	tls           *tls.Config
	authorization *Authorization // nil for none
}

// OpenCredentials reads the files. No error contains any part of the key.
func OpenCredentials(files CredentialFiles) (*Credentials, error) {
	c := &Credentials{files: files}
	_, err := c.load()
	return c, err
}

// load reads the files, and uses what they say if one of them has changed.
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

	now := &credentialsNow{}
	if now.tls, err = c.files.tls(contents[0], contents[1], contents[2]); err != nil {
		return false, err
	}

	if c.files.Authorization != "" {
		if now.authorization, err = ParseAuthorization(contents[3]); err != nil {
			return false, fmt.Errorf("authorization %s: %w", c.files.Authorization, err)
		}
	}

	c.current.Store(now)
	c.contents = contents

	return true, nil
}

// paths are those of the files that there are.
func (f CredentialFiles) paths() []string {
	paths := []string{f.Cert, f.Key, f.ClientCA}
	if f.Authorization != "" {
		paths = append(paths, f.Authorization)
	}
	return paths
}

// After a change in a directory, the files are read when there was no other for the time
// credentialsQuiet, after credentialsLatest at the latest: files that belong together change one
// after the other, and other programs may write to the directory.
const credentialsQuiet, credentialsLatest = 100 * time.Millisecond, time.Second

// Follow reads the files again whenever something in their directories changes, until ctx ends.
// What cannot be read is logged, and changes nothing. It must not be called twice.
func (c *Credentials) Follow(ctx context.Context, log logr.Logger) error {
	var dirs []string
	for _, p := range c.files.paths() {
		dirs = append(dirs, filepath.Dir(p))
	}

	slices.Sort(dirs)

	all, ctx := errgroup.WithContext(ctx)
	changes := make(chan struct{}, 1)
	for _, dir := range slices.Compact(dirs) {
		all.Go(func() error { return follow(ctx, dir, changes) })
	}

	all.Go(func() error {
		for failed := ""; loop.Wait(ctx, changes, 0); {
			loop.Debounce(ctx, changes, credentialsQuiet, credentialsLatest)
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

// follow tells of changes in a directory, and of those before it began.
func follow(ctx context.Context, dir string, changed chan<- struct{}) error {
	watch, err := watchdir.Open(dir, nil)
	if err != nil {
		return fmt.Errorf("credentials: %w", err)
	}
	defer watch.Close()

	for {
		if err := watch.Watch(); err != nil {
			return fmt.Errorf("credentials: %w", err)
		}

		select {
		case changed <- struct{}{}:
		default:
		}

		select {
		case <-ctx.Done():
			return nil
		case <-watch.Changes():
		}
	}
}

// TLS is the configuration of a server of this protocol, "h2" or "http/1.1", which uses them for
// new connections.
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

// AuthorizeMetrics serves metrics to the clients that may know of all networks and ports, since
// metrics name them. Without authorization these are all who have a certificate.
func (c *Credentials) AuthorizeMetrics(serve http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var certificates []*x509.Certificate
		if r.TLS != nil {
			certificates = r.TLS.PeerCertificates
		}

		who := c.current.Load().authorization.client(certificates)

		if !who.seesAll() {
			const format = "metrics name all networks and ports: the rule of --authorization for " +
				"the client %q " +
				`needs networks: ["*"] and ports: ["*"], and may be readOnly`
			http.Error(w, fmt.Sprintf(format, who.subject), http.StatusForbidden)
			return
		}

		serve.ServeHTTP(w, r)
	})
}

// ServerOptions have a server use them for new connections, and authorize each call.
func (c *Credentials) ServerOptions() []grpc.ServerOption {
	identifyClient := func(
		ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
	) (any, error) {
		return handle(identify(ctx, c.current.Load().authorization), req)
	}
	return []grpc.ServerOption{
		grpc.Creds(credentials.NewTLS(c.TLS("h2"))), grpc.ChainUnaryInterceptor(identifyClient),
	}
}

// tls makes the configuration of a server from what the files have.
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
