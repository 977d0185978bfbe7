// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring/profiles"
	"github.com/opiproject/xpu-device-plugin/pkg/otlp/metrics"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// server serves an agent.
type server struct {
	options
	log         logr.Logger
	credentials *access.Credentials // nil without TLS
	remotes     *remotesFile        // nil without one
	agent       *service.Agent
	health      *health.Server
	all         *errgroup.Group // of what is served
}

// run opens the agent and serves it until ctx ends.
func run(ctx context.Context, o options, log logr.Logger) error {
	s := &server{options: o, log: log, health: health.NewServer()}
	var err error
	if s.credentials, err = o.openCredentials(); err != nil {
		return err
	}

	config := o.config
	if o.hostPFFile != "" {
		pfs, err := representor.ReadHostPFs(o.hostPFFile)
		if err != nil {
			return fmt.Errorf("--host-pf-file: %w", err)
		}
		representors := &config.Plane.Representors
		representors.HostPFs = append(representors.HostPFs, pfs...)
	}

	if o.remotesFile != "" {
		s.remotes = &remotesFile{path: o.remotesFile}
		if config.Remotes, _, err = s.remotes.read(); err != nil {
			return fmt.Errorf("--remotes: %w", err)
		}
	}

	if s.credentials != nil {
		config.Tenant = s.credentials.Tenant
	}

	// While the agent is stuck, its health is NOT_SERVING.
	config.Stuck = func(stuck bool) {
		if stuck {
			s.health.Shutdown()
		} else {
			s.health.Resume()
		}
	}

	if s.agent, err = service.New(config, log); err != nil {
		return err
	}

	defer func() {
		if err := s.agent.Close(); err != nil {
			log.Error(err, "close the state")
		}
	}()

	return s.serve(ctx)
}

// serve serves the agent, its metrics and profiles until ctx ends.
func (s *server) serve(ctx context.Context) error {
	listener, err := net.Listen("tcp", s.listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}

	s.all, ctx = errgroup.WithContext(ctx)
	if s.metricsListen != "" {
		if err := s.serveMetrics(ctx); err != nil {
			return errors.Join(fmt.Errorf("--metrics-listen: %w", err), listener.Close())
		}
	}

	if s.collector != "" {
		sender, err := metrics.Dial(ctx, s.collector, "opi-bridge", s.registry(), s.log)
		if err != nil {
			return errors.Join(fmt.Errorf("--metrics-endpoint: %w", err), listener.Close())
		}
		s.all.Go(func() error { return sender.Run(ctx) })
	}

	if s.profilesListen != "" {
		lis, err := profiles.Listen(s.profilesListen)
		if err != nil {
			return errors.Join(fmt.Errorf("--pprof-listen: %w", err), listener.Close())
		}
		s.all.Go(func() error { return profiles.Serve(ctx, lis, s.log) })
	}

	if s.credentials != nil {
		s.all.Go(func() error { return s.credentials.Follow(ctx, s.log) })
	}

	if s.remotes != nil {
		s.all.Go(func() error { return s.remotes.follow(ctx, s.log, s.agent.SetRemotes) })
	}

	s.all.Go(func() error { return s.agent.Run(ctx) })
	s.serveGRPC(ctx, listener)
	s.log.Info("serving", "address", listener.Addr().String(), "mtls", s.tls.Cert != "",
		"uplinks", s.config.Plane.Uplinks, "version", version.String())
	err = s.all.Wait()
	s.log.Info("stopped, the data plane stays as it is")

	return err
}

// serveGRPC serves the agent, health and reflection until ctx ends.
func (s *server) serveGRPC(ctx context.Context, listener net.Listener) {
	var options []grpc.ServerOption
	if s.credentials != nil {
		options = s.credentials.ServerOptions()
	}

	server := s.agent.NewServer(options...)
	healthpb.RegisterHealthServer(server, s.health)

	// Clients ask for the inventory only if its service has a status.
	for name := range server.GetServiceInfo() {
		s.health.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}

	reflection.Register(server)

	s.all.Go(func() error {
		err := server.Serve(access.LimitConnections(listener, s.log))
		if errors.Is(err, grpc.ErrServerStopped) {
			return nil // ctx ended before the server began
		}
		return err
	})

	s.all.Go(func() error {
		<-ctx.Done()
		s.health.Shutdown()
		// Calls take milliseconds. A client that does not read its answer must not delay the end.
		force := time.AfterFunc(5*time.Second, server.Stop)
		defer force.Stop()
		server.GracefulStop()
		return nil
	})
}

// serveMetrics serves Prometheus metrics until ctx ends.
func (s *server) serveMetrics(ctx context.Context) error {
	listener, err := net.Listen("tcp", s.metricsListen)
	if err != nil {
		return err
	}

	handler := monitoring.Handler(s.registry())
	if s.metricsTLS {
		listener = tls.NewListener(listener, s.credentials.TLS("http/1.1"))
		handler = s.credentials.AuthorizeMetrics(handler)
	}

	mux := http.NewServeMux()
	mux.Handle("GET /metrics", handler)
	s.all.Go(func() error { return monitoring.Serve(ctx, listener, mux, s.log) })

	return nil
}

// registry returns a registry with the metrics of the agent.
func (s *server) registry() *prometheus.Registry {
	registry := monitoring.NewRegistry("opi-bridge")
	registry.MustRegister(s.agent)
	return registry
}

// openCredentials opens the credentials, or returns nil without TLS. It refuses to serve without
// TLS on an address that other machines can reach, unless --insecure is set.
func (o options) openCredentials() (*access.Credentials, error) {
	if o.tls.Cert != "" {
		return access.OpenCredentials(o.tls)
	}
	if o.tls.Authorization != "" {
		return nil, errors.New("--authorization: needs --tls-cert, --tls-key and " +
			"--tls-client-ca: clients are known by their certificates")
	}
	if o.metricsTLS {
		return nil, errors.New("--metrics-tls: needs --tls-cert, --tls-key and --tls-client-ca")
	}
	if err := access.CheckPlaintext(o.listen); err != nil && !o.insecure {
		return nil, fmt.Errorf("--listen: %w; give --tls-cert, --tls-key and --tls-client-ca, or "+
			"--insecure", err)
	}

	return nil, nil
}
