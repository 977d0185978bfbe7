// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// plugin is a device plugin that serves one resource. Its Allocate waits for proceed, and returns
// the name of the plugin.
type plugin struct {
	pluginapi.UnimplementedDevicePluginServer
	registerapi.UnimplementedRegistrationServer
	name, resource string
	began, proceed chan struct{}
}

func (p *plugin) GetInfo(
	context.Context, *registerapi.InfoRequest,
) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Name: p.resource}, nil
}

func (p *plugin) Allocate(
	context.Context, *pluginapi.AllocateRequest,
) (*pluginapi.AllocateResponse, error) {
	close(p.began)
	<-p.proceed
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{
		{Envs: map[string]string{"BY": p.name}},
	}}, nil
}

// serve serves the plugin at a socket of its name, which looks as if it was created then.
func (p *plugin) serve(t *testing.T, dir string, created time.Time, options ...grpc.ServerOption) {
	t.Helper()
	p.began, p.proceed = make(chan struct{}), make(chan struct{})
	path := filepath.Join(dir, "building-"+p.name)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must.Succeed(t, err)
	listener.SetUnlinkOnClose(false)
	must.Succeed(t, os.Chtimes(path, created, created))

	server := grpc.NewServer(options...)
	pluginapi.RegisterDevicePluginServer(server, p)
	registerapi.RegisterRegistrationServer(server, p)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	must.Succeed(t, os.Rename(path, filepath.Join(dir, "dp-"+p.name+".sock")))
}

// TestForward: a call waits for an endpoint that serves the resource and is younger than the
// predecessor's own.
func TestForward(t *testing.T) {
	dir, now := must.SocketDir(t), time.Now()
	own := &plugin{name: "own", resource: "example.com/fast"}
	other := &plugin{name: "other", resource: "example.com/slow"}
	next := &plugin{name: "next", resource: "example.com/fast"}
	own.serve(t, dir, now)
	other.serve(t, dir, now.Add(time.Second))

	endpoints := Endpoints{
		Dir: dir, Pattern: "dp-*.sock", Resource: "example.com/fast", Created: now,
	}
	allocate := func(ctx context.Context) (by string, err error) {
		err = endpoints.Forward(ctx,
			func(ctx context.Context, successor pluginapi.DevicePluginClient) error {
				response, err := successor.Allocate(ctx, &pluginapi.AllocateRequest{})
				if err == nil {
					by = response.ContainerResponses[0].Envs["BY"]
				}
				return err
			})
		return by, err
	}

	ended, end := context.WithCancel(t.Context())
	end()
	if by, err := allocate(ended); status.Code(err) != codes.Unavailable {
		t.Errorf("without a successor: by %q, %v, want that it is unavailable", by, err)
	}

	done := make(chan struct{})
	go func() {
		defer close(done)
		if by, err := allocate(t.Context()); by != "next" || err != nil {
			t.Errorf("Allocate by %q, %v, want it by the successor", by, err)
		}
	}()

	next.serve(t, dir, now.Add(time.Second))
	close(next.proceed)
	<-done
}

// TestStandAside: the relay forwards once the running Allocate has its answer, and not before.
func TestStandAside(t *testing.T) {
	var relay Relay
	dir, now := must.SocketDir(t), time.Now()
	p := &plugin{name: "own", resource: "example.com/fast"}
	p.serve(t, dir, now, grpc.StatsHandler(&relay))

	answered := make(chan struct{})
	go func() {
		defer close(answered)
		endpoints := Endpoints{
			Dir: dir, Pattern: "dp-*.sock", Resource: p.resource, Created: now.Add(-time.Second),
		}
		err := endpoints.Forward(t.Context(),
			func(ctx context.Context, client pluginapi.DevicePluginClient) error {
				_, err := client.Allocate(ctx, &pluginapi.AllocateRequest{})
				return err
			})
		if err != nil {
			t.Errorf("Allocate = %v", err)
		}
	}()

	<-p.began
	aside := make(chan struct{})
	go func() { relay.StandAside(); close(aside) }()
	must.Eventually(t, "StandAside waits", func() bool {
		free := relay.allocating.TryRLock()
		if free {
			relay.allocating.RUnlock()
		}
		return !free
	})
	if relay.Forwards() {
		t.Error("calls are forwarded while an Allocate runs")
	}

	close(p.proceed)
	<-answered
	<-aside
	if !relay.Forwards() {
		t.Error("calls are not forwarded")
	}
}
