// SPDX-License-Identifier: Apache-2.0

// Package pki is the certificate authority of a development cluster. It issues all certificates and
// kubeconfigs of the cluster's components and its administrator.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// lifetime exceeds the life of any development cluster.
const lifetime = 365 * 24 * time.Hour

// skew is how far another clock may be behind the issuer's.
const skew = time.Hour

// Authority is a self-signed CA. It is safe for concurrent use.
type Authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// Identity is a certificate and its key, both as PEM.
type Identity struct {
	Certificate []byte
	Key         []byte
}

// Request specifies a certificate.
type Request struct {
	CommonName    string   // user name of a client
	Organizations []string // groups of a client
	Addresses     []net.IP // subject alternative names of a server
	Names         []string // likewise, as DNS names
}

// New returns an authority with a new key.
func New(commonName string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("pki: %w", err)
	}

	serial, err := serialNumber()
	if err != nil {
		return nil, err
	}

	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: commonName},
		NotBefore:             time.Now().Add(-skew),
		NotAfter:              time.Now().Add(lifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		IsCA:                  true,
		BasicConstraintsValid: true,
	}

	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("pki: %s: %w", commonName, err)
	}

	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("pki: %s: %w", commonName, err)
	}

	return &Authority{certificate: certificate, key: key}, nil
}

// Certificate returns the authority's own certificate as PEM.
func (a *Authority) Certificate() []byte { return encode("CERTIFICATE", a.certificate.Raw) }

// Key returns the authority's private key as PEM, for the controller manager.
func (a *Authority) Key() ([]byte, error) { return encodeKey(a.key) }

// Issue creates a key and a certificate for clients and, if the request has addresses or names, for
// servers.
func (a *Authority) Issue(r Request) (Identity, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Identity{}, fmt.Errorf("pki: %s: %w", r.CommonName, err)
	}

	serial, err := serialNumber()
	if err != nil {
		return Identity{}, err
	}

	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: r.CommonName, Organization: r.Organizations},
		NotBefore:    time.Now().Add(-skew),
		NotAfter:     time.Now().Add(lifetime),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		IPAddresses:  r.Addresses,
		DNSNames:     r.Names,
	}

	if len(r.Addresses)+len(r.Names) > 0 {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}

	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return Identity{}, fmt.Errorf("pki: %s: %w", r.CommonName, err)
	}

	encodedKey, err := encodeKey(key)
	if err != nil {
		return Identity{}, err
	}

	return Identity{Certificate: encode("CERTIFICATE", der), Key: encodedKey}, nil
}

// Write writes the identity to dir as name.crt and name.key, readable only by the owner.
func (i Identity) Write(dir, name string) error {
	if err := os.WriteFile(filepath.Join(dir, name+".crt"), i.Certificate, 0o600); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".key"), i.Key, 0o600)
}

// SigningKey creates the key pair for ServiceAccount tokens, as PEM.
func SigningKey() (private, public []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("pki: %w", err)
	}
	if private, err = encodeKey(key); err != nil {
		return nil, nil, err
	}

	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, fmt.Errorf("pki: %w", err)
	}

	return private, encode("PUBLIC KEY", der), nil
}

func serialNumber() (*big.Int, error) {
	// RFC 5280, 4.1.2.2: positive, at most 20 octets.
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 128))
	if err != nil {
		return nil, fmt.Errorf("pki: %w", err)
	}
	return serial.Add(serial, big.NewInt(1)), nil
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("pki: %w", err)
	}
	// Kubernetes reads this encoding of all its keys; it does not read PKCS #8 everywhere.
	return encode("EC PRIVATE KEY", der), nil
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
