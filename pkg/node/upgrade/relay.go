// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
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

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

const (
	// forwardTimeout is how long a call may wait for the endpoint of the successor. If it passes,
	// the kubelet fails the pod of an Allocate with the error.
	forwardTimeout = 30 * time.Second
	dialTimeout    = time.Second
)

// Relay is the predecessor's side of a device plugin. It completes the running Allocates, and
// forwards later calls to the successor, because the kubelet may not know the successor yet, and
// would fail a pod whose resource has no server. The zero value is ready for use.
type Relay struct {
	// allocating is held for reading by each running Allocate, see [Relay.TagRPC].
	allocating sync.RWMutex
	aside      atomic.Bool
}

// StandAside is called when a successor has asked for the node. It returns when the running
// Allocates have ended. Later calls are to be forwarded.
func (r *Relay) StandAside() {
	r.allocating.Lock()
	defer r.allocating.Unlock()
	r.aside.Store(true)
}

// Forwards reports whether calls are to be forwarded to a successor.
func (r *Relay) Forwards() bool { return r.aside.Load() }

// AwaitAllocates returns when the kubelet has the answers of the running Allocates. The kubelet
// closes the connection when a stream of ListAndWatch ends, and fails the pods whose Allocates have
// no answer yet.
func (r *Relay) AwaitAllocates() {
	r.allocating.Lock()
	defer r.allocating.Unlock()
}

type isAllocate struct{}

var _ stats.Handler = (*Relay)(nil)

// TagRPC marks calls of Allocate. A Relay is the [stats.Handler] of the servers of a device plugin,
// so that an Allocate lasts until its answer is on its way. The method itself could not know,
// because the answer is sent after it returns.
func (*Relay) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, isAllocate{},
		info.FullMethodName == pluginapi.DevicePlugin_Allocate_FullMethodName)
}

// HandleRPC is called at the start and at the end of each call.
func (r *Relay) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if ctx.Value(isAllocate{}) != true {
		return
	}
	switch s.(type) {
	case *stats.Begin:
		r.allocating.RLock()
	case *stats.End:
		r.allocating.RUnlock()
	}
}

// TagConn marks nothing.
func (*Relay) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn does nothing.
func (*Relay) HandleConn(context.Context, stats.ConnStats) {}

// Endpoints are the sockets at which the device plugins of both agents serve a resource.
type Endpoints struct {
	// Dir is the directory of the sockets, and Pattern matches their names; see [filepath.Match].
	Dir, Pattern string
	Resource     string
	// Created is when the predecessor created its own endpoint, by the clock of the file system.
	// The successor created its endpoint later.
	Created time.Time
}

// Forward passes a call to the successor's endpoint for the resource, once there is one. Its error
// is a gRPC status for the kubelet.
func (e Endpoints) Forward(
	ctx context.Context, call func(context.Context, pluginapi.DevicePluginClient) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, forwardTimeout)
	defer cancel()

	sockets, err := watchdir.Open(e.Dir, func(event fsnotify.Event) bool {
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
		if conn := e.successor(ctx); conn != nil {
			defer conn.Close()
			return call(ctx, pluginapi.NewDevicePluginClient(conn))
		}
		if !loop.Wait(ctx, sockets.Changes(), 0) {
			return status.Errorf(codes.Unavailable,
				"resource %s: another agent has the node and does not serve it yet", e.Resource)
		}
	}
}

// successor returns a connection to an endpoint of the resource that another agent created later
// than the predecessor created its own, or nil.
func (e Endpoints) successor(ctx context.Context) *grpc.ClientConn {
	paths, _ := filepath.Glob(filepath.Join(e.Dir, e.Pattern))
	for _, path := range paths {
		if info, err := os.Stat(path); err != nil || !info.ModTime().After(e.Created) {
			continue
		}
		if conn, err := e.dial(ctx, path); err == nil {
			return conn
		}
	}

	return nil
}

// dial connects to an endpoint, and fails unless it serves the resource. It waits for an endpoint
// that was just created and does not listen yet.
func (e Endpoints) dial(ctx context.Context, path string) (*grpc.ClientConn, error) {
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
	if err == nil && info.Name != e.Resource {
		err = fmt.Errorf("endpoint %s is of resource %s", path, info.Name)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}

	return conn, nil
}
