// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/clientcmd"
)

func parse(t *testing.T, certificate []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(certificate)
	if block == nil {
		t.Fatalf("no PEM: %s", certificate)
	}

	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}

	return c
}

func TestIssue(t *testing.T) {
	authority, err := New("test")
	if err != nil {
		t.Fatal(err)
	}

	other, err := New("test")
	if err != nil {
		t.Fatal(err)
	}

	roots, strangers := x509.NewCertPool(), x509.NewCertPool()
	roots.AppendCertsFromPEM(authority.Certificate())
	strangers.AppendCertsFromPEM(other.Certificate())

	for _, test := range []struct {
		name    string
		request Request
		usage   []x509.ExtKeyUsage
	}{
		{"client", Request{
			CommonName: "system:node:node1", Organizations: []string{"system:nodes"},
		},
			[]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}},
		{"server", Request{
			CommonName: "kube-apiserver", Addresses: []net.IP{net.IPv4(127, 0, 0, 1)},
			Names: []string{"kubernetes"},
		},
			[]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}},
	} {
		t.Run(test.name, func(t *testing.T) {
			identity, err := authority.Issue(test.request)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tls.X509KeyPair(identity.Certificate, identity.Key); err != nil {
				t.Errorf("certificate and key do not belong together: %v", err)
			}

			c := parse(t, identity.Certificate)
			if c.Subject.CommonName != test.request.CommonName {
				t.Errorf("common name %q", c.Subject.CommonName)
			}
			if diff := cmp.Diff(test.request.Organizations, c.Subject.Organization); diff != "" {
				t.Errorf("organizations (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.usage, c.ExtKeyUsage); diff != "" {
				t.Errorf("usage (-want +got):\n%s", diff)
			}

			for _, usage := range test.usage {
				if _, err := c.Verify(x509.VerifyOptions{
					Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage},
				}); err != nil {
					t.Errorf("usage %v: %v", usage, err)
				}
			}

			if _, err := c.Verify(x509.VerifyOptions{
				Roots: strangers, KeyUsages: test.usage,
			}); err == nil {
				t.Error("another authority of the same name vouches for it")
			}

			for _, name := range append(test.request.Names,
				addressStrings(test.request.Addresses)...) {
				if err := c.VerifyHostname(name); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func addressStrings(ips []net.IP) []string {
	var s []string
	for _, ip := range ips {
		s = append(s, ip.String())
	}
	return s
}

func TestWriteIsPrivate(t *testing.T) {
	dir := t.TempDir()
	if err := (Identity{Certificate: []byte("c"), Key: []byte("k")}).Write(dir, "x"); err != nil {
		t.Fatal(err)
	}

	info, err := os.Stat(filepath.Join(dir, "x.key"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("key has mode %v, want 0600", info.Mode())
	}
}

func TestSigningKey(t *testing.T) {
	private, public, err := SigningKey()
	if err != nil {
		t.Fatal(err)
	}

	block, _ := pem.Decode(private)
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}

	block, _ = pem.Decode(public)
	parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if !key.PublicKey.Equal(parsed) {
		t.Error("the keys are not a pair")
	}
}

func TestKubeconfig(t *testing.T) {
	authority, err := New("test")
	if err != nil {
		t.Fatal(err)
	}

	identity, err := authority.Issue(Request{CommonName: "admin"})
	if err != nil {
		t.Fatal(err)
	}

	content, err := authority.Kubeconfig("main", "https://127.0.0.1:6443", identity)
	if err != nil {
		t.Fatal(err)
	}

	config, err := clientcmd.RESTConfigFromKubeConfig(content)
	if err != nil {
		t.Fatal(err)
	}
	if config.Host != "https://127.0.0.1:6443" {
		t.Errorf("server %s", config.Host)
	}
	if diff := cmp.Diff(string(authority.Certificate()), string(config.CAData)); diff != "" {
		t.Errorf("authority (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(string(identity.Key), string(config.KeyData)); diff != "" {
		t.Errorf("key (-want +got):\n%s", diff)
	}
}
