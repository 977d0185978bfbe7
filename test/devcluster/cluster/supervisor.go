// SPDX-License-Identifier: Apache-2.0

// Package cluster is the supervisor of a development cluster: PID 1 of separate PID, mount and
// network namespaces, which runs the control plane and the nodes. When the supervisor ends, the
// kernel ends all of them, and their mounts and links disappear with the namespaces.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/cgroup"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/component"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/control"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/mount"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/network"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/node"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/pki"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/process"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

// own is the path at which the supervisor sees the cluster's directory.
const own = state.Dir("/run/devcluster/state")

// startLimit bounds each stage of the start. On an idle machine the longest takes 3 s.
const startLimit = 2 * time.Minute

// CgroupRoot is the mount point of the machine's control groups.
const CgroupRoot = "/sys/fs/cgroup"

// Supervisor runs one cluster.
type Supervisor struct {
	record    state.Record
	outside   state.Dir // the cluster's directory on the machine
	table     *process.Table
	authority *pki.Authority
	api       *corev1client.CoreV1Client
	nodes     []*member

	mu         sync.Mutex
	components []*process.Process
}

// Run runs a cluster, in namespaces made for it. dir is the cluster's directory on the machine, and
// api a listener in the machine's network namespace for connections to the API server. Run reports
// every stage of the start. It returns when ctx ends or the start fails.
func Run(ctx context.Context, dir state.Dir, api net.Listener, report *control.Reporter) error {
	s, err := enter(ctx, dir)
	if err == nil {
		go forward(ctx, api, net.JoinHostPort(network.Gateway, "443"))
		err = s.start(ctx, report)
	}

	var listener net.Listener
	if err == nil {
		listener, err = control.Listen(own.Socket())
	}

	report.Finish(err)
	if err != nil {
		return err
	}

	server := &http.Server{Handler: s.handler(), ReadHeaderTimeout: startLimit}
	go server.Serve(listener)
	defer server.Close()

	<-ctx.Done()
	return nil
}

// enter turns the current namespaces, copies of the machine's, into a cluster's.
func enter(ctx context.Context, dir state.Dir) (*Supervisor, error) {
	record, err := state.ReadRecord(dir)
	if err != nil {
		return nil, err
	}
	if err := mount.Private(); err != nil {
		return nil, err
	}
	if err := mount.Proc(); err != nil {
		return nil, err
	}

	if err := mount.FreshRun(map[string]string{
		string(dir):                     string(own),
		record.Kubernetes:               component.Kubernetes,
		record.Runtime:                  component.Runtime,
		record.Plugins:                  component.Plugins,
		filepath.Dir(record.PauseImage): node.Images,
	}); err != nil {
		return nil, err
	}

	for _, d := range []string{own.Logs(), own.PKI(), own.Config(), own.Data()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}

	if err := mount.ShieldSettings(own.Settings()); err != nil {
		return nil, err
	}
	if err := network.SetUpCluster(); err != nil {
		return nil, err
	}

	authority, err := pki.New("devcluster-" + record.Name)
	if err != nil {
		return nil, err
	}

	s := &Supervisor{
		record: record, outside: dir, table: process.NewTable(ctx), authority: authority,
	}
	groups := cgroup.New(CgroupRoot, record.Name)
	for number := 1; number <= record.Nodes; number++ {
		s.nodes = append(s.nodes, newMember(s.table, groups, record, number))
	}

	return s, nil
}

func (s *Supervisor) start(ctx context.Context, report *control.Reporter) error {
	if err := issue(own, s.authority, s.record.Name, s.record.API); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(own.Config(), "audit-policy.yaml"),
		component.AuditPolicy(), 0o600); err != nil {
		return err
	}

	config, err := clientcmd.BuildConfigFromFlags("",
		filepath.Join(own.PKI(), "supervisor.kubeconfig"))
	if err != nil {
		return err
	}
	if s.api, err = corev1client.NewForConfig(config); err != nil {
		return err
	}

	report.Stage("namespaces, network and certificates made")

	group, ctx := errgroup.WithContext(ctx)
	serving := make(chan struct{})
	group.Go(func() error { return s.startControlPlane(ctx, report, serving) })

	for _, m := range s.nodes {
		group.Go(func() error {
			if err := m.create(s.authority); err != nil {
				return err
			}
			return m.start(ctx, s.api.Nodes(), report, serving)
		})
	}

	return group.Wait()
}

// startControlPlane returns when the whole control plane works. It closes serving as soon as the
// API server works.
func (s *Supervisor) startControlPlane(
	ctx context.Context, report *control.Reporter, serving chan<- struct{},
) error {
	plane := component.ControlPlane{
		PKI: own.PKI(), Config: own.Config(), Data: own.Data(), Log: own.Logs(),
		Gangs: component.HasGangs(s.record.KubernetesVersion),
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit,
		fmt.Errorf("not done after %s", startLimit))
	defer cancel()

	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)

	if err := s.launch(plane.Etcd(), fail); err != nil {
		return err
	}
	if err := s.launch(plane.APIServer(), fail); err != nil {
		return err
	}
	if err := healthy(ctx, component.APIServerReady); err != nil {
		return s.explain("kube-apiserver", err)
	}

	report.Stage("etcd and kube-apiserver ready")
	if s.record.Multus {
		// The objects must exist before pods start on nodes.
		if err := s.declareMultus(ctx); err != nil {
			return err
		}
		report.Stage("Multus declared")
	}

	close(serving)
	if err := s.launch(plane.ControllerManager(), fail); err != nil {
		return err
	}
	if err := s.launch(plane.Scheduler(), fail); err != nil {
		return err
	}
	if err := healthy(ctx, component.ControllerManagerHealth); err != nil {
		return s.explain("kube-controller-manager", err)
	}
	if err := healthy(ctx, component.SchedulerHealth); err != nil {
		return s.explain("kube-scheduler", err)
	}
	if err := defaultServiceAccount(ctx, s.api.ServiceAccounts("default")); err != nil {
		return s.explain("kube-controller-manager", err)
	}

	report.Stage("kube-controller-manager and kube-scheduler ready")
	return nil
}

// declareMultus creates the API objects that Multus needs.
func (s *Supervisor) declareMultus(ctx context.Context) error {
	manifest := filepath.Join(own.Config(), "multus.yaml")
	if err := os.WriteFile(manifest, component.MultusObjects(), 0o600); err != nil {
		return err
	}

	log, err := process.OpenLog(own.Log("multus"))
	if err != nil {
		return err
	}
	defer log.Close()

	cmd := exec.Command(component.Kubernetes+"/kubectl", "--kubeconfig="+
		filepath.Join(own.PKI(), "supervisor.kubeconfig"), "apply", "--filename="+manifest)
	cmd.Stdout, cmd.Stderr = log, log
	if err := s.table.Run(ctx, "kubectl apply", cmd); err != nil {
		return s.explain("multus", err)
	}

	return nil
}

// endedError is the error for a component that ended.
type endedError struct {
	component string
	reason    error
}

func (e *endedError) Error() string {
	return "ended while the cluster started: " + e.reason.Error()
}

// launch starts a component of the control plane. If it ends, ended is called, and inspect reports
// it. It is not restarted, because that would hide the failure.
func (s *Supervisor) launch(c component.Command, ended context.CancelCauseFunc) error {
	log, err := process.OpenLog(own.Log(c.Name))
	if err != nil {
		return err
	}
	defer log.Close()

	cmd := exec.Command(c.Path, c.Args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	p, err := s.table.Start(c.Name, cmd)
	if err != nil {
		return err
	}

	s.mu.Lock()
	s.components = append(s.components, p)
	s.mu.Unlock()

	go func() {
		<-p.Done()
		ended(&endedError{component: c.Name, reason: p.Err()})
	}()

	return nil
}

// explain adds the last log lines of the component that failed: of the one that ended, if any did.
func (s *Supervisor) explain(name string, err error) error {
	var ended *endedError
	if errors.As(err, &ended) {
		name, err = ended.component, ended
	}
	tail, readErr := process.Tail(own.Log(name), tailLines)
	return errors.Join(fmt.Errorf("%s: %w\nlast lines of its log:\n%s", name, err, tail), readErr)
}

// tailLines is how many log lines are added to an error.
const tailLines = 20
