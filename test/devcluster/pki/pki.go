// SPDX-License-Identifier: Apache-2.0

// Package pki is the certificate authority of a development cluster: it issues every certificate
// and kubeconfig that the cluster's components and its administrator use.
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

// lifetime is longer than any development cluster lives.
const lifetime = 365 * 24 * time.Hour

// skew is how much a clock may be behind the one that issued a certificate.
const skew = time.Hour

// Authority is a self-signed CA. It is safe for concurrent use.
type Authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// Identity is a certificate and its key, both PEM.
type Identity struct {
	Certificate []byte
	Key         []byte
}

// Request names what a certificate says.
type Request struct {
	CommonName    string   // the user name, for a client
	Organizations []string // the groups, for a client
	Addresses     []net.IP // subject alternative names of a server
	Names         []string // the same, as DNS names
}

// New makes an authority with a fresh key.
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

// Certificate is the authority's own certificate, PEM.
func (a *Authority) Certificate() []byte { return encode("CERTIFICATE", a.certificate.Raw) }

// Key is the authority's private key, PEM: the controller manager signs with it.
func (a *Authority) Key() ([]byte, error) { return encodeKey(a.key) }

// Issue makes a key and a certificate for it that serves as client and, when the request has
// addresses or names, as server.
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

// Write puts the identity into dir as name.crt and name.key, readable by the owner alone.
func (i Identity) Write(dir, name string) error {
	if err := os.WriteFile(filepath.Join(dir, name+".crt"), i.Certificate, 0o600); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".key"), i.Key, 0o600)
}

// SigningKey makes the key pair that ServiceAccount tokens are signed and checked with, PEM.
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
	// RFC 5280, 4.1.2.2: positive and at most 20 octets.
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
	// Kubernetes takes this encoding for every key; PKCS #8 is not read everywhere.
	return encode("EC PRIVATE KEY", der), nil
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
