package deviceplugin

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	// pluginsRegistry is where the kubelet looks for plugins' sockets, below its directory.
	pluginsRegistry = "plugins_registry"

	// What sockets are called: "xpu-dp-fast-5a1c09e2.sock". Each is new. The kubelet knows endpoints by their path and
	// refuses one that it has, which it forgets only some time after the socket is gone.
	socketPrefix = "xpu-dp-"
	socketSuffix = ".sock"
	// maxLabel bounds the part of a socket's name that is for people. The kernel allows 107 bytes for all of the path.
	maxLabel = 20
)

// unusual is what does not belong in the name of a socket.
var unusual = regexp.MustCompile(`[^a-zA-Z0-9_]+`)

// endpoint is a socket of a server, and answers the kubelet there.
type endpoint struct {
	*server
	registerapi.UnimplementedRegistrationServer

	path    string
	grpc    *grpc.Server
	streams int           // of ListAndWatch; guarded by the manager's mutex
	ending  chan struct{} // closed when streams shall end
}

// openEndpoint serves at a new socket.
func openEndpoint(s *server) (*endpoint, error) {
	listener, path, err := listen(s.manager.socketDir(), s.resource)
	if err != nil {
		return nil, err
	}
	e := &endpoint{server: s, path: path, grpc: grpc.NewServer(), ending: make(chan struct{})}
	pluginapi.RegisterDevicePluginServer(e.grpc, e)
	registerapi.RegisterRegistrationServer(e.grpc, e)
	s.manager.endpoints.Go(func() {
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
	e.manager.mutex.Lock()
	defer e.manager.mutex.Unlock()
	before, name := e.refusal, filepath.Base(e.path)
	registrations := e.manager.Metrics.registrations
	if r.PluginRegistered {
		e.refusal = ""
		registrations.WithLabelValues(e.resource, "ok").Inc()
		e.log.Info("Registered with the kubelet", "endpoint", name)
		e.streamsChanged()
		return &registerapi.RegistrationStatusResponse{}, nil
	}
	e.refusal = cmp.Or(r.Error, "the kubelet gave no reason")
	registrations.WithLabelValues(e.resource, "error").Inc()
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
	e.manager.mutex.Lock()
	defer e.manager.mutex.Unlock()
	e.streams += change
	if e.server.endpoint == e {
		e.streamsChanged()
	}
}

// listen makes a socket in the directory for a server of the resource, which only root may use.
func listen(dir, resource string) (net.Listener, string, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, "", err
	}
	label := unusual.ReplaceAllString(filepath.Base(resource), "-")
	label = label[:min(len(label), maxLabel)]
	var number [4]byte
	rand.Read(number[:])
	path := filepath.Join(dir, fmt.Sprintf("%s%s-%x%s", socketPrefix, label, number, socketSuffix))
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, "", fmt.Errorf("socket %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil && !errors.Is(err, fs.ErrNotExist) {
		listener.Close()
		return nil, "", fmt.Errorf("socket %s: %w", path, err)
	}
	return listener, path, nil
}

// removeStaleSockets removes the sockets that a killed process left. A socket where somebody listens is another agent's,
// which is about to end.
func removeStaleSockets(dir string, log logr.Logger) {
	paths, _ := filepath.Glob(filepath.Join(dir, socketPrefix+"*"+socketSuffix))
	for _, path := range paths {
		connection, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			connection.Close()
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Error(err, "A socket that nobody serves remains", "path", path)
		}
	}
}

// exists says whether a socket is still there for others to find.
func exists(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&fs.ModeSocket != 0
}
