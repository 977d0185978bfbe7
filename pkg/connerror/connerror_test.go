// SPDX-License-Identifier: Apache-2.0

package connerror_test

import (
	"crypto/x509"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/connerror"
)

// TestConnection checks that the port at this side does not matter, and that the other side's
// address stays.
func TestConnection(t *testing.T) {
	textFrom := func(port int) string {
		return connerror.Text((&net.OpError{
			Op: "read", Net: "tcp", Err: syscall.ECONNRESET,
			Source: &net.TCPAddr{IP: net.ParseIP("fd00::1"), Port: port},
			Addr:   &net.TCPAddr{IP: net.ParseIP("192.0.2.1"), Port: 50151},
		}).Error())
	}
	const want = "read tcp 192.0.2.1:50151: connection reset by peer"
	if one, other := textFrom(40000), textFrom(40001); one != want || other != want {
		t.Errorf("%q and %q, want %q", one, other, want)
	}
}

// TestExpired checks that the time of the attempt does not matter, and that the time at which the
// certificate expired stays.
func TestExpired(t *testing.T) {
	expired := &x509.Certificate{Raw: []byte{0}, NotAfter: time.Unix(0, 0)}
	textAt := func(now time.Time) string {
		_, err := expired.Verify(x509.VerifyOptions{CurrentTime: now, Roots: x509.NewCertPool()})
		return connerror.Text(err.Error())
	}
	const want = "x509: certificate has expired or is not yet valid: the current time is after " +
		"1970-01-01T00:00:00Z"
	now := time.Now()
	if one, other := textAt(now), textAt(now.Add(time.Hour)); one != want || other != want {
		t.Errorf("%q and %q, want %q", one, other, want)
	}
}
