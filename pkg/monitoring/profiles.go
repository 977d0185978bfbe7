package monitoring

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"

	"github.com/go-logr/logr"
)

// ListenForProfiles listens at a loopback address, "127.0.0.1:6060" or "localhost:6060". Others are refused: profiles show
// names of objects, and making them costs the program time.
func ListenForProfiles(address string) (net.Listener, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("address %q is not host:port: %w", address, err)
	}
	if host != "localhost" && !net.ParseIP(host).IsLoopback() {
		return nil, fmt.Errorf("address %s is not a loopback address, such as 127.0.0.1:6060", address)
	}
	return net.Listen("tcp", address)
}

// ServeProfiles answers at /debug/pprof/ until ctx ends, see package [net/http/pprof]. It closes the listener.
func ServeProfiles(ctx context.Context, listener net.Listener, log logr.Logger) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index) // with heap, goroutine and the other profiles of the runtime
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return Serve(ctx, listener, mux, log)
}
