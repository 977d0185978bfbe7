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
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// run opens the agent and serves it until ctx ends.
func run(ctx context.Context, o options, log logr.Logger) error {
	credentials, err := o.credentials()
	if err != nil {
		return err
	}

	if o.hostPFFile != "" {
		pfs, err := representor.ReadHostPFs(o.hostPFFile)
		if err != nil {
			return fmt.Errorf("--host-pf-file: %w", err)
		}
		config := &o.agent.Plane.Representors
		config.HostPFs = append(config.HostPFs, pfs...)
	}

	// While the agent is stuck, it reports NOT_SERVING.
	alive := health.NewServer()
	o.agent.Stuck = func(stuck bool) {
		if stuck {
			alive.Shutdown()
		} else {
			alive.Resume()
		}
	}

	agent, err := service.New(o.agent, log)
	if err != nil {
		return err
	}

	defer func() {
		if err := agent.Close(); err != nil {
			log.Error(err, "close the state")
		}
	}()

	return serve(ctx, o, agent, alive, credentials, log)
}

// serve serves the agent, its metrics and profiles until ctx ends. credentials are nil without TLS.
func serve(
	ctx context.Context, o options, agent *service.Agent, alive *health.Server,
	credentials *access.Credentials, log logr.Logger,
) error {
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}

	all, ctx := errgroup.WithContext(ctx)
	if o.metricsListen != "" {
		if err := serveMetrics(ctx, all, o, agent, credentials, log); err != nil {
			return errors.Join(fmt.Errorf("--metrics-listen: %w", err), listener.Close())
		}
	}

	if o.profilesListen != "" {
		profiles, err := monitoring.ListenForProfiles(o.profilesListen)
		if err != nil {
			return errors.Join(fmt.Errorf("--pprof-listen: %w", err), listener.Close())
		}
		all.Go(func() error { return monitoring.ServeProfiles(ctx, profiles, log) })
	}

	if credentials != nil {
		all.Go(func() error { return credentials.Follow(ctx, log) })
	}

	all.Go(func() error { return agent.Run(ctx) })
	serveGRPC(ctx, all, newServer(agent, alive, credentials), alive, listener, log)
	log.Info("serving",
		"address", listener.Addr().String(), "mtls", o.tls.Cert != "",
		"uplinks", o.agent.Plane.Uplinks, "version", version.String())
	err = all.Wait()
	log.Info("stopped, the data plane stays as it is")

	return err
}

// newServer returns a gRPC server of the agent that also serves health and reflection.
func newServer(
	agent *service.Agent, alive *health.Server, credentials *access.Credentials,
) *grpc.Server {
	var options []grpc.ServerOption
	if credentials != nil {
		options = credentials.ServerOptions()
	}

	server := agent.NewServer(options...)
	healthpb.RegisterHealthServer(server, alive)

	// Clients ask for the inventory only if its service has a status.
	for name := range server.GetServiceInfo() {
		alive.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}

	reflection.Register(server)
	return server
}

// serveGRPC serves until ctx ends.
func serveGRPC(
	ctx context.Context, all *errgroup.Group, server *grpc.Server, alive *health.Server,
	listener net.Listener, log logr.Logger,
) {
	all.Go(func() error {
		err := server.Serve(access.LimitConnections(listener, log))
		if errors.Is(err, grpc.ErrServerStopped) {
			return nil // ctx ended before the server began
		}
		return err
	})

	all.Go(func() error {
		<-ctx.Done()
		alive.Shutdown()
		// Calls take milliseconds. A client that does not read its answer must not delay the end.
		force := time.AfterFunc(5*time.Second, server.Stop)
		defer force.Stop()
		server.GracefulStop()
		return nil
	})
}

// serveMetrics serves Prometheus metrics until ctx ends.
func serveMetrics(
	ctx context.Context, all *errgroup.Group, o options, agent *service.Agent,
	credentials *access.Credentials, log logr.Logger,
) error {
	listener, err := net.Listen("tcp", o.metricsListen)
	if err != nil {
		return err
	}

	registry := monitoring.NewRegistry("opi-bridge")
	registry.MustRegister(agent)
	metrics := monitoring.Handler(registry)
	if o.metricsTLS {
		listener = tls.NewListener(listener, credentials.TLS("http/1.1"))
		metrics = credentials.AuthorizeMetrics(metrics)
	}

	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	all.Go(func() error { return monitoring.Serve(ctx, listener, mux, log) })

	return nil
}

// credentials opens the credentials, or returns nil without TLS. It refuses to serve without TLS on
// an address that other machines can reach, unless --insecure is set.
func (o options) credentials() (*access.Credentials, error) {
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
