// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
)

const (
	// pluginsRegistry is where the kubelet looks for plugins' sockets, below its directory.
	pluginsRegistry = "plugins_registry"

	// socketName is the name of a socket, with at most 20 bytes of the resource, because the kernel
	// limits the whole path to 107 bytes. Every socket has a new name, because the kubelet refuses
	// an endpoint at a path that it still remembers.
	socketName, socketPattern = "xpu-dp-%.20s-%08x.sock", "xpu-dp-*.sock"
)

// endpoint answers the kubelet at one socket.
type endpoint struct {
	*server
	registerapi.UnimplementedRegistrationServer

	path string
	// created is the time of the socket, by the file system's clock.
	created time.Time
	grpc    *grpc.Server
	// streams counts calls of ListAndWatch; guarded by the manager's mutex.
	streams int
	// ending is closed when streams must end.
	ending chan struct{}
}

// openEndpoint serves at a new socket, which only root may use.
func openEndpoint(s *server) (*endpoint, error) {
	dir := s.manager.socketDir()
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}

	label := strings.ReplaceAll(filepath.Base(s.resource), ".", "-")
	path := filepath.Join(dir, fmt.Sprintf(socketName, label, rand.Uint32()))
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}

	// The socket is removed last, because the kubelet ends all calls when it is gone.
	listener.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil && !errors.Is(err, fs.ErrNotExist) {
		_ = errors.Join(listener.Close(), os.Remove(path))
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}

	e := &endpoint{
		server: s, path: path,
		grpc:   grpc.NewServer(grpc.StatsHandler(&s.manager.relay)),
		ending: make(chan struct{}),
	}

	if info, err := os.Stat(path); err == nil {
		e.created = info.ModTime()
	}

	pluginapi.RegisterDevicePluginServer(e.grpc, e)
	registerapi.RegisterRegistrationServer(e.grpc, e)

	s.manager.running.Go(func() {
		if err := e.grpc.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			s.log.Error(err, "Device plugin socket ended", "path", path)
		}
	})

	return e, nil
}

// endpoints describes where a successor's endpoint for the resource is.
func (s *server) endpoints() upgrade.Endpoints {
	s.manager.mutex.Lock()
	defer s.manager.mutex.Unlock()
	e := upgrade.Endpoints{
		Dir: s.manager.socketDir(), Pattern: socketPattern, Resource: s.resource,
	}
	if s.endpoint != nil {
		e.Created = s.endpoint.created
	}
	return e
}

// close ends the endpoint and removes its socket. Streams end after the last offer is sent. Other
// calls in flight end after patience at the latest. It must be called once.
func (e *endpoint) close(patience time.Duration) {
	close(e.ending)
	over := time.AfterFunc(patience, e.grpc.Stop)
	defer over.Stop()
	e.grpc.GracefulStop()
	if err := os.Remove(e.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.log.Error(err, "A socket that nobody serves remains")
	}
}

// GetInfo returns the resource and the version of the API to the kubelet, which found the socket.
func (e *endpoint) GetInfo(
	context.Context, *registerapi.InfoRequest,
) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.DevicePlugin, Name: e.resource, Endpoint: e.path,
		SupportedVersions: []string{pluginapi.Version},
	}, nil
}

// NotifyRegistrationStatus is called by the kubelet after it registered or refused the resource.
func (e *endpoint) NotifyRegistrationStatus(
	_ context.Context, r *registerapi.RegistrationStatus,
) (*registerapi.RegistrationStatusResponse, error) {
	e.manager.mutex.Lock()
	defer e.manager.mutex.Unlock()

	name, result, refusal := filepath.Base(e.path), "error", ""
	if r.PluginRegistered {
		result = "ok"
		e.log.Info("Registered with the kubelet", "endpoint", name)
		e.streamsChanged()
	} else if refusal = cmp.Or(r.Error, "the kubelet gave no reason"); refusal != e.refusal {
		e.log.Info("The kubelet refused the resource, so no pod can have it. It tries again by "+
			"itself: correct the "+
			"resource's name in the DevicePool, or look into the kubelet's log", "endpoint",
			name, "error", refusal)
	}

	e.refusal = refusal
	e.manager.Metrics.registrations.WithLabelValues(e.resource, result).Inc()

	return &registerapi.RegistrationStatusResponse{}, nil
}

// ListAndWatch sends the list of Functions at once and whenever it changes.
func (e *endpoint) ListAndWatch(
	_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse],
) error {
	e.countStream(+1)
	defer e.countStream(-1)

	var sent *pluginapi.ListAndWatchResponse
	for ending := false; ; {
		next := e.offer.Load()
		if list := (&pluginapi.ListAndWatchResponse{Devices: next.devices}); !proto.Equal(sent,
			list) {
			if err := stream.Send(list); err != nil {
				return err
			}
			sent = list
		}

		if ending {
			return nil
		}

		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-e.ending:
			ending = true // the last offer may still have to be sent
		case <-next.replaced:
		}
	}
}

func (e *endpoint) countStream(change int) {
	e.manager.mutex.Lock()
	defer e.manager.mutex.Unlock()
	e.streams += change
	if e.server.endpoint == e {
		e.streamsChanged()
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
