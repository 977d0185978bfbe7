// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/component"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/control"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/image"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/process"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

const (
	// startLimit bounds the start of a program on the node.
	startLimit = 30 * time.Second
	// stopGrace is how long a program may take to stop by itself.
	stopGrace = 10 * time.Second
	// probeEvery is the polling interval for a starting program, which sends no event when it is
	// ready.
	probeEvery = 20 * time.Millisecond
)

// Paths of the node's control socket.
const (
	PathStatus         = "/v1/status"
	PathRestartKubelet = "/v1/kubelet/restart" // also starts it
	PathRestartProxy   = "/v1/kube-proxy/restart"
	PathRestartRuntime = "/v1/runtime/restart"
	PathImages         = "/v1/images"
)

// Status is the answer to PathStatus.
type Status struct {
	Components []control.Component `json:"components"`
}

// Node runs the programs of one node.
type Node struct {
	config Config
	table  *process.Table

	// change is held while a program is started or stopped.
	change sync.Mutex

	mu       sync.Mutex
	programs map[string]*process.Process
}

// Run runs a node, in namespaces made for it. dir is the node's directory as seen by the cluster.
// Run reports when its container runtime and its control socket work; the kubelet is started
// through the socket. It returns when ctx ends or the start fails.
func Run(ctx context.Context, dir state.NodeDir, report *control.Reporter) error {
	n, err := boot(ctx, dir)
	if err == nil {
		var listener net.Listener
		if listener, err = control.Listen(Own.Socket()); err == nil {
			server := &http.Server{Handler: n.handler(), ReadHeaderTimeout: startLimit}
			go server.Serve(listener)
			defer server.Close()
		}
	}

	report.Finish(err)
	if err != nil {
		return err
	}

	<-ctx.Done()
	return nil
}

func boot(ctx context.Context, dir state.NodeDir) (*Node, error) {
	config, err := readConfig(dir)
	if err != nil {
		return nil, err
	}
	if err := enter(dir, config); err != nil {
		return nil, err
	}

	fresh, err := provision(config)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(Own.Logs(), 0o755); err != nil {
		return nil, err
	}

	n := &Node{config: config, table: process.NewTable(ctx),
		programs: map[string]*process.Process{}}
	if err := n.restartRuntime(ctx); err != nil {
		return nil, err
	}
	if !fresh {
		return n, nil
	}

	images, err := filepath.Glob(filepath.Join(Images, "*.tar"))
	if err != nil {
		return nil, err
	}

	for _, file := range images {
		if err := n.loadFile(ctx, file); err != nil {
			return nil, err
		}
	}

	return n, os.WriteFile(Own.Provisioned(), nil, 0o600)
}

func (n *Node) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+PathStatus, control.Handler(func(*http.Request) (any, error) {
		return n.status(), nil
	}))
	mux.Handle("POST "+PathRestartKubelet, control.Handler(func(r *http.Request) (any, error) {
		return nil, n.restartKubelet(r.Context())
	}))
	mux.Handle("POST "+PathRestartProxy, control.Handler(func(r *http.Request) (any, error) {
		return nil, n.restartProxy(r.Context())
	}))
	mux.Handle("POST "+PathRestartRuntime, control.Handler(func(r *http.Request) (any, error) {
		return nil, n.restartRuntime(r.Context())
	}))

	mux.Handle("POST "+PathImages, control.Handler(func(r *http.Request) (any, error) {
		return nil,
			n.load(r.Context(), r.Body)
	}))

	return mux
}

func (n *Node) status() Status {
	n.mu.Lock()
	defer n.mu.Unlock()

	var s Status
	names := []string{n.config.ContainerRuntime().Name, "kubelet"}
	if n.config.KubeProxy {
		names = append(names, "kube-proxy")
	}

	for _, name := range names {
		c := control.Component{Name: name}
		if p := n.programs[name]; p == nil {
			c.Reason = "not started"
		} else if err := p.Err(); err != nil {
			c.Reason = err.Error()
		} else {
			c.Running = true
		}

		s.Components = append(s.Components, c)
	}

	return s
}

func (n *Node) restartRuntime(ctx context.Context) error {
	return n.restart(ctx, n.config.ContainerRuntime(), func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", n.config.RuntimeSocket())
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

func (n *Node) restartKubelet(ctx context.Context) error {
	return n.restart(ctx, n.config.Kubelet(), healthy(component.KubeletHealth))
}

// restartProxy returns when the node's rules match the existing Services.
func (n *Node) restartProxy(ctx context.Context) error {
	return n.restart(ctx, n.config.Proxy(), healthy(component.KubeProxyHealth))
}

// healthy returns a check of a health endpoint.
func healthy(url string) func(context.Context) error {
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}

		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}

		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return errors.New(response.Status)
		}

		return nil
	}
}

// restart stops a program if it is running, starts it, and returns when it answers. Containers keep
// running, because they have a parent of their own.
func (n *Node) restart(
	ctx context.Context, c component.Command, answers func(context.Context) error,
) error {
	n.change.Lock()
	defer n.change.Unlock()

	n.mu.Lock()
	old := n.programs[c.Name]
	n.mu.Unlock()

	if old != nil {
		old.Stop(stopGrace)
	}

	p, err := n.start(c)
	if err != nil {
		return err
	}

	var last error
	err = wait.PollUntilContextTimeout(ctx, probeEvery, startLimit, true,
		func(ctx context.Context) (bool, error) {
			if err := p.Err(); err != nil {
				return false, err
			}
			last = answers(ctx)
			return last == nil, nil
		})

	if err != nil && p.Running() {
		return fmt.Errorf("%s does not answer: %w", c.Name, errors.Join(err, last))
	}

	return err
}

func (n *Node) start(c component.Command) (*process.Process, error) {
	log, err := process.OpenLog(Own.Log(c.Name))
	if err != nil {
		return nil, err
	}
	defer log.Close()

	cmd := exec.Command(c.Path, c.Args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	// In a separate session, the program gets no signals from the terminal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	p, err := n.table.Start(c.Name, cmd)
	if err != nil {
		return nil, err
	}

	n.mu.Lock()
	defer n.mu.Unlock()

	n.programs[c.Name] = p
	return p, nil
}

// load imports an image archive. It uses a file, because the archive is read several times.
func (n *Node) load(ctx context.Context, archive io.Reader) error {
	f, err := os.CreateTemp(string(Own), "image-*.tar")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())

	_, err = io.Copy(f, archive)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}

	return n.loadFile(ctx, f.Name())
}

func (n *Node) loadFile(ctx context.Context, file string) error {
	name := ""
	if n.config.CRIO { // skopeo needs to know the format
		var err error
		if name, err = image.Name(file); err != nil {
			return err
		}
	}

	output, err := os.CreateTemp(string(Own), "import-*.log")
	if err != nil {
		return err
	}
	defer os.Remove(output.Name())
	defer output.Close()

	load := n.config.LoadImage(file, name)
	cmd := exec.Command(load.Path, load.Args...)
	cmd.Stdout, cmd.Stderr = output, output
	if err := n.table.Run(ctx, load.Name, cmd); err != nil {
		why, _ := process.Tail(output.Name(), 3)
		return fmt.Errorf("image %s: %w: %s", filepath.Base(file), err, why)
	}

	return nil
}
