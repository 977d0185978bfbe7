package bridge

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
)

// CredentialFiles are the files by which a server knows its clients, and they it.
type CredentialFiles struct {
	// Cert, Key and ClientCA are PEM files: the server's certificate chain, its key, and the authorities of its clients.
	Cert, Key, ClientCA string
	// Authorization is a YAML file, see [Authorization]; "": whoever has a certificate may do anything.
	Authorization string
}

// Credentials are what the files say. A call uses what they said last without an error.
type Credentials struct {
	files   CredentialFiles
	current atomic.Pointer[credentialsNow]
}

type credentialsNow struct {
	tls           *tls.Config
	authorization *Authorization // nil for none
}

// OpenCredentials reads the files. No error contains any part of the key.
func OpenCredentials(files CredentialFiles) (*Credentials, error) {
	c := &Credentials{files: files}
	return c, c.load()
}

func (c *Credentials) load() (err error) {
	now := &credentialsNow{}
	if now.tls, err = c.files.tls(); err != nil {
		return err
	}
	if c.files.Authorization != "" {
		if now.authorization, err = ReadAuthorization(c.files.Authorization); err != nil {
			return err
		}
	}
	c.current.Store(now)
	return nil
}

// Follow reads the files again whenever they change, until ctx ends. What cannot be read is logged, and changes nothing.
func (c *Credentials) Follow(ctx context.Context, log logr.Logger) error {
	paths := []string{c.files.Cert, c.files.Key, c.files.ClientCA}
	if c.files.Authorization != "" {
		paths = append(paths, c.files.Authorization)
	}
	var dirs []string
	for _, p := range paths {
		dirs = append(dirs, filepath.Dir(p))
	}
	slices.Sort(dirs)
	all, ctx := errgroup.WithContext(ctx)
	changed := make(chan struct{}, 1)
	for _, dir := range slices.Compact(dirs) {
		all.Go(func() error { return follow(ctx, dir, changed) })
	}
	all.Go(func() error {
		failed := ""
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
			}
			switch err := c.load(); {
			case err != nil && err.Error() != failed: // files that belong together change one after the other
				failed = err.Error()
				log.Error(err, "credentials stay as they were")
			case err == nil:
				failed = ""
				log.Info("credentials read")
			}
		}
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

// ServerOptions have a server use them for new connections, and authorize each call.
func (c *Credentials) ServerOptions() []grpc.ServerOption {
	config := c.current.Load().tls.Clone()
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current.Load().tls, nil }
	identifyClient := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		return handle(identify(ctx, c.current.Load().authorization), req)
	}
	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(config)), grpc.ChainUnaryInterceptor(identifyClient)}
}

func (f CredentialFiles) tls() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("TLS certificate %s and key %s: %w", f.Cert, f.Key, err)
	}
	pem, err := os.ReadFile(f.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("TLS client CA: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(pem) {
		return nil, errors.New("TLS client CA " + f.ClientCA + ": no PEM certificate in it")
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		NextProtos:   []string{"h2"},
		Certificates: []tls.Certificate{pair},
		ClientCAs:    clients,
		ClientAuth:   tls.RequireAndVerifyClientCert,
	}, nil
}
