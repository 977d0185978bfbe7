// SPDX-License-Identifier: Apache-2.0

package story

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority issues the certificates with which the controller and the OPI agents authenticate each
// other.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority() (*authority, error) {
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "demo OPI CA"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign,
	}
	a := &authority{}
	var err error
	a.cert, a.key, err = a.sign(template)
	return a, err
}

// sign creates a key and a certificate for it. An authority without a certificate signs it with the
// new key itself.
func (a *authority) sign(template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62)); err != nil {
		return nil, nil, err
	}

	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().
		Add(30*24*time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}

	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		return nil, nil, err
	}

	cert, err := x509.ParseCertificate(der)
	return cert, key, err
}

// identity is a certificate, its key, and the authority's certificate, all as PEM.
type identity struct{ cert, key, ca []byte }

// issue returns an identity for a name; ip may be empty.
func (a *authority) issue(name, ip string) (identity, error) {
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: name},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{name},
	}

	if ip != "" {
		template.IPAddresses = []net.IP{net.ParseIP(ip)}
	}

	cert, key, err := a.sign(template)
	if err != nil {
		return identity{}, err
	}

	der, err := x509.MarshalPKCS8PrivateKey(key)
	return identity{
		cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}),
		key:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		ca:   pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}),
	}, err
}

// identityFiles are the paths of an identity's files.
type identityFiles struct{ cert, key, ca string }

func (a *authority) issueFiles(dir, name, ip string) (identityFiles, error) {
	id, err := a.issue(name, ip)
	if err != nil {
		return identityFiles{}, err
	}

	files := identityFiles{
		cert: filepath.Join(dir, name+".crt"), key: filepath.Join(dir, name+".key"),
		ca: filepath.Join(dir, name+"-ca.crt"),
	}

	return files, errors.Join(
		os.WriteFile(files.cert, id.cert, 0o600), os.WriteFile(files.key, id.key, 0o600),
		os.WriteFile(files.ca, id.ca, 0o600))
}
