// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// Names in the DaemonSet of xpu-agent.
const (
	agentLabel     = "app.kubernetes.io/name"
	agentName      = "xpu-agent" // value of the label, and name of the container
	agentProgram   = "/xpu-agent"
	AgentNamespace = "xpu-system"
)

// ErrNoAgent is returned for a node without a running agent pod.
var ErrNoAgent = errors.New("no pod of xpu-agent runs there")

// Agents talks to the agents of a cluster. It uses "exec" in their pods, so the user needs the
// right to create pods/exec.
type Agents struct {
	Config    *rest.Config
	Reader    client.Reader
	Namespace string // of the pods of xpu-agent
	// Patience bounds how long an agent may take for its state, because its kubelet may be frozen. 0
	// means [DefaultPatience].
	Patience time.Duration
}

// DefaultPatience is how long an agent may take for its state. A comparison with sriovnet takes some
// seconds.
const DefaultPatience = time.Minute

// Nodes returns the names of the nodes that have an agent, sorted: those with a pod of xpu-agent, which
// may not run, and those with an XPUNode, whose agent may be away. In direct mode there are no
// XPUNodes.
func (a Agents) Nodes(ctx context.Context) ([]string, error) {
	pods, err := a.pods(ctx)
	if err != nil {
		return nil, fmt.Errorf("pods of xpu-agent in namespace %s: %w", a.Namespace, err)
	}

	var known v1alpha1.XPUNodeList
	err = a.Reader.List(ctx, &known)
	if err != nil && !meta.IsNoMatchError(err) && !apierrors.IsForbidden(err) {
		return nil, fmt.Errorf("list XPUNodes: %w", err)
	}

	var nodes []string
	for _, pod := range pods {
		if pod.Spec.NodeName != "" {
			nodes = append(nodes, pod.Spec.NodeName)
		}
	}
	for _, node := range known.Items {
		nodes = append(nodes, node.Name)
	}

	slices.Sort(nodes)
	return slices.Compact(nodes), nil
}

// NoneErr returns the error for a cluster without a running agent. It wraps [ErrNoAgent].
func (a Agents) NoneErr() error { return fmt.Errorf("namespace %s: %w", a.Namespace, ErrNoAgent) }

// State returns the state that the agent of a node reports.
func (a Agents) State(ctx context.Context, node string) (*nodestate.State, error) {
	return a.state(ctx, node, "state")
}

// Verify has the agent of a node compare its inventory with sriovnet, and returns the state of the
// node with the result.
func (a Agents) Verify(ctx context.Context, node string) (*nodestate.State, error) {
	return a.state(ctx, node, "state", "--verify")
}

func (a Agents) state(ctx context.Context, node string, args ...string) (*nodestate.State, error) {
	patience := cmp.Or(a.Patience, DefaultPatience)
	late := fmt.Errorf("agent of node %s: it has not answered within %s", node, patience)
	ctx, cancel := context.WithTimeoutCause(ctx, patience, late)
	defer cancel()

	out, err := a.execute(ctx, node, args...)
	if err != nil {
		// A connection with the deadline of ctx may return its error a moment before ctx ends.
		if deadline, _ := ctx.Deadline(); !time.Now().Before(deadline) {
			<-ctx.Done()
		}
		if context.Cause(ctx) == late {
			return nil, late
		}
		return nil, err
	}

	state, err := nodestate.Decode(out)
	if err != nil {
		return nil, fmt.Errorf("agent of node %s: its answer %w", node, err)
	}
	return state, nil
}

// Release makes the agent of a node give up a hook or end a quarantine, and returns the result as
// one line.
func (a Agents) Release(
	ctx context.Context, node string, r nodestate.Release,
) (outcome string, err error) {
	args := []string{"release", r.Function.String()}
	if r.Hook != "" {
		args = append(args, "--hook="+r.Hook)
	}

	if r.PortGone {
		args = append(args, "--port-gone")
	}

	if r.AsItIs {
		args = append(args, "--as-it-is")
	}

	out, err := a.execute(ctx, node, args...)
	return strings.TrimSpace(string(out)), err
}

// pods returns the pods of agents.
func (a Agents) pods(ctx context.Context) ([]corev1.Pod, error) {
	var pods corev1.PodList
	err := a.Reader.List(ctx, &pods, client.InNamespace(a.Namespace),
		client.MatchingLabels{agentLabel: agentName})
	if err != nil {
		return nil, err
	}
	return pods.Items, nil
}

// execute runs the agent's program in the agent's container, and returns its output.
func (a Agents) execute(ctx context.Context, node string, args ...string) ([]byte, error) {
	pods, err := a.pods(ctx)
	if err != nil {
		return nil, fmt.Errorf("agent of node %s: %w", node, err)
	}

	i := slices.IndexFunc(pods, func(p corev1.Pod) bool {
		return p.Spec.NodeName == node && p.Status.Phase == corev1.PodRunning &&
			p.DeletionTimestamp == nil
	})
	if i < 0 {
		return nil, fmt.Errorf("agent of node %s: namespace %s: %w", node, a.Namespace, ErrNoAgent)
	}

	out, err := a.exec(ctx, pods[i].Name, append([]string{agentProgram}, args...))
	if err != nil {
		return nil, fmt.Errorf("agent of node %s: %w", node, err)
	}

	return out, nil
}

func (a Agents) exec(ctx context.Context, pod string, command []string) ([]byte, error) {
	config := rest.CopyConfig(a.Config)
	config.GroupVersion, config.APIPath = &corev1.SchemeGroupVersion, "/api"
	config.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).
		WithoutConversion()
	api, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, err
	}

	request := api.Post().Resource("pods").Namespace(a.Namespace).Name(pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: agentName, Command: command, Stdout: true, Stderr: true,
		}, scheme.ParameterCodec)

	executor, err := newExecutor(config, request)
	if err != nil {
		return nil, err
	}

	stdout, stderr := limitedBuffer{left: nodestate.MaxMessage}, limitedBuffer{left: maxComplaint}
	if err := executor.StreamWithContext(ctx,
		remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr}); err != nil {
		if said := strings.TrimSpace(stderr.all.String()); said != "" {
			return nil, errors.New(strings.TrimPrefix(said, agentName+": "))
		}
		return nil, err
	}

	return stdout.all.Bytes(), nil
}

// maxComplaint bounds the error output of an agent's program, in bytes.
const maxComplaint = 64 << 10

// limitedBuffer buffers up to left bytes. Writing more is an error, which ends the exec, because an
// agent may never stop writing.
type limitedBuffer struct {
	all  bytes.Buffer
	left int
}

func (l *limitedBuffer) Write(p []byte) (int, error) {
	if len(p) > l.left {
		return 0, errors.New("the answer is too long")
	}
	l.left -= len(p)
	return l.all.Write(p)
}

// newExecutor uses WebSockets. It falls back to SPDY, like kubectl, for API servers and proxies
// without WebSockets.
func newExecutor(config *rest.Config, request *rest.Request) (remotecommand.Executor, error) {
	sockets, err := remotecommand.NewWebSocketExecutor(config, http.MethodGet,
		request.URL().String())
	if err != nil {
		return nil, err
	}

	spdy, err := remotecommand.NewSPDYExecutor(config, http.MethodPost, request.URL())
	if err != nil {
		return nil, err
	}

	return remotecommand.NewFallbackExecutor(sockets, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
}
