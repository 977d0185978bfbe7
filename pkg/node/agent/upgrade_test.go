// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// beside starts another agent while one runs, as a rolling update does, and returns a function that
// ends the first agent.
func (s *site) beside(uid string) (endFirst func()) {
	s.t.Helper()
	endFirst = s.end
	s.config.PodUID, s.config.ReadySocket = uid, s.path(uid+".sock")
	// no kubelet of this test registers DRA drivers
	s.config.times.register = 50 * time.Millisecond
	s.start()
	return endFirst
}

func (s *site) awaitReady() {
	s.t.Helper()
	s.eventually("the agent is ready", func() bool {
		return nodestate.Client{Socket: s.config.ReadySocket}.Ready(s.t.Context()) == nil
	})
}

// TestUpgrade replaces the agent repeatedly while pods start and end all the time. No pod is
// affected.
func TestUpgrade(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		s.declare(byDevicePlugin(v1alpha1.ProvisionAtAllocate))
		staying, coming := newPod(t, "staying"), newPod(t, "coming")
		s.config.PodUID, s.config.ReadySocket = "first", s.path("first.sock")
		s.start()
		s.wantHealthy(s.vfs...)
		s.awaitReady()
		if _, err := s.give(staying.name, s.vfs[0]); err != nil {
			t.Fatal(err)
		}

		s.mustAdd(staying, s.vfs[0])

		stop, done := make(chan struct{}), make(chan error, 1)
		var lives atomic.Int32
		go func() {
			defer close(done)
			for {
				select {
				case <-stop:
					return
				default:
				}

				p := coming
				p.sandbox = fmt.Sprintf("sandbox-%d", lives.Load())
				if err := s.live(staying, p); err != nil {
					done <- fmt.Errorf("life %d: %w", lives.Load(), err)
					return
				}

				lives.Add(1)
			}
		}()

		for i := range 5 {
			endFirst := s.beside(fmt.Sprintf("agent%d", i))
			s.awaitReady()
			endFirst()
			before := lives.Load()
			s.eventually("another pod came and went", func() bool {
				return lives.Load() > before ||
					len(done) > 0
			})
		}

		close(stop)
		if err := <-done; err != nil {
			t.Error(err)
		}

		s.awaitHooks()
		s.wantInPod(staying, s.vfs[0])
		s.del(staying, s.vfs[0])
		s.pods.Set()
		s.endClean()
	})
}

// live runs a pod's life while another pod runs.
func (s *site) live(staying, p pod) error {
	vf := s.vfs[1]
	s.pods.Set(kubelettest.Pod(staying.name, resource, s.vfs[0].String()),
		kubelettest.Pod(p.name, resource, vf.String()))
	if _, err := s.kubelet.Allocate(s.t.Context(), resource, vf.String()); err != nil {
		return fmt.Errorf("Allocate: %w", err)
	}
	if _, err := s.add(p, vf); err != nil {
		return fmt.Errorf("ADD: %w", err)
	}
	if err := s.shim(io.Discard).Del(s.request(p, vf, nil)); err != nil {
		return fmt.Errorf("DEL: %w", err)
	}

	return nil
}

// TestSuccessorDies: the agent that gave the node away ends with an error, so that it is started
// again, if the successor ends first.
func TestSuccessorDies(t *testing.T) {
	s := newDirectSite(t)
	s.config.ReadySocket = s.path("ready.sock")
	ctx, done, config := t.Context(), make(chan error, 1), s.config
	go func() { done <- Run(ctx, config, prometheus.NewRegistry(), testr.New(t)) }()
	s.wantHealthy(s.vfs...)
	s.awaitReady()
	readiness, err := upgrade.ServeReadiness(ctx, "")
	if err != nil {
		t.Fatal(err)
	}

	p, err := upgrade.TakeOver(ctx, upgrade.Socket(s.config.StateDir), nil, readiness, testr.New(t))
	if err != nil || p == nil {
		t.Fatalf("the agent did not hand over: %v, %v", p, err)
	}
	if err := (nodestate.Client{Socket: s.config.ReadySocket}).Ready(ctx); err != nil {
		t.Errorf("the agent is not ready while it waits for its end: %v", err)
	}

	socket, err := p.Listener()
	must.Succeed(t, err)
	must.Succeed(t, errors.Join(socket.Close(), p.Close()))
	if err := <-done; err == nil ||
		!strings.Contains(err.Error(), "the agent that took the node over is gone") {
		t.Errorf("Run = %v", err)
	}
}
