// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

// Sentences that several cases come from.
const (
	saysStatus = "Services must return a google.rpc.Status message when an API error occurs."
	saysAuth   = "Services must check authorization before validating any request."
)

func security(kinds conformance.Kinds) (all []Case) {
	for _, k := range kinds.All() {
		all = append(all, of(conformance.Security, k, wrongNames())...)
		all = append(all, of(conformance.Security, k, wrongMessages())...)
	}

	rest := slices.Concat(peers(), rawBytes())
	for i := range rest {
		rest[i].Profile, rest[i].Name = conformance.Security, "endpoint/"+rest[i].Name
	}
	return append(all, rest...)
}

// wantAlive ends the case unless the agent still answers.
func wantAlive(t *T, after string) {
	for _, k := range t.Kinds.All() {
		_, err := t.GetRaw(k, k.Collection+t.Config().Prefix+"none")
		switch status.Code(err) {
		case codes.Unimplemented:
		case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
			t.Lost()
			t.Failf("after %s the agent does not answer: %s", after, err)
		default:
			return
		}
	}
}

// wrongNames are the cases about names that no well-behaved client sends.
func wrongNames() []generic {
	// A name that says which object of the run it means may be deleted if the agent takes it.
	wrong := func(slug, what string, own bool, name func(o conformance.Object) string) generic {
		return generic{
			name: "name-" + slug + "-is-refused", source: "AIP-193", says: saysStatus,
			violation: "A client reads, changes or deletes what is not its own by a name that " +
				what + ", or ends the agent.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				bad := name(o)
				t.WantRefused("Get", second(t.Get(k, bad)))
				if own {
					t.WantRefused("Delete", t.Delete(k, bad, false))
					_, err := t.Update(k, k.NewMessage(bad, o.Spec), nil, false)
					t.WantRefused("Update", err)
				}
				wantAlive(t, "that")
				t.WantAsMade(o)
			},
		}
	}
	dir := func(o conformance.Object) string { return strings.TrimSuffix(o.Name, o.ID) }

	return []generic{
		wrong("with-dots", "has '..'", true, func(o conformance.Object) string {
			return dir(o) + "x/../" + o.ID
		}),
		wrong("with-two-slashes", "has '//'", true, func(o conformance.Object) string {
			return dir(o) + "/" + o.ID
		}),
		wrong("with-a-wildcard", "has '*'", false, func(o conformance.Object) string {
			return dir(o) + "*"
		}),
		wrong("without-an-id", "ends with '/'", false, dir),
		wrong("with-a-newline", "has a newline", true, func(o conformance.Object) string {
			return o.Name + "\n"
		}),
		wrong("with-a-zero", "has a zero byte", true, func(o conformance.Object) string {
			return o.Name + "\x00"
		}),
		wrong("in-upper-case", "is in upper case", true, func(o conformance.Object) string {
			return dir(o) + strings.ToUpper(o.ID)
		}),
		wrong("of-100000-characters", "is long", true, func(o conformance.Object) string {
			return dir(o) + strings.Repeat("x", 100000)
		}),
	}
}

// wrongMessages are the cases about messages that no well-behaved client sends.
func wrongMessages() []generic {
	return []generic{
		{
			name: "empty-requests-leave-the-agent-alive", source: "AIP-193", says: saysStatus,
			violation: "Whoever reaches the agent can end it, and with it the start of all pods.",
			run: func(t *T, k *Kind) {
				for _, call := range []string{"Create", "Update", "Get", "Delete"} {
					err := raw(t, k, call+k.Type, nil)
					t.WantRefused(call+" with an empty request", err)
				}
				wantAlive(t, "empty requests")
			},
		},
		{
			name: "bytes-that-are-no-message-are-refused", source: "AIP-193", says: saysStatus,
			violation: "Whoever reaches the agent can end it, and with it the start of all pods.",
			run: func(t *T, k *Kind) {
				garbage := []byte{0x0a, 0xff, 0xff, 0xff, 0x7f, 1, 2, 3}
				for _, call := range []string{"Create", "Update", "Get", "Delete"} {
					t.WantRefused(call+" with bytes that are no message",
						raw(t, k, call+k.Type, garbage))
				}
				wantAlive(t, "bytes that are no message")
			},
		},
		{
			name: "unknown-fields-are-taken", source: "AIP-180",
			says: "Generally, new components (interfaces, methods, messages, fields, enums, or " +
				"enum values) may be added to existing APIs in the same major version.",
			violation: "No client can be newer than its agent.",
			run: func(t *T, k *Kind) {
				o := t.Have(k)
				request, err := proto.Marshal(k.NewMessage(o.Name, nil)) // name has number 1
				if err != nil {
					t.Blockf("%v", err)
				}
				// Field 1000 of type varint with the value 1.
				request = append(request, 0xc0, 0x3e, 1)
				t.WantOK("Get with an unknown field", raw(t, k, "Get"+k.Type, request))
			},
		},
		{
			name: "unknown-method-leaves-the-agent-alive", source: "AIP-193", says: saysStatus,
			violation: "Whoever reaches the agent can end it, and with it the start of all pods.",
			run: func(t *T, k *Kind) {
				t.WantRefused("a call that does not exist", raw(t, k, unknownMethod, nil))
				wantAlive(t, "an unknown call")
			},
		},
		{
			name: "request-of-8-mib-leaves-the-agent-alive", source: "AIP-193", says: saysStatus,
			violation: "Whoever reaches the agent can fill its memory.",
			run: func(t *T, k *Kind) {
				name := k.Collection + strings.Repeat("x", 8<<20)
				_, err := t.GetRaw(k, name)
				t.WantRefused("Get with a name of 8 MiB", err)
				wantAlive(t, "a request of 8 MiB")
			},
		},
		{
			name: "error-does-not-repeat-a-long-name", source: "AIP-193",
			level: conformance.Should, says: "Error messages should be brief but actionable.",
			violation: "A client fills the logs of all that handle the error.",
			run: func(t *T, k *Kind) {
				long := strings.Repeat("x", 50000)
				for _, name := range []string{k.Collection + long, long} {
					_, err := t.GetRaw(k, name)
					if n := len(status.Convert(err).Message()); n > 4096 {
						t.Failf("the message of the error has %d bytes", n)
					}
				}
			},
		},
	}
}

// unknownMethod is a method that no service has.
const unknownMethod = "ForgetEverything"

// raw makes a call of a kind's service with these bytes as its request. It returns only errors that
// the agent answered.
func raw(t *T, k *Kind, method string, request []byte) error {
	service := "/opi_api.network.evpn_gw.v1alpha1." + k.Type + "Service/"
	ctx, cancel := context.WithTimeout(t.Context(), t.Config().CallTimeout)
	defer cancel()
	// The unknown fields of a message are sent as they are.
	message := &emptypb.Empty{}
	message.ProtoReflect().SetUnknown(request)
	err := t.Conn().Invoke(ctx, service+method, message, &emptypb.Empty{})
	if c := status.Code(err); c == codes.Unavailable || c == codes.DeadlineExceeded {
		t.Lost()
		t.Failf("%s: the agent does not answer: %s", method, err)
	}
	if status.Code(err) == codes.Unimplemented && method != unknownMethod {
		t.Skipf("not served: %s", method)
	}
	return err
}

// peers are the cases about who may connect. They need an agent that serves TLS.
func peers() []Case {
	refused := func(name, violation string, config func(t *T, own *tls.Config) *tls.Config) Case {
		return Case{
			Name: name, Source: "AIP-211", Says: saysAuth, Violation: violation,
			Run: func(t *T) {
				own := t.Config().Endpoint.TLS
				if own == nil {
					t.Skipf("needs --ca: the agent is tested in plaintext")
				}
				conn, err := t.Config().Endpoint.Dial(config(t, own))
				if err != nil {
					t.Blockf("%v", err)
				}
				defer conn.Close()

				k := t.Kinds.BridgePort
				ctx, cancel := context.WithTimeout(t.Context(), t.Config().CallTimeout)
				defer cancel()
				request := &emptypb.Empty{}
				err = conn.Invoke(ctx, "/opi_api.network.evpn_gw.v1alpha1."+k.Type+
					"Service/List"+k.Type+"s", request, &emptypb.Empty{})
				switch status.Code(err) {
				case codes.Unavailable, codes.Unauthenticated, codes.PermissionDenied:
				case codes.DeadlineExceeded:
				default:
					t.Failf("List: %s, want no connection or PERMISSION_DENIED",
						status.Code(err))
				}
				wantAlive(t, "that")
			},
		}
	}
	const anybody = "Whoever reaches the xPU's network changes the networks of all pods."

	return []Case{
		refused("plaintext-is-refused", anybody, func(*T, *tls.Config) *tls.Config { return nil }),
		refused("no-certificate-is-refused", anybody, func(t *T, own *tls.Config) *tls.Config {
			needsCertificate(t, own)
			c := own.Clone()
			c.Certificates = nil
			return c
		}),
		refused("certificate-of-another-authority-is-refused", anybody,
			func(t *T, own *tls.Config) *tls.Config {
				needsCertificate(t, own)
				c, certificate := own.Clone(), selfSigned(t)
				// It is sent although the agent says which authorities it knows.
				c.GetClientCertificate = func(*tls.CertificateRequestInfo) (
					*tls.Certificate, error,
				) {
					return &certificate, nil
				}
				return c
			}),
		oldTLS(),
	}
}

// oldTLS is the case about versions of TLS that are not to be used any more. It shakes hands only,
// because gRPC does not use the ciphers of these versions anyway.
func oldTLS() Case {
	return Case{
		Name: "tls-1.1-is-refused", Source: "AIP-211", Says: saysAuth,
		Violation: "What pods' controllers say to the xPU can be read and changed (RFC 8996).",
		Run: func(t *T) {
			own := t.Config().Endpoint.TLS
			if own == nil {
				t.Skipf("needs --ca: the agent is tested in plaintext")
			}
			conn, err := t.Config().Endpoint.Connect(t.Context())
			if err != nil {
				t.Blockf("connect: %v", err)
			}
			defer conn.Close()

			c := own.Clone()
			c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
			c.NextProtos = []string{"h2"}
			ctx, cancel := context.WithTimeout(t.Context(), t.Config().CallTimeout)
			defer cancel()
			client := tls.Client(conn, c)
			if err := client.HandshakeContext(ctx); err == nil {
				t.Failf("the agent speaks %s", tls.VersionName(client.ConnectionState().Version))
			}
			wantAlive(t, "that")
		},
	}
}

func needsCertificate(t *T, own *tls.Config) {
	if len(own.Certificates) == 0 {
		t.Skipf("needs --cert and --key: the agent is tested without a client's certificate")
	}
}

// selfSigned returns a client's certificate that no authority signed.
func selfSigned(t *T) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Blockf("%v", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "opi-conformance"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}

	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Blockf("%v", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// rawBytes are the cases about connections that do not speak gRPC.
func rawBytes() []Case {
	sends := func(name string, what []byte) Case {
		return Case{
			Name: name, Source: "AIP-193", Says: saysStatus,
			Violation: "Whoever reaches the xPU's network ends the agent, and with it the start of " +
				"all pods.",
			Run: func(t *T) {
				for range 3 {
					conn, err := t.Config().Endpoint.Connect(t.Context())
					if err != nil {
						t.Blockf("connect: %v", err)
					}
					_ = conn.SetDeadline(time.Now().Add(time.Second))
					_, _ = conn.Write(what)
					_ = conn.Close()
				}
				// The agent takes this connection after the others.
				wantNewConnection(t, "after three without gRPC")
				wantAlive(t, "bytes that are not gRPC")
			},
		}
	}

	return []Case{
		sends("connection-without-a-word-leaves-the-agent-alive", nil),
		sends("http-1-leaves-the-agent-alive", []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
		sends("random-bytes-leave-the-agent-alive", bytes.Repeat([]byte{0xff, 0, 0x16}, 1000)),
		{
			Name: "idle-connections-leave-the-agent-alive", Source: "AIP-193", Says: saysStatus,
			Violation: "A broken client keeps all others from the agent.",
			Run: func(t *T) {
				for range 32 {
					conn, err := t.Config().Endpoint.Connect(t.Context())
					if err != nil {
						t.Failf("connect: %v", err)
					}
					defer conn.Close()
				}
				wantNewConnection(t, "beside 32 idle ones")
			},
		},
	}
}

// wantNewConnection ends the case unless the agent answers by a new connection.
func wantNewConnection(t *T, when string) {
	conn, err := t.Config().Endpoint.Dial(t.Config().Endpoint.TLS)
	if err != nil {
		t.Blockf("%v", err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), t.Config().CallTimeout)
	defer cancel()
	err = conn.Invoke(ctx, "/opi_api.network.evpn_gw.v1alpha1.BridgePortService/"+
		"ListBridgePorts", &emptypb.Empty{}, &emptypb.Empty{})
	if c := status.Code(err); c == codes.Unavailable || c == codes.DeadlineExceeded {
		t.Lost()
		t.Failf("a new connection %s: %s", when, err)
	}
}
