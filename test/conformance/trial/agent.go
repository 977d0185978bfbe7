// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/test/conformance/faults"
)

// agent is an opi-bridge in the namespace of an xPU.
type agent struct {
	program string
	fault   faults.Fault
	xpu     *xpu
	dir     string

	process *exec.Cmd
	gate    net.Listener
	tls     []string // arguments
}

// address is the agent's address in its namespace.
const address = "127.0.0.1:50151"

// serve starts the agent and returns an endpoint outside of its namespace.
func (a *agent) serve() (endpoint conformance.Endpoint, err error) {
	endpoint = conformance.Endpoint{Network: "unix", Address: filepath.Join(a.dir, "gate")}
	if a.fault.IsOfPeers() {
		if endpoint.TLS, err = a.certify(); err != nil {
			return endpoint, err
		}
	}
	if a.gate, err = net.Listen(endpoint.Network, endpoint.Address); err != nil {
		return endpoint, err
	}
	go a.passConnections()

	return endpoint, a.start()
}

func (a *agent) close() {
	_ = a.end(conformance.Killed)
	_ = a.gate.Close()
}

func (a *agent) start() error {
	mode := "bridge-per-network"
	if a.fault.IsVLANAware() {
		mode = "vlan-aware"
	}
	args := append([]string{
		"--state", filepath.Join(a.dir, "state.db"), "--uplink=p0", "--listen=" + address,
		"--representor=" + prefix + "*", "--data-plane=" + mode,
	}, a.tls...)

	log, err := os.OpenFile(a.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	a.process = exec.Command(a.program, args...)
	a.process.Env = append(os.Environ(), faults.Variable+"="+a.fault.Name)
	a.process.Stdout, a.process.Stderr = log, log
	return a.xpu.own.Do(a.process.Start)
}

// end ends the agent, which may have ended itself.
func (a *agent) end(how conformance.Ending) error {
	signal := syscall.SIGKILL
	if how == conformance.Terminated {
		signal = syscall.SIGTERM
	}
	if err := a.process.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	_ = a.process.Wait() // a killed process fails
	return nil
}

func (a *agent) logFile() string { return filepath.Join(a.dir, "log") }

// log returns the last part of what the agent logged.
func (a *agent) log() []byte {
	text, _ := os.ReadFile(a.logFile())
	return text[max(0, len(text)-2000):]
}

// passConnections connects whoever comes to the gate with the agent.
func (a *agent) passConnections() {
	for {
		client, err := a.gate.Accept()
		if err != nil {
			return
		}

		var server net.Conn
		err = a.xpu.own.Do(func() (err error) {
			server, err = net.Dial("tcp", address)
			return err
		})
		if err != nil {
			_ = client.Close()
			continue
		}
		go pipe(client, server)
		go pipe(server, client)
	}
}

func pipe(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_ = to.Close()
	_ = from.Close()
}

// certify makes the agent serve TLS to clients of an authority, and returns the configuration of
// such a client.
func (a *agent) certify() (*tls.Config, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	// The certificate is the authority, the agent and the client at once.
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "trial"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, IsCA: true,
		BasicConstraintsValid: true, DNSNames: []string{"trial"},
		ExtKeyUsage: []x509.ExtKeyUsage{
			x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth,
		},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}

	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	certFile, keyFile := filepath.Join(a.dir, "tls.crt"), filepath.Join(a.dir, "tls.key")
	if err := errors.Join(os.WriteFile(certFile, certPEM, 0o600),
		os.WriteFile(keyFile, keyPEM, 0o600)); err != nil {
		return nil, err
	}
	a.tls = []string{
		"--tls-cert=" + certFile, "--tls-key=" + keyFile, "--tls-client-ca=" + certFile,
	}

	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(certPEM)
	return &tls.Config{
		MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: "trial",
		Certificates: []tls.Certificate{pair},
	}, nil
}
