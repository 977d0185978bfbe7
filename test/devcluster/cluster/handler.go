// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/control"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/network"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/node"
)

// Paths of the supervisor's control socket.
const (
	PathCluster = "/v1/cluster"
	PathImages  = "/v1/images" // the body is an image archive
)

// Actions on a node.
const (
	NodeStart          = "start"
	NodeStop           = "stop"
	NodeCut            = "cut"
	NodeJoin           = "join"
	NodeRestartKubelet = "restart-kubelet"
	NodeRestartRuntime = "restart-runtime"
)

// PathNode returns the path to which an action on a node is posted.
func PathNode(name, action string) string { return "/v1/nodes/" + name + "/" + action }

func (s *Supervisor) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+PathCluster, control.Handler(func(r *http.Request) (any, error) {
		return s.describe(r.Context()), nil
	}))

	mux.Handle("POST "+PathImages, control.Handler(func(r *http.Request) (any, error) {
		return nil,
			s.load(r.Context(), r.Body)
	}))

	mux.Handle("POST /v1/nodes/{node}/{action}",
		control.Handler(func(r *http.Request) (any, error) {
			return nil, s.act(r.Context(), r.PathValue("node"), r.PathValue("action"))
		}))

	return mux
}

func (s *Supervisor) describe(ctx context.Context) control.Cluster {
	c := control.Cluster{
		Name:              s.record.Name,
		KubernetesVersion: s.record.KubernetesVersion,
		Kubeconfig:        s.outside.Kubeconfig(),
		API:               s.record.API,
		InitPID:           s.record.Leader.PID,
		NetNS:             fmt.Sprintf("/proc/%d/ns/net", s.record.Leader.PID),
		Bridge:            network.Bridge,
		Subnet:            network.Subnet,
		Logs:              s.outside.Logs(),
	}

	s.mu.Lock()
	for _, p := range s.components {
		component := control.Component{Name: p.Name, Running: p.Running()}
		if err := p.Err(); err != nil {
			component.Reason = err.Error()
		}
		c.Components = append(c.Components, component)
	}

	s.mu.Unlock()
	for _, m := range s.nodes {
		c.Nodes = append(c.Nodes, m.describe(ctx))
	}

	return c
}

func (s *Supervisor) act(ctx context.Context, name, action string) error {
	m, err := s.member(name)
	if err != nil {
		return err
	}

	switch action {
	case NodeStart:
		serving := make(chan struct{})
		close(serving)
		return m.start(ctx, s.api.Nodes(), nil, serving)
	case NodeStop:
		return m.stop()
	case NodeCut:
		return m.connect(false)
	case NodeJoin:
		return m.connect(true)
	case NodeRestartKubelet:
		return m.ask(ctx, node.PathRestartKubelet, nil)
	case NodeRestartRuntime:
		return m.ask(ctx, node.PathRestartRuntime, nil)
	}

	return fmt.Errorf("unknown action %q on %s", action, name)
}

func (s *Supervisor) member(name string) (*member, error) {
	for _, m := range s.nodes {
		if m.config.Name == name {
			return m, nil
		}
	}
	return nil, fmt.Errorf("no node %q: cluster %s has node1 to node%d", name, s.record.Name,
		len(s.nodes))
}

// load imports an image on every node. It tries all nodes; the error names those that failed.
func (s *Supervisor) load(ctx context.Context, archive io.Reader) error {
	spool, err := os.CreateTemp(string(own), "image-*.tar")
	if err != nil {
		return err
	}
	defer os.Remove(spool.Name())
	defer spool.Close()

	if _, err := io.Copy(spool, archive); err != nil {
		return err
	}

	failed := make([]error, len(s.nodes))
	var all sync.WaitGroup
	for i, m := range s.nodes {
		all.Go(func() {
			f, err := os.Open(spool.Name())
			if err != nil {
				failed[i] = err
				return
			}
			defer f.Close()
			failed[i] = m.ask(ctx, node.PathImages, f)
		})
	}

	all.Wait()
	return errors.Join(failed...)
}
