// SPDX-License-Identifier: Apache-2.0

// Package secure serves metrics by TLS to clients whom the API server knows and lets read them:
// those that may get the URL /metrics. It is apart from package monitoring because opi-bridge has
// no API server.
package secure

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"

	"github.com/go-logr/logr"
	authentication "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorization "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
)

// Handler passes requests to next whose bearer token may use the requested path, by a TokenReview
// and a SubjectAccessReview at the API server of the configuration. It answers other requests with
// 401 or 403, and with 500 if the API server does not answer. Its verdicts hold for a minute.
func Handler(config *rest.Config, next http.Handler, log logr.Logger) (http.Handler, error) {
	tokens, err := authentication.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client for TokenReviews: %w", err)
	}

	access, err := authorization.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client for SubjectAccessReviews: %w", err)
	}

	return newReviewer(tokens.TokenReviews(), access.SubjectAccessReviews(), next, log), nil
}

// Certificate is a server certificate. It is read from a directory and reloaded, or self-signed.
type Certificate struct {
	watcher    *certwatcher.CertWatcher // nil if self-signed
	selfSigned tls.Certificate
}

// OpenCertificate reads tls.crt and tls.key from a directory. For "" it creates a self-signed
// certificate for the host's name that is valid for a year.
func OpenCertificate(dir string) (*Certificate, error) {
	if dir != "" {
		watcher, err := certwatcher.New(filepath.Join(dir, "tls.crt"),
			filepath.Join(dir, "tls.key"))
		if err != nil {
			return nil, fmt.Errorf("certificate in %s: %w", dir, err)
		}
		return &Certificate{watcher: watcher}, nil
	}

	name, err := os.Hostname()
	if err != nil {
		return nil, err
	}

	cert, key, err := certutil.GenerateSelfSignedCertKey(name, []net.IP{{127, 0, 0, 1}}, nil)
	if err != nil {
		return nil, fmt.Errorf("self-signed certificate: %w", err)
	}

	c := &Certificate{}
	c.selfSigned, err = tls.X509KeyPair(cert, key)
	return c, err
}

// Follow reloads the files when they change, until ctx ends.
func (c *Certificate) Follow(ctx context.Context) error {
	if c.watcher == nil {
		return nil
	}
	return c.watcher.Start(ctx)
}

// Listener returns a listener that serves TLS with the certificate.
func (c *Certificate) Listener(inner net.Listener) net.Listener {
	return tls.NewListener(inner, &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{"http/1.1"},
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if c.watcher == nil {
				return &c.selfSigned, nil
			}
			return c.watcher.GetCertificate(hello)
		},
	})
}
