// Package nri hears from the container runtime when a pod's network namespace is made and when it ends, through the
// Node Resource Interface, and attaches and detaches the pod's Functions at those moments.
package nri

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
)

const (
	pluginName = "xpu-agent"
	// pluginIndex is the plugin's place among others: after those that set up the pod's own network.
	pluginIndex = "50"
)

// Journal knows which Functions are reserved for pods.
type Journal interface {
	All() []journal.Attachment
	ByPod(uid types.UID) []journal.Attachment
}

// Lifecycle takes Functions into pods and back.
type Lifecycle interface {
	Attach(ctx context.Context, id inventory.ID, sandbox lifecycle.Sandbox) (link.Observed, error)
	// Detach takes the Function back when its sandbox ends; the reservation stays.
	Detach(ctx context.Context, id inventory.ID, sandbox string) error
}

// Reporter tells the user what was attached.
type Reporter interface {
	Report(journal.Claim)
}

// Plugin is the agent's side of NRI.
type Plugin struct {
	// Socket is the runtime's, /var/run/nri/nri.sock.
	Socket    string
	Journal   Journal
	Lifecycle Lifecycle
	Reporter  Reporter
	Log       logr.Logger

	connected atomic.Bool
}

// Connected says whether the runtime would call now.
func (p *Plugin) Connected() bool { return p.connected.Load() }

// Run stays connected to the runtime until ctx ends, and connects again when the runtime was restarted.
func (p *Plugin) Run(ctx context.Context) error {
	backoff := wait.Backoff{Duration: 50 * time.Millisecond, Factor: 2, Jitter: 0.1, Steps: 7, Cap: 3 * time.Second}
	err := backoff.DelayWithReset(clock.RealClock{}, 30*time.Second).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := p.connect(ctx)
		p.connected.Store(false)
		if ctx.Err() == nil {
			p.Log.Error(err, "No connection to the container runtime, pods with Functions cannot start; trying again", "socket", p.Socket)
		}
		return false, nil
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// connect serves the runtime until the connection ends.
func (p *Plugin) connect(ctx context.Context) error {
	s, err := stub.New(p,
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
	return s.Run(ctx)
}

// Synchronize catches up after the agent or the runtime was away: Functions of sandboxes that ended meanwhile are
// taken back, and those of sandboxes that started meanwhile are attached, late.
func (p *Plugin) Synchronize(ctx context.Context, pods []*api.PodSandbox, _ []*api.Container) ([]*api.ContainerUpdate, error) {
	p.connected.Store(true)
	p.Log.Info("Connected to the container runtime", "socket", p.Socket, "sandboxes", len(pods))
	running := map[string]bool{}
	for _, pod := range pods {
		running[pod.GetId()] = true
	}
	for _, a := range p.Journal.All() {
		// What a CNI request attached may be in a sandbox that the runtime does not tell NRI of; its DEL comes, or did.
		if a.Sandbox == "" || running[a.Sandbox] || a.CNI != nil {
			continue
		}
		if err := p.Lifecycle.Detach(ctx, a.Function, a.Sandbox); err != nil {
			p.Log.Error(err, "Function of an ended sandbox is not back yet", "function", a.Function.String(), "pod", klog.KRef(a.Pod.Namespace, a.Pod.Name))
		}
	}
	for _, pod := range pods {
		if networkNamespace(pod) == "" {
			continue // it is being stopped
		}
		if err := p.attach(ctx, pod); err != nil {
			p.Log.Error(err, "Pod runs without an interface that it claimed", "pod", klog.KRef(pod.GetNamespace(), pod.GetName()))
		}
	}
	return nil, nil
}

// RunPodSandbox attaches the pod's Functions. An error keeps the pod from starting; the kubelet shows it in the pod's
// events and tries again with a new sandbox.
func (p *Plugin) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	attaching, cancel := leaveTimeToAnswer(ctx)
	defer cancel()
	err := p.attach(attaching, pod)
	if err == nil {
		return nil
	}
	p.Log.Error(err, "Functions cannot be attached", "pod", klog.KRef(pod.GetNamespace(), pod.GetName()))
	return errors.Join(err, p.detach(ctx, pod))
}

// leaveTimeToAnswer ends a quarter of the time early that the runtime gives for a call (2 s by default). A runtime that
// has no answer in time takes the plugin for broken, not the pod: it closes the connection and starts the pod without
// its interfaces.
func leaveTimeToAnswer(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, limited := ctx.Deadline()
	if !limited {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-time.Until(deadline)/4))
}

// StopPodSandbox takes the pod's Functions back. Runtimes do not retry it: what fails here is done by Unprepare, which
// the kubelet does retry.
func (p *Plugin) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	if err := p.detach(ctx, pod); err != nil {
		p.Log.Error(err, "Functions are not back yet", "pod", klog.KRef(pod.GetNamespace(), pod.GetName()))
	}
	return nil
}

// RemovePodSandbox is heard even where StopPodSandbox was not.
func (p *Plugin) RemovePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.StopPodSandbox(ctx, pod)
}

// attach leaves what is a CNI request's to that: the runtime made it before it made this call.
func (p *Plugin) attach(ctx context.Context, pod *api.PodSandbox) error {
	attachments := slices.DeleteFunc(p.Journal.ByPod(types.UID(pod.GetUid())),
		func(a journal.Attachment) bool { return a.CNI != nil })
	if len(attachments) == 0 {
		return nil
	}
	netns := networkNamespace(pod)
	if netns == "" {
		return fmt.Errorf("pod %s/%s has a claim to a Function but uses the node's network: take hostNetwork away", pod.GetNamespace(), pod.GetName())
	}
	sandbox := lifecycle.Sandbox{ID: pod.GetId(), NetNS: netns, Pod: journal.Pod{
		Namespace: pod.GetNamespace(), Name: pod.GetName(), UID: types.UID(pod.GetUid()),
	}}
	claims := map[journal.Claim]bool{}
	for _, a := range attachments {
		if _, err := p.Lifecycle.Attach(ctx, a.Function, sandbox); err != nil {
			return fmt.Errorf("pod %s/%s, claim %s: %w", pod.GetNamespace(), pod.GetName(), a.Claim.Name, err)
		}
		claims[journal.Claim{Namespace: a.Claim.Namespace, Name: a.Claim.Name, UID: a.Claim.UID}] = true
	}
	for c := range claims {
		p.Reporter.Report(c)
	}
	return nil
}

func (p *Plugin) detach(ctx context.Context, pod *api.PodSandbox) error {
	var errs []error
	for _, a := range p.Journal.ByPod(types.UID(pod.GetUid())) {
		if a.Claim.UID == "" {
			continue // the CNI plugin's DEL releases it
		}
		if err := p.Lifecycle.Detach(ctx, a.Function, pod.GetId()); err != nil {
			errs = append(errs, fmt.Errorf("pod %s/%s, claim %s: %w", pod.GetNamespace(), pod.GetName(), a.Claim.Name, err))
		}
	}
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

func (l logger) Debugf(_ context.Context, format string, args ...any) {
	l.log.V(1).Info(fmt.Sprintf(format, args...))
}
func (l logger) Infof(_ context.Context, format string, args ...any) {
	l.log.Info(fmt.Sprintf(format, args...))
}
func (l logger) Warnf(_ context.Context, format string, args ...any) {
	l.log.Info(fmt.Sprintf(format, args...))
}
func (l logger) Errorf(_ context.Context, format string, args ...any) {
	l.log.Info(fmt.Sprintf(format, args...))
}
