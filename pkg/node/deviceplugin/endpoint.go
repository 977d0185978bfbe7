package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// endpoint is a socket of a server, and answers the kubelet there.
type endpoint struct {
	*server
	registerapi.UnimplementedRegistrationServer

	path    string
	grpc    *grpc.Server
	streams int           // of ListAndWatch; guarded by the servers' mutex
	ending  chan struct{} // closed when streams shall end
}

// openEndpoint serves at a new socket.
func openEndpoint(s *server) (*endpoint, error) {
	listener, path, err := listen(s.servers.socketDir, s.resource)
	if err != nil {
		return nil, err
	}
	e := &endpoint{server: s, path: path, grpc: grpc.NewServer(), ending: make(chan struct{})}
	pluginapi.RegisterDevicePluginServer(e.grpc, e)
	registerapi.RegisterRegistrationServer(e.grpc, e)
	s.servers.endpoints.Go(func() {
		if err := e.grpc.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			s.log.Error(err, "Device plugin socket ended", "path", path)
		}
	})
	return e, nil
}

// close ends the endpoint and removes its socket. Streams end once they have said everything; other calls that are
// under way get as long as patience. It is called once.
func (e *endpoint) close(patience time.Duration) {
	close(e.ending)
	over := time.AfterFunc(patience, e.grpc.Stop)
	defer over.Stop()
	e.grpc.GracefulStop()
}

// GetInfo tells a kubelet that found the socket what it is.
func (e *endpoint) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.DevicePlugin, Name: e.resource, Endpoint: e.path, SupportedVersions: []string{pluginapi.Version},
	}, nil
}

// NotifyRegistrationStatus is how a kubelet that found the socket says what it did. After a refusal the kubelet tries
// again by itself, later and later, as long as the socket is there.
func (e *endpoint) NotifyRegistrationStatus(
	_ context.Context, r *registerapi.RegistrationStatus,
) (*registerapi.RegistrationStatusResponse, error) {
	e.servers.mutex.Lock()
	defer e.servers.mutex.Unlock()
	before, name := e.refusal, filepath.Base(e.path)
	if r.PluginRegistered {
		e.refusal = ""
		e.metrics.registered.Inc()
		e.log.Info("Registered with the kubelet", "endpoint", name)
		e.streamsChanged()
		return &registerapi.RegistrationStatusResponse{}, nil
	}
	e.refusal = cmp.Or(r.Error, "the kubelet gave no reason")
	e.metrics.notRegistered.Inc()
	if e.refusal != before {
		e.log.Info("The kubelet refused the resource, so no pod can have it. It tries again by itself: correct the "+
			"resource's name in the DevicePool, or look into the kubelet's log", "endpoint", name, "error", e.refusal)
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

// ListAndWatch sends the list of Functions at once and whenever it becomes another one.
func (e *endpoint) ListAndWatch(
	_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse],
) error {
	e.countStream(+1)
	defer e.countStream(-1)
	var sent *offer
	for ending := false; ; {
		next := e.offer.Load()
		if sent == nil || !sameDevices(sent.devices, next.devices) {
			if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: next.devices}); err != nil {
				return err
			}
			sent = next
		}
		if ending {
			return nil
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-e.ending:
			ending = true // but the last offer may not be sent yet
		case <-next.replaced:
		}
	}
}

// countStream counts streams that began or ended.
func (e *endpoint) countStream(change int) {
	e.servers.mutex.Lock()
	defer e.servers.mutex.Unlock()
	e.streams += change
	if e.server.endpoint == e {
		e.streamsChanged()
	}
}
