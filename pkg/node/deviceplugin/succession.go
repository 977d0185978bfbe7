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
	// forwardTimeout is how long a call may wait for the endpoint of the agent that has the node
	// now. The kubelet fails the pod of an Allocate with the error.
	forwardTimeout = 30 * time.Second
	dialTimeout    = time.Second
	// reconnecting is how long after the end of the last agent a stream counts as lost after a
	// reconnectPatience, which a kubelet needs to begin one after it registered an endpoint.
	reconnecting, reconnectPatience = 5 * time.Second, 200 * time.Millisecond
)

// StandAside is called when another agent takes the node over. It returns when the Allocates that
// run have ended. Later ones are passed on to the other agent, which the kubelet may not know yet:
// it would fail a pod whose resource nobody serves.
func (m *Manager) StandAside() {
	m.allocating.Lock()
	defer m.allocating.Unlock()
	m.aside.Store(true)
}

// awaitAllocates returns when the kubelet has the answers of the Allocates that run. When a stream
// of ListAndWatch ends, it closes the connection, and fails the pods whose Allocates have no answer
// yet.
func (m *Manager) awaitAllocates() {
	m.allocating.Lock()
	defer m.allocating.Unlock()
}

// allocates holds the manager's lock while an Allocate runs, until its answer is on its way: the
// answer is sent after the method returns. It implements [stats.Handler].
type allocates struct{ *sync.RWMutex }

type isAllocate struct{}

// TagRPC marks Allocates.
func (allocates) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, isAllocate{},
		info.FullMethodName == pluginapi.DevicePlugin_Allocate_FullMethodName)
}

// HandleRPC is called at the begin and at the end of each call.
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

// Reconnect is called when the agent that had the node before has ended. A kubelet before 1.37 then
// loses the resources of both: it keeps one connection for each resource name, and ends it with the
// endpoint that ended (runClient in pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go).
func (m *Manager) Reconnect(ctx context.Context) {
	// if it was killed
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

// Registered returns nil if the kubelet knows all resources, or has refused them.
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

// forward passes a call on to the endpoint that another agent has for the resource, once there is
// one.
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

// successor is a connection to an endpoint of the resource that was made after this agent's, by
// another agent; nil if there is none.
func (s *server) successor(ctx context.Context) *grpc.ClientConn {
	own := s.made()
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

// dial connects to an endpoint, which must be the resource's. One that is being made does not
// listen for a moment.
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

// made is when the current endpoint was made.
func (s *server) made() time.Time {
	s.manager.mutex.Lock()
	defer s.manager.mutex.Unlock()
	if s.endpoint == nil {
		return time.Time{}
	}
	return s.endpoint.made
}
