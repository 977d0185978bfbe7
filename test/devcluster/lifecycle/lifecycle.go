// SPDX-License-Identifier: Apache-2.0

// Package lifecycle starts and ends development clusters from the machine.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/artifact"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/cgroup"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/cluster"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/control"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/network"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/process"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

// downLimit bounds the end of a cluster.
const downLimit = time.Minute

// File descriptors that a supervisor inherits.
const (
	fdAPI    = 3 + iota // listener for the API server, in the machine's network namespace
	fdEvents            // receives the events of the start
	fdGo                // one byte means that the cluster's record is complete
)

// Manager starts and ends the clusters of a store.
type Manager struct {
	Store state.Store
	Log   io.Writer // progress, one line per stage
}

// Options configure a cluster.
type Options struct {
	Nodes     int
	Multus    bool // as the nodes' CNI plugin
	KubeProxy bool // runs on the nodes
}

// Up starts a cluster and returns when all of its nodes are Ready. If it fails, it leaves nothing
// behind.
func (m Manager) Up(ctx context.Context, name string, o Options, artifacts artifact.Set) error {
	if o.Nodes < 1 || o.Nodes > network.MaxNodes {
		return fmt.Errorf("cluster %s: %d nodes: want 1 to %d", name, o.Nodes, network.MaxNodes)
	}

	dir, unlock, err := m.Store.Lock(name)
	if err != nil {
		return err
	}
	defer unlock()

	if old, err := state.ReadRecord(dir); err == nil && old.Leader.Alive() {
		return fmt.Errorf("cluster %s: is up already", name)
	}
	// Remove what a crash of the machine may have left.
	if err := m.clear(dir, name); err != nil {
		return err
	}

	start := time.Now()
	record := state.Record{
		Name:              name,
		KubernetesVersion: artifacts.KubernetesVersion,
		Nodes:             o.Nodes,
		Multus:            o.Multus,
		KubeProxy:         o.KubeProxy,
		Kubernetes:        artifacts.Kubernetes,
		Runtime:           artifacts.Runtime,
		CRIO:              artifacts.CRIO,
		Plugins:           artifacts.Plugins,
		PauseImage:        artifacts.PauseImage,
	}

	if err := m.supervise(ctx, dir, record); err != nil {
		err = fmt.Errorf("cluster %s: %w", name, err)
		down, cancel := context.WithTimeout(context.WithoutCancel(ctx), downLimit)
		defer cancel()
		return errors.Join(err, m.takeDown(down, dir, name))
	}

	fmt.Fprintf(m.Log, "%6.2fs  cluster %s is up: export KUBECONFIG=%s\n",
		time.Since(start).Seconds(), name, dir.Kubeconfig())
	return nil
}

// supervise starts the supervisor and follows its events until the cluster is up.
func (m Manager) supervise(ctx context.Context, dir state.Dir, record state.Record) error {
	if err := os.MkdirAll(dir.Logs(), 0o700); err != nil {
		return err
	}

	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close()

	record.API = "https://" + listener.Addr().String()
	api, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer api.Close()

	events, report, err := os.Pipe()
	if err != nil {
		return err
	}
	defer events.Close()
	defer report.Close()

	hold, release, err := os.Pipe()
	if err != nil {
		return err
	}
	defer hold.Close()
	defer release.Close()

	cmd, err := spawn(dir, api, report, hold)
	if err != nil {
		return err
	}

	// This reaps the supervisor if it ends first. Normally it outlives this process.
	go cmd.Wait()
	report.Close()
	hold.Close()
	if record.Leader, err = state.NewLeader(cmd.Process.Pid); err != nil {
		return err
	}
	if err := state.WriteRecord(dir, record); err != nil {
		return err
	}
	if _, err := release.Write([]byte{1}); err != nil {
		return err
	}

	stop := context.AfterFunc(ctx, func() { events.Close() })
	defer stop()

	err = control.Follow(events, func(e control.Event) {
		fmt.Fprintf(m.Log, "%6.2fs  %s\n", e.Seconds, e.Stage)
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.Is(err, control.ErrEnded) {
		tail, _ := process.Tail(dir.Log("supervisor"), 15)
		return fmt.Errorf("supervisor %w:\n%s", err, tail)
	}

	return err
}

// spawn starts this program again as PID 1 of new namespaces. A separate session keeps the cluster
// running when the caller's terminal or process group ends.
func spawn(dir state.Dir, api, report, hold *os.File) (*exec.Cmd, error) {
	log, err := process.OpenLog(dir.Log("supervisor"))
	if err != nil {
		return nil, err
	}
	defer log.Close()

	cmd := exec.Command("/proc/self/exe", "run-cluster", string(dir))
	cmd.Args[0] = "devcluster"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{api, report, hold}
	cmd.Dir = "/"
	// The cluster inherits neither proxy settings nor credentials of the caller.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/root", "LANG=C.UTF-8"}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET,
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("supervisor: %w", err)
	}

	return cmd, nil
}

// RunCluster is the supervisor's side of Up. It takes over the file descriptors and waits until the
// cluster's record is complete, so that Down knows every cluster.
func RunCluster(ctx context.Context, dir state.Dir) error {
	api, err := net.FileListener(os.NewFile(fdAPI, "api"))
	if err != nil {
		return fmt.Errorf("inherited listener: %w", err)
	}

	report := control.NewReporter(os.NewFile(fdEvents, "events"))
	hold := os.NewFile(fdGo, "go")
	if _, err := io.ReadFull(hold, make([]byte, 1)); err != nil {
		return fmt.Errorf("the command that started this ended before the cluster was recorded: %w",
			err)
	}

	hold.Close()
	return cluster.Run(ctx, dir, api, report)
}

// Down ends a cluster and removes everything that is left of it. It succeeds for a cluster that
// does not exist.
func (m Manager) Down(ctx context.Context, name string) error {
	dir, err := m.Store.Dir(name)
	if err != nil {
		return err
	}
	if _, err := os.Stat(string(dir)); errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(m.Log, "cluster %s: not there\n", name)
		return nil
	}

	_, unlock, err := m.Store.Lock(name)
	if err != nil {
		return err
	}
	defer unlock()

	ctx, cancel := context.WithTimeout(ctx, downLimit)
	defer cancel()

	if err := m.takeDown(ctx, dir, name); err != nil {
		return fmt.Errorf("cluster %s: %w", name, err)
	}

	fmt.Fprintf(m.Log, "cluster %s: down\n", name)
	return nil
}

func (m Manager) takeDown(ctx context.Context, dir state.Dir, name string) error {
	record, err := state.ReadRecord(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}

	// Without a record no supervisor has created anything, see RunCluster.
	if err == nil {
		if err := record.Leader.Kill(ctx); err != nil {
			return err
		}
	}

	if err := m.clear(dir, name); err != nil {
		return err
	}
	if err := os.Remove(string(dir)); err != nil {
		return err
	}

	// Parent directories created by Up are removed too, unless they contain other clusters.
	if os.Remove(m.Store.Root) == nil && m.Store.Root == state.DefaultRoot {
		_ = os.Remove(filepath.Dir(m.Store.Root))
	}

	return nil
}

// clear removes the control groups and the files of a cluster whose processes have ended. It keeps
// the directory itself, which is the lock.
func (m Manager) clear(dir state.Dir, name string) error {
	if err := cgroup.New(cluster.CgroupRoot, name).RemoveAll(downLimit / 2); err != nil {
		return err
	}

	entries, err := os.ReadDir(string(dir))
	if err != nil {
		return err
	}

	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(string(dir), e.Name())); err != nil {
			return err
		}
	}

	return nil
}
