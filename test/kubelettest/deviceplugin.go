// SPDX-License-Identifier: Apache-2.0

// Package kubelettest has a kubelet's side of the APIs that a node agent uses, over real sockets.
// By the device plugin API it finds plugins, watches their Functions and allocates them. By DRA it
// has drivers prepare claims. By the pod resources API it reports which pods have which devices. An
// agent sees the same as from a real kubelet, but without the kubelet's delays.
package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Options are the options of a [Kubelet].
type Options struct {
	// Blind means that plugins are registered, but their Functions are not watched.
	Blind bool
	// Refuse returns why a resource cannot be registered, or "" if it can. Refuse may be nil.
	Refuse func(resource string) string
}

// Kubelet is a kubelet that can be started and stopped any number of times. Its methods may be
// called concurrently, except Start and Stop.
type Kubelet struct {
	dir     string
	options Options

	stop    context.CancelFunc
	running sync.WaitGroup

	mutex         sync.Mutex
	plugins       map[string][]*plugin // by resource; the last plugin is called
	devices       map[string][]*pluginapi.Device
	lists         map[string]int
	registrations map[string]int
	changed       chan struct{} // closed at every change, and replaced
}

// plugin is a connection to a plugin's endpoint.
type plugin struct {
	path       string
	connection *grpc.ClientConn
	client     pluginapi.DevicePluginClient
	end        context.CancelFunc // ends the stream
}

// New returns a kubelet with this directory, as "/var/lib/kubelet". The path must be short, because
// it is part of the paths of sockets.
func New(dir string, options Options) *Kubelet {
	k := &Kubelet{dir: dir, options: options, changed: make(chan struct{})}
	k.forget()
	k.registrations, k.lists = map[string]int{}, map[string]int{}
	return k
}

func (k *Kubelet) forget() {
	k.plugins, k.devices = map[string][]*plugin{}, map[string][]*pluginapi.Device{}
}

func (k *Kubelet) watchedDir() string { return filepath.Join(k.dir, "plugins_registry") }

// Start begins to look for plugins.
func (k *Kubelet) Start() error {
	ctx, stop := context.WithCancel(context.Background())
	k.stop = stop
	if err := k.watch(ctx); err != nil {
		stop()
		return err
	}
	return nil
}

// Stop ends the kubelet as if it were killed.
func (k *Kubelet) Stop() {
	k.stop()
	k.running.Wait()
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.forget()
	k.notify()
}

// Restart calls Stop and Start.
func (k *Kubelet) Restart() error {
	k.Stop()
	return k.Start()
}

// RemoveSockets removes all sockets of plugins.
func (k *Kubelet) RemoveSockets() error {
	paths, err := filepath.Glob(filepath.Join(k.watchedDir(), "*.sock"))
	if err != nil {
		return err
	}

	for _, path := range paths {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}

	return nil
}

func (k *Kubelet) validate(resource string, versions ...string) error {
	if !slices.Contains(versions, pluginapi.Version) {
		return fmt.Errorf("versions %q: want %s", versions, pluginapi.Version)
	}

	if k.options.Refuse != nil {
		if reason := k.options.Refuse(resource); reason != "" {
			return errors.New(reason)
		}
	}

	return nil
}

// watch registers the plugins whose sockets exist or appear in the directory for sockets.
func (k *Kubelet) watch(ctx context.Context) error {
	if err := os.MkdirAll(k.watchedDir(), 0o750); err != nil {
		return err
	}

	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	if err := watcher.Add(k.watchedDir()); err != nil {
		watcher.Close()
		return err
	}

	paths, err := filepath.Glob(filepath.Join(k.watchedDir(), "*.sock"))
	if err != nil {
		watcher.Close()
		return err
	}

	for _, path := range paths {
		k.running.Go(func() { k.found(ctx, path) })
	}

	k.running.Go(func() {
		defer watcher.Close()
		for {
			select {
			case <-ctx.Done():
				return
			case event := <-watcher.Events:
				switch {
				case !strings.HasSuffix(event.Name, ".sock"):
				case event.Has(fsnotify.Create):
					k.running.Go(func() { k.found(ctx, event.Name) })
				case event.Has(fsnotify.Remove):
					k.disconnect(event.Name)
				}
			}
		}
	})

	return nil
}

// found registers the plugin at a socket. It tries again until that works, or the socket is gone.
func (k *Kubelet) found(ctx context.Context, path string) {
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		if _, err := os.Lstat(path); err != nil || k.register(ctx, path) == nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func (k *Kubelet) register(running context.Context, path string) error {
	connection, err := Dial(path)
	if err != nil {
		return err
	}
	defer connection.Close()

	client := registerapi.NewRegistrationClient(connection)
	ctx, cancel := context.WithTimeout(running, time.Second)
	defer cancel()

	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return err
	}
	if info.Type != registerapi.DevicePlugin {
		return fmt.Errorf("%s: is a %s", path, info.Type)
	}

	endpoint := info.Endpoint
	if endpoint == "" {
		endpoint = path
	}

	err = k.validate(info.Name, info.SupportedVersions...)
	if err == nil {
		err = k.connect(running, info.Name, endpoint)
	}

	status := &registerapi.RegistrationStatus{PluginRegistered: err == nil}
	if err != nil {
		status.Error = err.Error()
	}

	_, notifyErr := client.NotifyRegistrationStatus(ctx, status)
	return errors.Join(err, notifyErr)
}

// Dial connects to a plugin's socket. It tries often if the plugin does not answer, because an
// agent that was killed leaves its sockets until the next agent starts.
func Dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), grpc.WithConnectParams(grpc.ConnectParams{
			MinConnectTimeout: time.Second,
			Backoff: backoff.Config{
				BaseDelay: 50 * time.Millisecond, Multiplier: 1.5, MaxDelay: 500 * time.Millisecond,
			},
		}),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}))
}

// connect makes a plugin's endpoint the current one for the resource, and watches its Functions
// until ctx ends.
func (k *Kubelet) connect(ctx context.Context, resource, path string) error {
	k.mutex.Lock()
	known := slices.ContainsFunc(k.plugins[resource], func(p *plugin) bool {
		return p.path == path
	})
	k.mutex.Unlock()
	if known {
		return fmt.Errorf("device plugin already connected: %s", path)
	}

	connection, err := Dial(path)
	if err != nil {
		return err
	}

	p := &plugin{
		path: path, connection: connection, client: pluginapi.NewDevicePluginClient(connection),
	}
	asking, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()

	if _, err := p.client.GetDevicePluginOptions(asking, &pluginapi.Empty{}); err != nil {
		connection.Close()
		return err
	}

	watching, end := context.WithCancel(ctx)
	p.end = end
	k.mutex.Lock()
	k.plugins[resource] = append(k.plugins[resource], p)
	k.registrations[resource]++
	k.notify()
	k.mutex.Unlock()

	k.running.Go(func() {
		defer connection.Close()
		if !k.options.Blind {
			k.follow(watching, resource, p)
			k.disconnect(path)
			return
		}
		<-watching.Done()
	})

	return nil
}

// follow stores every list that the plugin sends, until the stream ends.
func (k *Kubelet) follow(ctx context.Context, resource string, p *plugin) {
	stream, err := p.client.ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		return
	}

	for {
		list, err := stream.Recv()
		if err != nil {
			return
		}

		k.mutex.Lock()
		k.devices[resource] = list.Devices
		k.lists[resource]++
		k.notify()
		k.mutex.Unlock()
	}
}

// disconnect forgets the endpoint at a socket. If it was the resource's last endpoint, no Function
// is healthy any more.
func (k *Kubelet) disconnect(path string) {
	k.mutex.Lock()
	defer k.mutex.Unlock()

	for resource, plugins := range k.plugins {
		i := slices.IndexFunc(plugins, func(p *plugin) bool { return p.path == path })
		if i < 0 {
			continue
		}

		plugins[i].end()
		if k.plugins[resource] = slices.Delete(plugins, i, i+1); len(k.plugins[resource]) > 0 {
			continue
		}

		delete(k.plugins, resource)
		var stale []*pluginapi.Device
		for _, d := range k.devices[resource] {
			stale = append(stale,
				&pluginapi.Device{ID: d.ID, Health: pluginapi.Unhealthy, Topology: d.Topology})
		}

		k.devices[resource] = stale
	}

	k.notify()
}

// notify wakes all waiting calls. The caller must hold the mutex.
func (k *Kubelet) notify() {
	close(k.changed)
	k.changed = make(chan struct{})
}

// Wait returns nil once the condition holds, which it checks after every change, or an error when
// ctx ends.
func (k *Kubelet) Wait(ctx context.Context, condition func() bool) error {
	for {
		k.mutex.Lock()
		changed := k.changed
		k.mutex.Unlock()
		if condition() {
			return nil
		}

		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// Devices returns the devices of the resource, or none if the resource is not known.
func (k *Kubelet) Devices(resource string) []*pluginapi.Device {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return k.devices[resource]
}

// Healthy returns the IDs of the resource's healthy devices, in the plugin's order.
func (k *Kubelet) Healthy(resource string) []string {
	var ids []string
	for _, d := range k.Devices(resource) {
		if d.Health == pluginapi.Healthy {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// Endpoints returns the sockets of the plugins that offer the resource now.
func (k *Kubelet) Endpoints(resource string) []string {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	var paths []string
	for _, p := range k.plugins[resource] {
		paths = append(paths, p.path)
	}
	return paths
}

// Lists returns how many lists of the resource were received since New.
func (k *Kubelet) Lists(resource string) int {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return k.lists[resource]
}

// Registrations returns how often the resource was registered since New.
func (k *Kubelet) Registrations(resource string) int {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return k.registrations[resource]
}

// EndStreams ends all streams of the resource, as a kubelet does that lost a stream. It forgets the
// endpoint, but still knows the socket and does not register it again.
func (k *Kubelet) EndStreams(resource string) {
	for _, path := range k.Endpoints(resource) {
		k.disconnect(path)
	}
}

func (k *Kubelet) client(resource string) (pluginapi.DevicePluginClient, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	plugins := k.plugins[resource]
	if len(plugins) == 0 {
		return nil, fmt.Errorf("resource %s: no plugin is registered", resource)
	}
	return plugins[len(plugins)-1].client, nil
}

// Allocate asks the plugin what a container with these devices gets.
func (k *Kubelet) Allocate(
	ctx context.Context, resource string, ids ...string,
) (*pluginapi.ContainerAllocateResponse, error) {
	client, err := k.client(resource)
	if err != nil {
		return nil, err
	}

	response, err := client.Allocate(ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return nil, err
	}
	if n := len(response.ContainerResponses); n != 1 {
		return nil, fmt.Errorf("resource %s: %d containers in the response, want 1", resource, n)
	}

	return response.ContainerResponses[0], nil
}

// Prefer asks the plugin which of the available devices it prefers, size of them.
func (k *Kubelet) Prefer(
	ctx context.Context, resource string, available, must []string, size int,
) ([]string, error) {
	client, err := k.client(resource)
	if err != nil {
		return nil, err
	}

	response, err := client.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: available, MustIncludeDeviceIDs: must,
				AllocationSize: int32(size)},
		},
	})

	if err != nil {
		return nil, err
	}
	if n := len(response.ContainerResponses); n != 1 {
		return nil, fmt.Errorf("resource %s: %d containers in the response, want 1", resource, n)
	}

	return response.ContainerResponses[0].DeviceIDs, nil
}
