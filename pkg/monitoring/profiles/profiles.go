// SPDX-License-Identifier: Apache-2.0

// Package profiles serves the profiles of a Go program by HTTP. It is apart from package monitoring
// because programs without them import that too, and profiles take half a megabyte of a program.
package profiles

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
)

// CheckAddress returns an error unless the address is one of loopback with a port,
// "127.0.0.1:6060" or "localhost:6060". Others are refused because profiles show names of objects,
// and making them costs the program time.
func CheckAddress(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("address %q is not host:port: %w", address, err)
	}
	if host != "localhost" && !net.ParseIP(host).IsLoopback() {
		return notLoopback(address)
	}
	return nil
}

func notLoopback(address string) error {
	return fmt.Errorf("address %s is not a loopback address, such as 127.0.0.1:6060", address)
}

// Listen listens at an address that [CheckAddress] accepts.
func Listen(address string) (net.Listener, error) {
	if err := CheckAddress(address); err != nil {
		return nil, err
	}

	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}

	// A file defines the meaning of localhost, so check the result.
	if bound, ok := listener.Addr().(*net.TCPAddr); !ok || !bound.IP.IsLoopback() {
		return nil, errors.Join(notLoopback(address), listener.Close())
	}

	return listener, nil
}

// Serve answers at /debug/pprof/ until ctx ends, see package [net/http/pprof]. It closes
// the listener.
func Serve(ctx context.Context, listener net.Listener, log logr.Logger) error {
	mux := http.NewServeMux()
	// also serves heap, goroutine and the other runtime profiles
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return monitoring.Serve(ctx, listener, mux, log)
}
