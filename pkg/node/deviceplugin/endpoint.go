package deviceplugin

import (
	"context"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// endpoint is a socket of a server, and answers the kubelet there.
type endpoint struct {
	pluginapi.UnimplementedDevicePluginServer
	registerapi.UnimplementedRegistrationServer

	server  *server
	path    string
	grpc    *grpc.Server
	streams int // guarded by the server's mutex

	once   sync.Once
	ending chan struct{} // closed when streams shall end
}

func newEndpoint(s *server, path string) *endpoint {
	e := &endpoint{server: s, path: path, grpc: grpc.NewServer(), ending: make(chan struct{})}
	pluginapi.RegisterDevicePluginServer(e.grpc, e)
	registerapi.RegisterRegistrationServer(e.grpc, e)
	return e
}

func (e *endpoint) name() string { return filepath.Base(e.path) }

// close ends the endpoint and removes its socket. Streams end once they have said everything; other calls that are
// under way get as long as patience.
func (e *endpoint) close(patience time.Duration) {
	e.once.Do(func() { close(e.ending) })
	over := time.AfterFunc(patience, e.grpc.Stop)
	defer over.Stop()
	e.grpc.GracefulStop()
}

// GetInfo tells a kubelet that found the socket what it is.
func (e *endpoint) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.DevicePlugin, Name: e.server.resource, Endpoint: e.path,
		SupportedVersions: []string{pluginapi.Version},
	}, nil
}

// NotifyRegistrationStatus is how a kubelet that found the socket says what it did. It tries again by itself, later and
// later, as long as the socket is there.
func (e *endpoint) NotifyRegistrationStatus(
	_ context.Context, r *registerapi.RegistrationStatus,
) (*registerapi.RegistrationStatusResponse, error) {
	s := e.server
	refusal := ""
	if !r.PluginRegistered {
		refusal = "the kubelet gave no reason"
		if r.Error != "" {
			refusal = r.Error
		}
	}
	s.mutex.Lock()
	again := refusal == s.refusal
	s.refusal = refusal
	s.mutex.Unlock()
	if refusal == "" {
		s.metrics.registered.Inc()
		s.log.Info("Registered with the kubelet", "endpoint", e.name())
		s.lookAgain()
		return &registerapi.RegistrationStatusResponse{}, nil
	}
	s.metrics.notRegistered.Inc()
	if !again {
		s.log.Info("The kubelet refused the resource, so no pod can have it. It tries again by itself: correct the "+
			"resource's name in the DevicePool, or look into the kubelet's log", "endpoint", e.name(), "error", refusal)
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

func options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}
}

// GetDevicePluginOptions says that the kubelet may ask which Functions go well together.
func (e *endpoint) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return options(), nil
}

// ListAndWatch sends the list of Functions at once and whenever it becomes another one.
func (e *endpoint) ListAndWatch(
	_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse],
) error {
	e.count(+1)
	defer e.count(-1)
	var sent *offer
	for {
		// Read before the offer, so that the last one is sent before the stream ends.
		ending := e.isEnding()
		next, renewed := e.server.current()
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
		case <-renewed:
		}
	}
}

func (e *endpoint) isEnding() bool {
	select {
	case <-e.ending:
		return true
	default:
		return false
	}
}

// count counts streams, and has the server look whether anybody watches it.
func (e *endpoint) count(change int) {
	s := e.server
	s.mutex.Lock()
	e.streams += change
	current := s.endpoint == e
	if current {
		s.streams = e.streams
	}
	s.mutex.Unlock()
	if current {
		s.lookAgain()
	}
}

// GetPreferredAllocation chooses among Functions by the pool's policy. It never fails: the kubelet would fail the pod,
// where it can as well choose for itself.
func (e *endpoint) GetPreferredAllocation(
	_ context.Context, r *pluginapi.PreferredAllocationRequest,
) (*pluginapi.PreferredAllocationResponse, error) {
	o, _ := e.server.current()
	response := &pluginapi.PreferredAllocationResponse{}
	for _, c := range r.ContainerRequests {
		chosen := prefer(devicePlugin(o.pool).PreferredAllocation,
			o.some(c.AvailableDeviceIDs), o.some(c.MustIncludeDeviceIDs), int(c.AllocationSize))
		response.ContainerResponses = append(response.ContainerResponses,
			&pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: deviceIDs(chosen)})
	}
	return response, nil
}

func deviceIDs(functions []function.Function) []string {
	ids := make([]string, len(functions))
	for i, f := range functions {
		ids[i] = f.ID.String()
	}
	return ids
}

// Allocate says what containers get of Functions; see [server.allocate].
func (e *endpoint) Allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	return e.server.allocate(ctx, r)
}
