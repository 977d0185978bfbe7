// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/artifact"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/cgroup"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/component"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/control"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/network"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/node"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/pki"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/process"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

// cgroupLimit bounds the wait for the kernel to release control groups of dead processes.
const cgroupLimit = 10 * time.Second

// member is the supervisor's view of a node.
type member struct {
	table  *process.Table
	groups cgroup.Tree
	config node.Config
	number int
	dir    state.NodeDir
	client *control.Client

	// change is held while the node is started or stopped.
	change sync.Mutex

	mu        sync.Mutex
	init      *process.Process // nil before the first start
	state     string
	connected bool
}

func newMember(table *process.Table, groups cgroup.Tree, record state.Record, number int) *member {
	name := fmt.Sprintf("node%d", number)
	id := sha256.Sum256([]byte("devcluster/" + record.Name + "/" + name))
	return &member{
		table:  table,
		groups: groups,
		number: number,
		dir:    own.Node(name),
		client: control.NewClient(own.Node(name).Socket()),
		state:  control.NodeStopped,
		config: node.Config{
			Node: component.Node{
				Name:       name,
				Address:    network.NodeAddress(number),
				PodSubnet:  network.PodSubnet(number),
				CgroupRoot: groups.Node(name),
				PauseImage: artifact.PauseImage,
				Multus:     record.Multus,
				KubeProxy:  record.KubeProxy,
				CRIO:       record.CRIO,
			},
			MachineID: hex.EncodeToString(id[:16]),
		},
	}
}

// create creates the node's directory and identity, once.
func (m *member) create(authority *pki.Authority) error {
	if err := os.MkdirAll(m.dir.Disk(), 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(m.dir.Logs(), 0o755); err != nil {
		return err
	}
	return issueNode(m.dir, authority, m.config.Name, m.config.Name, m.config.Address)
}

// start starts a stopped node and returns when it is Ready. The kubelet waits for serving, so that
// the rest of the node starts in parallel with the API server.
func (m *member) start(
	ctx context.Context, nodes corev1client.NodeInterface, report *control.Reporter,
	serving <-chan struct{},
) error {
	m.change.Lock()
	defer m.change.Unlock()

	if m.running() {
		return nil
	}

	ctx, cancel := context.WithTimeoutCause(ctx, startLimit,
		fmt.Errorf("not done after %s", startLimit))
	defer cancel()

	m.set(control.NodeStarting)
	err := m.boot(ctx)
	if err == nil {
		err = m.joinCluster(ctx, nodes, serving)
	}

	if err != nil {
		// A partly started node is killed, so that the next start begins from scratch.
		m.kill()
		m.set(control.NodeFailed)
		return m.explain(err)
	}

	m.set(control.NodeRunning)
	if report != nil {
		report.Stage("%s Ready", m.config.Name)
	}

	return nil
}

// boot starts the node's PID 1 and returns when its container runtime is running.
func (m *member) boot(ctx context.Context) error {
	m.config.BootID = uuid.NewString()
	if err := node.WriteConfig(m.dir, m.config); err != nil {
		return err
	}
	if err := m.groups.Create(m.config.Name); err != nil {
		return err
	}

	events, report, err := os.Pipe()
	if err != nil {
		return err
	}
	defer events.Close()

	p, err := m.spawn(report)
	report.Close()
	if err != nil {
		return err
	}

	m.mu.Lock()
	m.init, m.connected = p, true
	m.mu.Unlock()
	if err := network.Attach(m.config.Name, m.number, p.PID); err != nil {
		return err
	}

	ended := make(chan error, 1)
	go func() { ended <- control.Follow(events, func(control.Event) {}) }()

	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m *member) spawn(report *os.File) (*process.Process, error) {
	log, err := process.OpenLog(m.dir.Log("init"))
	if err != nil {
		return nil, err
	}
	defer log.Close()

	cmd := exec.Command("/proc/self/exe", "run-node", string(m.dir))
	cmd.Args[0] = "devcluster"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{report}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	}

	return m.table.Start(m.config.Name, cmd)
}

func (m *member) joinCluster(
	ctx context.Context, nodes corev1client.NodeInterface, serving <-chan struct{},
) error {
	select {
	case <-serving:
	case <-ctx.Done():
		return context.Cause(ctx)
	}

	if err := m.client.Post(ctx, node.PathRestartKubelet, nil, nil); err != nil {
		return err
	}

	if m.config.KubeProxy {
		if err := m.client.Post(ctx, node.PathRestartProxy, nil, nil); err != nil {
			return err
		}
	}

	return nodeReady(ctx, nodes, m.config.Name, m.config.BootID)
}

// explain adds the last log lines of a node that did not start.
func (m *member) explain(err error) error {
	err = fmt.Errorf("%s: %w", m.config.Name, err)
	for _, name := range []string{
		"init", m.config.ContainerRuntime().Name, "kubelet", "kube-proxy",
	} {
		if tail, _ := process.Tail(m.dir.Log(name), tailLines); tail != "" {
			err = fmt.Errorf("%w\nlast lines of the log of %s:\n%s", err, name, tail)
		}
	}

	return err
}

// stop kills every process of the node at once, like a power failure. The disk remains.
func (m *member) stop() error {
	m.change.Lock()
	defer m.change.Unlock()
	m.kill()
	m.set(control.NodeStopped)
	return errors.Join(network.Detach(m.config.Name), m.groups.Remove(m.config.Name, cgroupLimit))
}

// kill ends all processes of the node. When PID 1 of a PID namespace is killed, the kernel kills
// the others, and PID 1 ends last.
func (m *member) kill() {
	m.mu.Lock()
	p := m.init
	m.mu.Unlock()
	if p == nil {
		return
	}
	p.Signal(syscall.SIGKILL)
	<-p.Done()
}

// connect plugs the node's cable in or out.
func (m *member) connect(connected bool) error {
	m.change.Lock()
	defer m.change.Unlock()

	if !m.running() {
		return m.notRunning()
	}
	if err := network.Connect(m.config.Name, connected); err != nil {
		return err
	}

	m.mu.Lock()
	defer m.mu.Unlock()

	m.connected = connected
	return nil
}

// ask sends a request to the node's PID 1.
func (m *member) ask(ctx context.Context, path string, body io.Reader) error {
	if !m.running() {
		return m.notRunning()
	}
	if err := m.client.Post(ctx, path, body, nil); err != nil {
		return fmt.Errorf("%s: %w", m.config.Name, err)
	}
	return nil
}

func (m *member) notRunning() error {
	return fmt.Errorf("%s is not running: start it with devcluster node start %s", m.config.Name,
		m.config.Name)
}

func (m *member) running() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.init != nil && m.init.Running()
}

func (m *member) set(state string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = state
}

// describe returns the data of inspect about the node, except what is known only in the machine's
// PID namespace.
func (m *member) describe(ctx context.Context) control.Node {
	m.mu.Lock()
	n := control.Node{
		Name:      m.config.Name,
		IP:        m.config.Address,
		PodSubnet: m.config.PodSubnet,
		State:     m.state,
		Cgroup:    m.config.CgroupRoot,
		// an empty list, not null, in JSON
		Components: []control.Component{},
		Connected:  m.connected && m.state == control.NodeRunning,
	}

	p := m.init
	m.mu.Unlock()
	if n.State != control.NodeRunning {
		return n
	}
	if err := p.Err(); err != nil {
		n.State, n.Reason = control.NodeFailed, err.Error()
		return n
	}

	var status node.Status
	if err := m.client.Get(ctx, node.PathStatus, &status); err != nil {
		n.Reason = err.Error()
	}

	n.Components = append(n.Components, status.Components...)
	return n
}
