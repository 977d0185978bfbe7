// SPDX-License-Identifier: Apache-2.0

// Package dashboard serves one page that shows the project's part of a cluster while it changes. It
// only reads, with the rights of the user.
package dashboard

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/netutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// Options say what is shown.
type Options struct {
	Client client.WithWatch
	// Cluster is a name of the cluster for people.
	Cluster string
	// AgentNamespace has the pods of xpu-agent and xpu-controller.
	AgentNamespace string
	// Namespace restricts pods, claims and XPUPorts to a namespace; "" means all.
	Namespace string
	// Fallback is the namespace that is read if the user may not read all.
	Fallback string
	// State asks the agent of a node, and Explain explains a pod.
	State   func(ctx context.Context, node string) (*nodestate.State, error)
	Explain func(ctx context.Context, pod types.NamespacedName) (*explain.Pod, error)
	// Now is the clock.
	Now func() time.Time
	// Pause is the least time between two looks at what has changed.
	Pause time.Duration
}

// Times.
const (
	// DefaultPause lets people read, and a burst of changes come in one.
	DefaultPause = 500 * time.Millisecond
	// refresh is how often sentences are made anew that depend on the time, such as "has not run
	// for 5m".
	refresh = 30 * time.Second
	// requestTimeout bounds what one request asks of the cluster.
	requestTimeout = 30 * time.Second
)

// Dashboard serves the page.
type Dashboard struct {
	options Options
	token   string
	wake    chan struct{}
	builder *builder
	watched []*source
	agents  *asker

	mu       sync.Mutex
	current  snapshot
	replaced chan struct{} // closed when current is replaced
	streams  chan struct{} // bounds the pages that are open
	requests chan struct{} // bounds what is asked of the cluster at the same time
}

// New returns a dashboard with a token of its own, of 130 random bits.
func New(o Options) *Dashboard {
	d := &Dashboard{
		options: o, token: rand.Text(), wake: make(chan struct{}, 1),
		replaced: make(chan struct{}),
		streams:  make(chan struct{}, maxStreams), requests: make(chan struct{}, maxRequests),
	}

	d.watched = newSources(o, d.changed)
	d.agents = newAsker(o.State, o.Now, d.changed)
	d.builder = &builder{sources: d.watched, reader: newReader(d.watched), agents: d.agents,
		namespace: o.AgentNamespace, now: o.Now}
	return d
}

// Listen listens on the loopback interface. Port 0 is any free one. It takes IPv6 only on a machine
// without IPv4. If another program has the port there, a browser that is sent to the port by its
// number, as through ssh, would give the token to that program.
func Listen(port int) (net.Listener, error) {
	l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", port))
	if errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EAFNOSUPPORT) {
		return net.Listen("tcp6", fmt.Sprintf("[::1]:%d", port))
	}
	return l, err
}

// URL returns the page's address, with the token.
func (d *Dashboard) URL(l net.Listener) string {
	return "http://" + l.Addr().String() + "/" + d.token + "/"
}

// Serve serves the page until ctx ends, and follows the cluster meanwhile.
func (d *Dashboard) Serve(ctx context.Context, l net.Listener) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()

	var parts sync.WaitGroup
	defer parts.Wait()
	for _, s := range d.watched {
		parts.Go(func() { s.run(ctx, d.options.Client) })
	}
	parts.Go(func() { d.follow(ctx) })

	server := &http.Server{
		Handler:           d.handler(l.Addr().String()),
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       10 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	parts.Go(func() {
		<-ctx.Done()
		_ = server.Close()
	})

	err := server.Serve(netutil.LimitListener(l, maxConnections))
	stop()
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// changed wakes follow.
func (d *Dashboard) changed() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// follow makes a new snapshot when something has changed.
func (d *Dashboard) follow(ctx context.Context) {
	clock := time.NewTicker(refresh)
	defer clock.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-clock.C:
		case <-d.wake:
		}

		begin := time.Now()
		d.update(ctx)
		// A large cluster takes at most a fifth of a processor.
		pause := max(d.options.Pause, 4*time.Since(begin))
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

func (d *Dashboard) update(ctx context.Context) {
	all := d.builder.build(ctx)
	if d.builder.overview.Direct {
		d.agents.follow(ctx, d.pods(agentPods), d.pods("pods"))
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	next, changed, err := encode(all, d.current)
	if err != nil || !changed {
		return
	}
	d.current = next
	close(d.replaced)
	d.replaced = make(chan struct{})
}

// snapshot returns what there is to show, and a channel that is closed when that is outdated.
func (d *Dashboard) snapshot() (snapshot, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.current, d.replaced
}

// pods returns the pods of a source.
func (d *Dashboard) pods(name string) []*corev1.Pod {
	var pods []*corev1.Pod
	for _, s := range d.watched {
		if s.name != name {
			continue
		}
		found, _ := s.sorted("")
		for _, o := range found {
			pods = append(pods, o.(*corev1.Pod))
		}
	}
	return pods
}
