// SPDX-License-Identifier: Apache-2.0

// Package nri attaches a pod's Functions when the container runtime has made the pod's network
// namespace, and detaches them when the sandbox stops. The runtime reports both through the Node
// Resource Interface.
package nri

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

const (
	pluginName = "xpu-agent"
	// pluginIndex orders the plugin after the plugins that set up the pod's own network.
	pluginIndex = "50"
	// stopTimeout is how long the agent tries to take back a sandbox's Functions after its end.
	// After that, Unprepare or the next sweep does it.
	stopTimeout = time.Minute
	// ownClaim says what to do about a claim that several pods share.
	ownClaim = "an interface can be in one pod only: give each pod its own claim, by a " +
		"ResourceClaimTemplate"
)

// Lifecycle moves Functions into sandboxes and back. [lifecycle.Manager] implements it.
type Lifecycle interface {
	Attach(ctx context.Context, id function.ID, sandbox lifecycle.Sandbox) (netdev.Observed, error)
	Detach(ctx context.Context, id function.ID, sandbox string) error
}

// Plugin is the agent's side of NRI. Claimed is optional.
type Plugin struct {
	// Socket is the runtime's socket, /var/run/nri/nri.sock.
	Socket    string
	Journal   *journal.Journal
	Lifecycle Lifecycle
	// Claimed, if set, returns the Functions that the kubelet has given to a pod for ResourceClaims
	// of this project's driver. It is needed because the kubelet prepares a claim that several pods
	// share for the first of them only.
	Claimed func(ctx context.Context, namespace, pod string) ([]function.ID, error)
	// Report queues a write of the claim's status after its Functions were attached.
	Report func(journal.Claim)
	Log    logr.Logger

	// connected reports whether the runtime calls the plugin. changes signals each change of it.
	connected atomic.Bool
	changes   notify.Signal

	// background is the work that continues after the reply to the runtime. It ends with ctx, which
	// is the context of Run.
	background sync.WaitGroup
	ctx        context.Context
	// catchingUp ends the work of the last Synchronize. Only Synchronize uses it, and there is one
	// call at a time.
	catchingUp context.CancelFunc

	mutex    sync.Mutex
	attempts map[string]*attempt // by sandbox
}

// Connected reports whether the runtime calls the plugin.
func (p *Plugin) Connected() bool { return p.connected.Load() }

// AwaitConnected returns nil once the runtime calls the plugin, and an error if ctx ends first.
func (p *Plugin) AwaitConnected(ctx context.Context) error {
	if err := loop.Until(ctx, p.changes.Subscribe, p.Connected); err != nil {
		return fmt.Errorf("not connected to the container runtime at %s: the pod would start "+
			"without its interface; "+
			"turn NRI on in the runtime", p.Socket)
	}
	return nil
}

func (p *Plugin) setConnected(connected bool) {
	p.connected.Store(connected)
	p.changes.Notify()
}

// Run keeps a connection to the runtime until ctx ends. It connects again when the runtime was
// restarted.
func (p *Plugin) Run(ctx context.Context) error {
	defer p.background.Wait()
	p.ctx = ctx
	loop.Retry(ctx, 50*time.Millisecond, 3*time.Second, func(ctx context.Context) error {
		err := p.connect(ctx)
		p.setConnected(false)
		return err
	}, func(err error, pause time.Duration) {
		p.Log.Error(err, "No connection to the container runtime, pods with Functions cannot "+
			"start; trying again",
			"socket", p.Socket, "retry", pause.String())
	})

	return nil
}

// connect serves the runtime until the connection ends.
func (p *Plugin) connect(ctx context.Context) error {
	ended, end := context.WithCancel(context.Background())
	defer end()

	s, err := stub.New(p,
		stub.WithDialer(func(socket string) (net.Conn, error) {
			conn, err := net.Dial("unix", socket)
			return &endingConn{Conn: conn, ended: end}, err
		}),
		stub.WithPluginName(pluginName),
		stub.WithPluginIdx(pluginIndex),
		stub.WithSocketPath(p.Socket),
		stub.WithLogger(logger{p.Log.V(1)}),
		// Without this option, the stub ends the process when the connection ends.
		stub.WithOnClose(func() {}),
	)

	if err != nil {
		return fmt.Errorf("NRI plugin: %w", err)
	}
	// If a runtime ends after it registered the plugin and before it configured it, the stub waits
	// for the configuration for ever.
	defer context.AfterFunc(ended, func() {
		_, _ = s.(api.PluginService).Configure(ctx, &api.ConfigureRequest{})
	})()

	return s.Run(ctx)
}

// endingConn calls ended when no more data can be read from a connection that the runtime has used.
// The runtime sends data only after the plugin asked to be registered. Before that, the stub is not
// ready to be configured.
type endingConn struct {
	net.Conn
	used  bool // Read is called by one goroutine
	ended func()
}

func (c *endingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.used = c.used || n > 0
	if err != nil && c.used {
		c.ended()
	}
	return n, err
}

// Synchronize returns at once, because the runtime gives it no more time than other calls. The work
// that was missed continues in the background.
func (p *Plugin) Synchronize(
	_ context.Context, pods []*api.PodSandbox, _ []*api.Container,
) ([]*api.ContainerUpdate, error) {
	p.Log.Info("Connected to the container runtime", "socket", p.Socket, "sandboxes", len(pods))
	if p.catchingUp != nil {
		p.catchingUp()
	}

	ctx, cancel := context.WithCancel(p.ctx)
	p.catchingUp = cancel
	p.catchUp(ctx, pods)

	p.setConnected(true)
	return nil, nil
}

// catchUp begins the work that was missed while the agent or the runtime did not run. It takes back
// the Functions of sandboxes that have ended, and attaches the Functions of sandboxes that have
// started. No sandbox waits for another one.
//
// All is decided before catchUp returns, because the runtime's list is valid only until then: the
// runtime reports later starts and stops of sandboxes by calls.
func (p *Plugin) catchUp(ctx context.Context, pods []*api.PodSandbox) {
	for sandbox, before := range p.ended(pods) {
		p.background.Go(func() {
			before.end()
			p.detachEnded(ctx, sandbox)
		})
	}

	for _, pod := range pods {
		// without a network namespace, the sandbox is being stopped
		if networkNamespace(pod) != "" {
			p.begin(ctx, pod, true)
		}
	}
}

// ended cancels all attempts from before the connection. It returns the sandboxes that the agent
// knows and the runtime's list lacks, with their attempts, which may be nil.
func (p *Plugin) ended(pods []*api.PodSandbox) map[string]*attempt {
	p.mutex.Lock()
	ended := maps.Clone(p.attempts)
	p.mutex.Unlock()

	if ended == nil {
		ended = map[string]*attempt{}
	}
	for _, a := range ended {
		a.cancel()
	}

	for _, a := range p.Journal.All() {
		if _, known := ended[a.Sandbox]; !known && a.Sandbox != "" {
			ended[a.Sandbox] = nil
		}
	}
	for _, pod := range pods {
		delete(ended, pod.GetId())
	}

	return ended
}

// detachEnded takes back the Functions of a sandbox that has ended.
func (p *Plugin) detachEnded(ctx context.Context, sandbox string) {
	var group sync.WaitGroup
	for _, a := range p.Journal.All() {
		// The sandbox of a CNI request may be unknown to NRI. Its DEL comes, or came already.
		if a.Sandbox != sandbox || a.CNI != nil {
			continue
		}

		group.Go(func() {
			if err := p.Lifecycle.Detach(ctx, a.Function, a.Sandbox); err != nil {
				p.Log.Error(err, "Function of an ended sandbox is not back yet",
					"function", a.Function.String(), "pod", klog.KRef(a.Pod.Namespace, a.Pod.Name))
			}
		})
	}

	group.Wait()
}

func (p *Plugin) log(pod *api.PodSandbox) logr.Logger {
	return p.Log.WithValues("pod", klog.KRef(pod.GetNamespace(), pod.GetName()))
}

// RunPodSandbox attaches the pod's Functions. If it returns an error, the pod does not start. The
// kubelet shows the error in the pod's events and tries again with a new sandbox. If the time is
// over before there is an error, the sandbox starts and keeps what it has. The other Functions are
// attached afterwards, and until then CreateContainer refuses the pod's containers.
func (p *Plugin) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	answering, cancel := answerContext(ctx)
	defer cancel()

	a := p.begin(p.ctx, pod, false)
	select {
	case <-a.tried:
	case err := <-a.failed:
		return p.giveUp(answering, pod, err)
	case <-answering.Done():
	}

	a.retries.Store(true) // This must come before the last check for an error.
	select {
	case err := <-a.failed:
		return p.giveUp(answering, pod, err)
	case <-a.tried:
	default:
		p.log(pod).Info("The pod's Functions are still being attached; its containers have to wait")
	}

	return nil
}

// giveUp ends the attempt for a sandbox that must not start, and takes back its Functions. It
// returns the reason.
func (p *Plugin) giveUp(answering context.Context, pod *api.PodSandbox, reason error) error {
	p.log(pod).Error(reason, "Functions cannot be attached")
	p.takeBack(answering, pod)
	return reason
}

// answerContext returns a context that ends after three quarters of the time that the runtime gives
// for a call (2 s by default). A runtime that gets no reply in time closes the connection to the
// plugin, and starts the pod without its interfaces.
func answerContext(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, limited := ctx.Deadline()
	if !limited {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-time.Until(deadline)/4))
}

// CreateContainer refuses a container of a pod that lacks a Function of its claims, and says why.
// The runtime would refuse it too, but would say only that a CDI file is missing.
//
// It waits for the end of the first try to attach the Functions, but only once for each
// sandbox, because the runtime makes no other call in the meantime, for any pod. The kubelet
// repeats the call.
func (p *Plugin) CreateContainer(
	ctx context.Context, pod *api.PodSandbox, container *api.Container,
) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	answering, cancel := answerContext(ctx)
	defer cancel()

	a := p.attempt(pod.GetId())
	if _, missing := p.missing(pod, container); missing && a != nil &&
		a.waited.CompareAndSwap(false, true) {
		select {
		case <-a.tried:
		case <-answering.Done():
		}
	}

	if record, missing := p.missing(pod, container); missing {
		return nil, nil, p.refuse(pod, container, record, a)
	}

	return nil, nil, nil
}

// missing returns a Function that must be attached to the pod before the container starts, if there
// is one.
func (p *Plugin) missing(
	pod *api.PodSandbox, container *api.Container,
) (a journal.Attachment, missing bool) {
	for _, a := range p.Journal.ByPod(types.UID(pod.GetUid())) {
		if a.Claim.UID != "" && !isAttached(a, pod) {
			return a, true
		}
	}

	for _, device := range container.GetCDIDevices() {
		uid, id, isOurs := claim.ParseCDIDevice(device.GetName())
		if a, _ := p.Journal.Get(id); isOurs && (a.Claim.UID != uid || !isAttached(a, pod)) {
			return a, true
		}
	}

	return journal.Attachment{}, false
}

func isAttached(a journal.Attachment, pod *api.PodSandbox) bool {
	return a.State == journal.Attached && a.Sandbox == pod.GetId()
}

func (p *Plugin) refuse(
	pod *api.PodSandbox, container *api.Container, record journal.Attachment, tries *attempt,
) error {
	err := fmt.Errorf("container %s of pod %s/%s: Function %s of its claim %s is not attached to "+
		"the pod",
		container.GetName(), pod.GetNamespace(), pod.GetName(), record.Function, record.Claim.Name)
	if record.Sandbox != "" && record.Sandbox != pod.GetId() {
		err = fmt.Errorf("%w: pod %s/%s has it; %s", err, record.Pod.Namespace,
			record.Pod.Name, ownClaim)
	} else if reason := tries.err(record.Function); reason != nil {
		err = fmt.Errorf("%w: %w", err, reason)
	}

	p.Log.Error(err, "Container must not start")
	return err
}

// StopPodSandbox takes the pod's Functions back. If this takes longer than the runtime waits, it
// continues after the reply. The runtime does not repeat the call. If it fails, the Functions are
// taken back by Unprepare, which the kubelet repeats.
func (p *Plugin) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	answering, cancel := answerContext(ctx)
	defer cancel()
	p.takeBack(answering, pod)
	return nil
}

// takeBack returns when the pod's Functions are back, or when answering ends. In that case it
// continues in the background.
func (p *Plugin) takeBack(answering context.Context, pod *api.PodSandbox) {
	back := make(chan struct{})
	p.background.Go(func() {
		defer close(back)
		ctx, cancel := context.WithTimeout(p.ctx, stopTimeout)
		defer cancel()
		p.attempt(pod.GetId()).end()
		if err := p.detach(ctx, pod); err != nil {
			p.log(pod).Error(err, "Functions are not back yet")
		}
	})

	select {
	case <-back:
	case <-answering.Done():
	}
}

// RemovePodSandbox takes back the Functions of a sandbox whose stop was missed.
func (p *Plugin) RemovePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.StopPodSandbox(ctx, pod)
}

// sharedClaims returns the Functions of the pod's claims that were prepared for another pod. This
// pod shares the claim, or has ended. The kubelet calls Prepare for the first pod only.
func (p *Plugin) sharedClaims(ctx context.Context, pod *api.PodSandbox) []journal.Attachment {
	preparedForOther := func(a journal.Attachment) bool {
		return a.Claim.UID != "" && a.Claim.Namespace == pod.GetNamespace() &&
			a.Pod.UID != types.UID(pod.GetUid()) &&
			a.CNI == nil && a.State != journal.Releasing
	}

	if p.Claimed == nil || !slices.ContainsFunc(p.Journal.All(), preparedForOther) {
		return nil
	}

	claimed, err := p.Claimed(ctx, pod.GetNamespace(), pod.GetName())
	if err != nil {
		p.log(pod).Error(err,
			"Cannot tell whether the pod shares a claim; if it does, its containers cannot start")
		return nil
	}

	var list []journal.Attachment
	for _, id := range claimed {
		if a, exists := p.Journal.Get(id); exists && preparedForOther(a) {
			list = append(list, a)
		}
	}

	return list
}

// detach takes back the Functions that the pod has by claims, in parallel. Functions of CNI
// requests are released by their DEL.
func (p *Plugin) detach(ctx context.Context, pod *api.PodSandbox) error {
	attachments := slices.DeleteFunc(p.Journal.ByPod(types.UID(pod.GetUid())),
		func(a journal.Attachment) bool { return a.Claim.UID == "" })
	errs := make([]error, len(attachments))
	var group errgroup.Group
	group.SetLimit(parallelMoves)

	for i, a := range attachments {
		group.Go(func() error {
			if err := p.Lifecycle.Detach(ctx, a.Function, pod.GetId()); err != nil {
				errs[i] = fmt.Errorf("pod %s/%s, claim %s: %w", pod.GetNamespace(), pod.GetName(),
					a.Claim.Name, err)
			}
			return nil
		})
	}

	_ = group.Wait() // the errors are in errs
	return errors.Join(errs...)
}

// networkNamespace returns the path of the pod's network namespace, or "" if the pod has none of
// its own.
func networkNamespace(pod *api.PodSandbox) string {
	for _, namespace := range pod.GetLinux().GetNamespaces() {
		if namespace.GetType() == "network" {
			return namespace.GetPath()
		}
	}
	return ""
}

// logger passes the log of the NRI library to this project's log, as details.
type logger struct{ log logr.Logger }

func (l logger) Debugf(_ context.Context, format string, args ...any) { l.info(1, format, args) }
func (l logger) Infof(_ context.Context, format string, args ...any)  { l.info(0, format, args) }
func (l logger) Warnf(_ context.Context, format string, args ...any)  { l.info(0, format, args) }
func (l logger) Errorf(_ context.Context, format string, args ...any) { l.info(0, format, args) }

func (l logger) info(level int, format string, args []any) {
	l.log.V(level).Info(fmt.Sprintf(format, args...))
}
