// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/netutil"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Path is the path of the reviews.
const Path = "/validate"

// Bounds of what clients can cost, because anyone who reaches the port may send requests.
const (
	// maxBody has room for two objects with all the parameters that the API takes, 640 KiB
	// (DeviceConfigMaxSize and OpaqueParametersMaxLength of k8s.io/api/resource/v1), and for what
	// else objects have. Larger objects are not judged here.
	maxBody    = 1 << 20 // bytes
	maxReviews = 2       // at a time
	// maxConnections bounds the bodies that wait for their turn.
	maxConnections = 32
	// patience is how long a client has to send a request, and to take the answer. The API server
	// waits less.
	patience = 5 * time.Second
	idle     = 2 * time.Minute // more than the API server's 90 s
)

// Options of a [Server].
type Options struct {
	// Address is the host:port to listen on.
	Address string
	// CertDir has tls.crt and tls.key. They are read for each connection, so that new ones are used
	// at once. Until they exist, connections fail.
	CertDir string
	// Registerer registers the metrics.
	Registerer prometheus.Registerer
	Log        logr.Logger
}

// Server serves the webhook. It is a runnable of a manager, also of replicas that are not the
// leader.
type Server struct {
	Options
	reviewer *reviewer
	handler  http.Handler
	turns    chan struct{} // a value for each review that is being answered
}

// New returns a server that does not listen yet.
func New(o Options) *Server {
	s := &Server{Options: o, reviewer: newReviewer(o.Registerer),
		turns: make(chan struct{}, maxReviews)}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+Path, s.answer)
	s.handler = mux
	return s
}

// NeedLeaderElection is false.
func (*Server) NeedLeaderElection() bool { return false }

// Start listens and serves until ctx ends.
func (s *Server) Start(ctx context.Context) error {
	listener, err := net.Listen("tcp", s.Address)
	if err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	return s.serve(ctx, listener)
}

// serve serves until ctx ends, and closes the listener.
func (s *Server) serve(ctx context.Context, listener net.Listener) error {
	certificate := &pair{dir: s.CertDir, log: s.Log}
	secure := tls.NewListener(netutil.LimitListener(listener, maxConnections), &tls.Config{
		MinVersion: tls.VersionTLS12, GetCertificate: certificate.get,
	})
	server := &http.Server{
		Handler: s.handler, ReadTimeout: patience, WriteTimeout: 2 * patience, IdleTimeout: idle,
		ErrorLog: slog.NewLogLogger(logr.ToSlogHandler(s.Log.V(1)), slog.LevelInfo),
	}

	defer context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		_ = server.Shutdown(grace)
	})()

	s.Log.Info("serving the webhook", "address", listener.Addr().String())
	if err := server.Serve(secure); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("webhook: serve %s: %w", listener.Addr(), err)
	}

	return nil
}

// answer answers a review. A review has its turn after its body was read and until its answer is
// known, so that slow clients take no turns.
func (s *Server) answer(w http.ResponseWriter, r *http.Request) {
	body, err := read(w, r)
	if err != nil {
		return
	}

	answer, err := s.reviewInTurn(r.Context(), body)
	if err != nil {
		http.Error(w, short(err.Error()), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(answer)
}

// reviewInTurn is review once there is a turn. It gives the turn back also when the review panics,
// which the HTTP server survives.
func (s *Server) reviewInTurn(ctx context.Context, body []byte) ([]byte, error) {
	select {
	case s.turns <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	defer func() { <-s.turns }()
	return s.review(ctx, body)
}

// review returns the answer to the review in a body.
func (s *Server) review(ctx context.Context, body []byte) ([]byte, error) {
	request, err := decodeReview(body)
	if err != nil {
		return nil, err
	}

	response := s.reviewer.Handle(ctx, request).AdmissionResponse
	response.UID = request.UID

	return json.Marshal(admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{
			APIVersion: admissionv1.SchemeGroupVersion.String(), Kind: "AdmissionReview",
		},
		Response: &response,
	})
}

// read reads a body of known length. Otherwise it answers what is wrong, and returns an error. API
// servers say the length.
func read(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	switch {
	case r.ContentLength < 0:
		http.Error(w, "the length of the body is unknown", http.StatusLengthRequired)
		return nil, errors.New("a body of unknown length")
	case r.ContentLength > maxBody:
		http.Error(w, fmt.Sprintf("the body is too large: at most %d bytes may be sent", maxBody),
			http.StatusRequestEntityTooLarge)
		return nil, fmt.Errorf("a body of %d bytes", r.ContentLength)
	}

	body := make([]byte, r.ContentLength)
	if _, err := io.ReadFull(r.Body, body); err != nil {
		http.Error(w, "the body has an end before its length", http.StatusBadRequest)
		return nil, fmt.Errorf("read the body: %w", err)
	}

	return body, nil
}

// pair is a certificate with its key, in files.
type pair struct {
	dir string
	log logr.Logger

	mutex sync.Mutex
	last  *tls.Certificate // that could be read
}

// get returns the certificate that the files have now. While they cannot be read, it returns the
// last one.
func (p *pair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()

	read, err := tls.LoadX509KeyPair(filepath.Join(p.dir, "tls.crt"), filepath.Join(p.dir, "tls.key"))
	switch {
	case err == nil:
		p.last = &read
	case p.last == nil:
		p.log.Error(err, "the webhook has no certificate yet")
		return nil, fmt.Errorf("certificate of the webhook: %w", err)
	default:
		p.log.Error(err, "the certificate of the webhook stays as it was")
	}

	return p.last, nil
}
