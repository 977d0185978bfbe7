// SPDX-License-Identifier: Apache-2.0

// Package nri hears from the container runtime when a pod's network namespace is made and when it
// ends, through the Node Resource Interface, and attaches and detaches the pod's Functions at those
// moments.
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
	pluginName  = "xpu-agent"
	pluginIndex = "50" // after the plugins that set up the pod's own network
	// stopTimeout is how long a sandbox's Functions are taken back after its end. Then Unprepare or
	// the next sweep does it.
	stopTimeout = time.Minute
	// ownClaim says what to do about a claim that several pods share.
	ownClaim = "an interface can be in one pod only: give each pod its own claim, by a " +
		"ResourceClaimTemplate"
)

// Lifecycle takes Functions into sandboxes and back. It is [lifecycle.Manager].
type Lifecycle interface {
	Attach(ctx context.Context, id function.ID, sandbox lifecycle.Sandbox) (netdev.Observed, error)
	Detach(ctx context.Context, id function.ID, sandbox string) error
}

// Plugin is the agent's side of NRI.
type Plugin struct {
	Socket    string // of the runtime, /var/run/nri/nri.sock
	Journal   *journal.Journal
	Lifecycle Lifecycle
	// Claimed, where set, returns the Functions that a pod has by ResourceClaims of this project's
	// driver, as the kubelet says. It is asked because the kubelet prepares a claim that several
	// pods share for the first of them only.
	Claimed func(ctx context.Context, namespace, pod string) ([]function.ID, error)
	Report  func(journal.Claim) // tells the user of a claim what was attached
	Log     logr.Logger

	// connected says whether the runtime would call now. changes wakes those who wait for that.
	connected atomic.Bool
	changes   notify.Signal

	// background is the work that goes on after the runtime has its answer, until ctx ends, which
	// is Run's.
	background sync.WaitGroup
	ctx        context.Context
	// ends what the last Synchronize began; only Synchronize uses it, once at a time
	catchingUp context.CancelFunc

	mutex    sync.Mutex
	attempts map[string]*attempt // by sandbox
}

// Connected says whether the runtime would call now.
func (p *Plugin) Connected() bool { return p.connected.Load() }

// AwaitConnected returns nil once the runtime would call, and an error when ctx ends before.
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

// Run stays connected to the runtime until ctx ends, and connects again when the runtime was
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
		// Without this the stub ends the process when the runtime goes away.
		stub.WithOnClose(func() {}),
	)

	if err != nil {
		return fmt.Errorf("NRI plugin: %w", err)
	}
	// If a runtime ends between registering and configuring the plugin, the stub waits for the
	// configuration for ever.
	defer context.AfterFunc(ended, func() {
		_, _ = s.(api.PluginService).Configure(ctx, &api.ConfigureRequest{})
	})()

	return s.Run(ctx)
}

// endingConn calls a function when nothing more can be read from a connection that the runtime has
// used. A runtime uses it only after the plugin asked to be registered; before that the stub is not
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

// Synchronize answers at once, as the runtime gives it no more time than any other call, and
// catches up in the background.
func (p *Plugin) Synchronize(
	_ context.Context, pods []*api.PodSandbox, _ []*api.Container,
) ([]*api.ContainerUpdate, error) {
	p.Log.Info("Connected to the container runtime", "socket", p.Socket, "sandboxes", len(pods))
	if p.catchingUp != nil {
		p.catchingUp()
	}

	// What was begun for sandboxes of before may be for some that have ended.
	p.mutex.Lock()
	before := slices.Collect(maps.Values(p.attempts))
	p.mutex.Unlock()

	ctx, cancel := context.WithCancel(p.ctx)
	p.catchingUp = cancel
	p.background.Go(func() {
		for _, a := range before {
			a.end()
		}
		p.catchUp(ctx, pods)
	})

	p.setConnected(true)
	return nil, nil
}

// catchUp does what was to be done while the agent or the runtime was away. It takes back the
// Functions of sandboxes that have ended, and then attaches those of sandboxes that have started.
// No pod waits for another one.
func (p *Plugin) catchUp(ctx context.Context, pods []*api.PodSandbox) {
	var group sync.WaitGroup
	for _, a := range p.Journal.All() {
		runs := slices.ContainsFunc(pods, func(pod *api.PodSandbox) bool {
			return pod.GetId() == a.Sandbox
		})
		// What a CNI request attached may be in a sandbox that the runtime does not tell NRI of;
		// its DEL comes, or did.
		if a.Sandbox == "" || runs || a.CNI != nil {
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
	for _, pod := range pods {
		if networkNamespace(pod) != "" && ctx.Err() == nil { // without one it is being stopped
			p.begin(ctx, pod, true)
		}
	}
}

func (p *Plugin) log(pod *api.PodSandbox) logr.Logger {
	return p.Log.WithValues("pod", klog.KRef(pod.GetNamespace(), pod.GetName()))
}

// RunPodSandbox attaches the pod's Functions. An error keeps the pod from starting; the kubelet
// shows it in the pod's events and tries again with a new sandbox. If the time ends before there is
// an error, the sandbox starts and keeps what it has: the rest is attached afterwards, and
// CreateContainer refuses the pod's containers until then.
func (p *Plugin) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	answering, cancel := leaveTimeToAnswer(ctx)
	defer cancel()

	a := p.begin(p.ctx, pod, false)
	select {
	case <-a.tried:
	case err := <-a.failed:
		return p.giveUp(answering, pod, err)
	case <-answering.Done():
	}

	a.goesOn.Store(true) // before it is too late to see a failure
	select {
	case err := <-a.failed:
		return p.giveUp(answering, pod, err)
	case <-a.tried:
	default:
		p.log(pod).Info("The pod's Functions are still being attached; its containers have to wait")
	}

	return nil
}

// giveUp ends what is tried for a sandbox that must not start, and takes back what it has. It
// returns the reason.
func (p *Plugin) giveUp(answering context.Context, pod *api.PodSandbox, reason error) error {
	p.log(pod).Error(reason, "Functions cannot be attached")
	p.takeBack(answering, pod)
	return reason
}

// leaveTimeToAnswer ends when three quarters of the time have passed that the runtime gives for a
// call (2 s by default). A runtime that has no answer in time closes the connection to the plugin
// and starts the pod without its interfaces.
func leaveTimeToAnswer(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, limited := ctx.Deadline()
	if !limited {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-time.Until(deadline)/4))
}

// CreateContainer refuses a container of a pod that has not all that it claimed, and says why. The
// runtime would refuse it too, but say only that there is no CDI file. It waits for the first try
// to attach what is missing, but only once for each sandbox, because the runtime makes no other
// call meanwhile, for any pod. The kubelet asks again.
func (p *Plugin) CreateContainer(
	ctx context.Context, pod *api.PodSandbox, container *api.Container,
) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	answering, cancel := leaveTimeToAnswer(ctx)
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
		uid, id, ours := claim.ParseCDIDevice(device.GetName())
		if a, _ := p.Journal.Get(id); ours && (a.Claim.UID != uid || !isAttached(a, pod)) {
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

// StopPodSandbox takes the pod's Functions back. If that takes longer than the runtime waits, it
// goes on after the answer. The runtime does not call again: what fails here is done by Unprepare,
// which the kubelet repeats.
func (p *Plugin) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	answering, cancel := leaveTimeToAnswer(ctx)
	defer cancel()
	p.takeBack(answering, pod)
	return nil
}

// takeBack returns when the pod's Functions are back, or answering ends; then it goes on in the
// background.
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

// RemovePodSandbox takes the Functions back of a sandbox whose stop was missed.
func (p *Plugin) RemovePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.StopPodSandbox(ctx, pod)
}

// shared are the Functions of claims that the pod has and that were prepared for another pod: one
// that shares the claim, or one that the pod follows. The kubelet calls Prepare for the first pod
// only.
func (p *Plugin) shared(ctx context.Context, pod *api.PodSandbox) []journal.Attachment {
	ofOthers := func(a journal.Attachment) bool {
		return a.Claim.UID != "" && a.Claim.Namespace == pod.GetNamespace() &&
			a.Pod.UID != types.UID(pod.GetUid()) &&
			a.CNI == nil && a.State != journal.Releasing
	}

	if p.Claimed == nil || !slices.ContainsFunc(p.Journal.All(), ofOthers) {
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
		if a, exists := p.Journal.Get(id); exists && ofOthers(a) {
			list = append(list, a)
		}
	}

	return list
}

// detach takes the Functions back that the pod has by claims, side by side. What a CNI request
// attached, its DEL releases.
func (p *Plugin) detach(ctx context.Context, pod *api.PodSandbox) error {
	attachments := slices.DeleteFunc(p.Journal.ByPod(types.UID(pod.GetUid())),
		func(a journal.Attachment) bool { return a.Claim.UID == "" })
	errs := make([]error, len(attachments))
	var group errgroup.Group
	group.SetLimit(atOnce)

	for i, a := range attachments {
		group.Go(func() error {
			if err := p.Lifecycle.Detach(ctx, a.Function, pod.GetId()); err != nil {
				errs[i] = fmt.Errorf("pod %s/%s, claim %s: %w", pod.GetNamespace(), pod.GetName(),
					a.Claim.Name, err)
			}
			return nil
		})
	}

	_ = group.Wait() // all errors count
	return errors.Join(errs...)
}

// networkNamespace is the path of the pod's network namespace, "" if it has none of its own.
func networkNamespace(pod *api.PodSandbox) string {
	for _, namespace := range pod.GetLinux().GetNamespaces() {
		if namespace.GetType() == "network" {
			return namespace.GetPath()
		}
	}
	return ""
}

// logger lets the NRI library log through ours, as details.
type logger struct{ log logr.Logger }

func (l logger) Debugf(_ context.Context, format string, args ...any) { l.info(1, format, args) }
func (l logger) Infof(_ context.Context, format string, args ...any)  { l.info(0, format, args) }
func (l logger) Warnf(_ context.Context, format string, args ...any)  { l.info(0, format, args) }
func (l logger) Errorf(_ context.Context, format string, args ...any) { l.info(0, format, args) }

func (l logger) info(level int, format string, args []any) {
	l.log.V(level).Info(fmt.Sprintf(format, args...))
}
