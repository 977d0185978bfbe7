// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/peer"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

const (
	// forwardTimeout is how long a call may wait for the endpoint of the successor. If it passes,
	// the kubelet fails the pod of an Allocate with the error.
	forwardTimeout = 30 * time.Second
	dialTimeout    = time.Second
	// For the time reconnecting after the end of the predecessor, a stream counts as lost after
	// reconnectPatience already. A kubelet needs reconnectPatience to start a stream after it
	// registered an endpoint.
	reconnecting, reconnectPatience = 5 * time.Second, 200 * time.Millisecond
)

// StandAside is called when another agent, the successor, takes over the node. It returns when the
// running Allocates have ended. Later calls are forwarded to the successor. The kubelet may not
// know the successor yet, and would fail a pod whose resource has no server.
func (m *Manager) StandAside() {
	m.allocating.Lock()
	defer m.allocating.Unlock()
	m.aside.Store(true)
}

// awaitAllocates returns when the kubelet has the answers of the running Allocates. The kubelet
// closes the connection when a stream of ListAndWatch ends, and fails the pods whose Allocates have
// no answer yet.
func (m *Manager) awaitAllocates() {
	m.allocating.Lock()
	defer m.allocating.Unlock()
}

// allocates is a [stats.Handler] that holds the manager's lock during an Allocate, until the answer
// is on its way. The method itself could not, because the answer is sent after it returns.
type allocates struct{ *sync.RWMutex }

type isAllocate struct{}

// TagRPC marks calls of Allocate.
func (allocates) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, isAllocate{},
		info.FullMethodName == pluginapi.DevicePlugin_Allocate_FullMethodName)
}

// HandleRPC is called at the start and at the end of each call.
func (a allocates) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if ctx.Value(isAllocate{}) != true {
		return
	}
	switch s.(type) {
	case *stats.Begin:
		a.RLock()
	case *stats.End:
		a.RUnlock()
	}
}

// TagConn marks nothing.
func (allocates) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn does nothing.
func (allocates) HandleConn(context.Context, stats.ConnStats) {}

// Reconnect is called when the predecessor has ended. A kubelet before 1.37 then loses the
// resources of both agents, because it keeps one connection for each resource name, and closes it
// when any endpoint of the resource ends (runClient in
// pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go).
func (m *Manager) Reconnect(ctx context.Context) {
	// The predecessor leaves sockets if it was killed.
	if err := peer.RemoveDead(filepath.Join(m.socketDir(), socketPattern)); err != nil {
		m.Log.Error(err, "A socket that nobody serves remains")
	}

	m.mutex.Lock()
	m.unwatchedFor = reconnectPatience
	for _, s := range m.servers {
		s.patience = reconnectPatience
		if s.endpoint != nil && !s.lostAt.IsZero() {
			s.streamsChanged()
		}
	}

	m.mutex.Unlock()
	loop.Sleep(ctx, reconnecting)
	m.mutex.Lock()
	defer m.mutex.Unlock()

	m.unwatchedFor = unwatchedFor
	for _, s := range m.servers {
		s.patience = max(s.patience, unwatchedFor)
	}
}

// Registered returns nil if the kubelet has registered or refused every resource. Otherwise the
// error names a resource.
func (m *Manager) Registered() error {
	m.mutex.Lock()
	defer m.mutex.Unlock()

	if !m.updated {
		return errors.New("resources are not offered to the kubelet yet")
	}

	for resource, s := range m.servers {
		if s.refusal == "" && (s.endpoint == nil || s.endpoint.streams == 0) {
			return fmt.Errorf("resource %s is not registered with the kubelet", resource)
		}
	}

	return nil
}

// forward passes a call to the successor's endpoint for the resource, once there is one.
func (s *server) forward(
	ctx context.Context, call func(context.Context, pluginapi.DevicePluginClient) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, forwardTimeout)
	defer cancel()

	sockets, err := watchdir.Open(s.manager.socketDir(), func(event fsnotify.Event) bool {
		return event.Has(fsnotify.Create)
	})
	if err == nil {
		defer sockets.Close()
		err = sockets.Watch()
	}
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}

	for {
		if conn := s.successor(ctx); conn != nil {
			defer conn.Close()
			return call(ctx, pluginapi.NewDevicePluginClient(conn))
		}
		if !loop.Wait(ctx, sockets.Changes(), 0) {
			return status.Errorf(codes.Unavailable,
				"resource %s: another agent has the node and does not serve it yet", s.resource)
		}
	}
}

// successor returns a connection to an endpoint of the resource that another agent created later
// than this agent's endpoint; nil if there is none.
func (s *server) successor(ctx context.Context) *grpc.ClientConn {
	own := s.created()
	paths, _ := filepath.Glob(filepath.Join(s.manager.socketDir(), socketPattern))
	for _, path := range paths {
		if info, err := os.Stat(path); err != nil || !info.ModTime().After(own) {
			continue
		}
		if conn, err := s.dial(ctx, path); err == nil {
			return conn
		}
	}

	return nil
}

// dial connects to an endpoint, and fails unless it serves the resource. It waits for an endpoint
// that was just created and does not listen yet.
func (s *server) dial(ctx context.Context, path string) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()

	conn, err := grpc.NewClient("unix:"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(
			grpc.ConnectParams{Backoff: backoff.Config{
				BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond,
			}}))

	if err != nil {
		return nil, err
	}

	info, err := registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{},
		grpc.WaitForReady(true))
	if err == nil && info.Name != s.resource {
		err = fmt.Errorf("endpoint %s is of resource %s", path, info.Name)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}

	return conn, nil
}

// created returns the time when the current endpoint was created.
func (s *server) created() time.Time {
	s.manager.mutex.Lock()
	defer s.manager.mutex.Unlock()
	if s.endpoint == nil {
		return time.Time{}
	}
	return s.endpoint.created
}
