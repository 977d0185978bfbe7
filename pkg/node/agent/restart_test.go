// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/go-logr/logr/testr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
)

// TestRestart ends the agent at every stage in the life of a Function. The next agent continues
// from there.
func TestRestart(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		vf, other := s.vfs[0], s.vfs[1]
		p := newPod(t, "pod1")
		s.declare(byDevicePlugin(v1alpha1.ProvisionAtAllocate))
		gate := s.path("gate")
		s.script("hooks.d/20-wait", "touch "+gate+".reached; until test -e "+gate+
			"; do sleep 0.01; done")
		restart := func() { s.end(); s.start() }
		s.start()
		s.wantHealthy(vf, other)

		// After Allocate, the xPU serves the pod already.
		if _, err := s.give(p.name, vf); err != nil {
			t.Fatal(err)
		}

		s.wantPorts(vf)
		restart()
		s.wantHealthy(vf, other)
		s.wantPorts(vf)
		out := s.mustAdd(p, vf)

		// After ADD, the pod runs on, and the runtime gets the same answer.
		s.end()
		s.wantInPod(p, vf)
		s.start()
		s.wantHealthy(vf, other)
		s.wantInPod(p, vf)
		if again := s.mustAdd(p, vf); again != out {
			t.Errorf("ADD printed\n%s, the agent before\n%s", again, out)
		}

		// A DEL waits while the agent does not run.
		s.end()
		s.opi.Set(func(b *opitest.Behaviour) { b.StuckDelete = true })
		s.del(p, vf)
		s.pods.Set()
		if files, err := os.ReadDir(s.config.SpoolDir); err != nil || len(files) == 0 {
			t.Errorf("the spool has %v, %v; want the DEL", files, err)
		}

		s.wantInPod(p, vf)
		s.start()
		s.wantHealthy(other)
		s.awaitOnHost()

		// The Function is not free for the next agent while the xPU does not delete the Port, and
		// while a hook runs.
		restart()
		s.wantHealthy(other)
		s.restartOPI()

		s.eventually("the second hook runs", func() bool {
			_, err := os.Stat(gate + ".reached")
			return err == nil
		})

		s.end()
		if left := s.records(); len(left) != 1 || !left[0].Restored() ||
			left[0].Hooks.Next != "20-wait" {
			t.Errorf("the journal has %+v, want the release at its second hook", left)
		}

		s.start()
		s.wantHealthy(other)
		if err := os.WriteFile(gate, nil, 0o600); err != nil {
			t.Fatal(err)
		}

		s.wantHealthy(vf, other)
		if notes := s.noted(); len(notes) != 1 || notes[0].ContainerID != p.sandbox {
			t.Errorf("the first hook ran for %+v, want once, for %s", notes, p.sandbox)
		}

		s.endClean()
	})
}

// TestLostPod: the namespace of a pod ended while the agent did not run, and no DEL came.
func TestLostPod(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		vf, other := s.vfs[0], s.vfs[1]
		lost, next := newPod(t, "pod1"), newPod(t, "pod2")
		s.declare(byDevicePlugin(v1alpha1.ProvisionAtAllocate))
		s.start()
		s.wantHealthy(vf, other)
		if _, err := s.give(lost.name, vf); err != nil {
			t.Fatal(err)
		}

		s.mustAdd(lost, vf)
		s.end()
		if err := lost.Close(); err != nil {
			t.Fatal(err)
		}

		s.start()
		s.wantHealthy(vf, other)

		// The kubelet gives the Function to the next pod.
		if _, err := s.give(next.name, vf); err != nil {
			t.Fatal(err)
		}
		if notes := s.noted(); len(notes) != 1 || notes[0].ContainerID != lost.sandbox {
			t.Errorf("the hook ran for %+v, want once, for the pod that was lost", notes)
		}

		s.mustAdd(next, vf)
		s.del(lost, vf) // a late DEL
		s.wantInPod(next, vf)
		s.del(next, vf)
		s.awaitHooks()
		s.wantHealthy(vf, other)
		s.end()
		s.wantPorts()
		if left := s.records(); len(left) > 0 {
			t.Errorf("the journal still has %+v", left)
		}
	})
}

// TestReboot: the node was rebooted, and the kubelet starts the pod again with the Function that it
// had.
func TestReboot(t *testing.T) {
	s := newDirectSite(t)
	s.config.ProcRoot = s.path("proc")
	boot := func(id string) {
		t.Helper()
		dir := s.path("proc/sys/kernel/random")
		err := os.MkdirAll(dir, 0o755)
		if err := errors.Join(err,
			os.WriteFile(filepath.Join(dir, "boot_id"), []byte(id+"\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}

	vf, other := s.vfs[0], s.vfs[1]
	p := newPod(t, "pod1")
	boot("first")
	s.start()
	s.wantHealthy(vf, other)
	if _, err := s.give(p.name, vf); err != nil {
		t.Fatal(err)
	}

	s.mustAdd(p, vf)
	s.end()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}

	s.awaitOnHost()
	s.opi.Kill()
	boot("second")
	if err := s.opi.Run(); err != nil {
		t.Fatal(err)
	}

	s.start()
	s.wantHealthy(vf, other) // otherwise the kubelet would refuse the pod
	again := newPod(t, "pod1")
	again.sandbox = "another-sandbox"
	s.mustAdd(again, vf)
	s.del(again, vf)
	s.del(p, vf)
	s.endClean()
}

// TestEndDuringAdd: a running request is completed when the agent ends, although the xPU takes
// time.
func TestEndDuringAdd(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		vf := s.vfs[0]
		p := newPod(t, "pod1")
		s.opi.Set(func(b *opitest.Behaviour) { b.UpDelay = 300 * time.Millisecond })
		s.start()
		s.wantHealthy(s.vfs...)
		s.pods.Set(kubelettest.Pod(p.name, resource, vf.String()))
		done := make(chan error, 1)
		go func() { _, err := s.add(p, vf); done <- err }()
		s.eventually("the xPU is asked", func() bool { return s.opi.Calls("CreateBridgePort") > 0 })
		s.end()
		if err := <-done; err != nil {
			t.Fatalf("ADD: %v", err)
		}

		s.wantInPod(p, vf)
		s.start()
		s.wantHealthy(s.vfs...)
		s.del(p, vf)
		s.endClean()
	})
}

// TestAllocateBeforeDel: a DEL is done for the CNI plugin when it is in the spool, and the kubelet
// gives the Function to the next pod then.
func TestAllocateBeforeDel(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		s.declare(byDevicePlugin(v1alpha1.ProvisionAtAllocate))
		vf := s.vfs[0]
		first, second := newPod(t, "pod1"), newPod(t, "pod2")
		s.start()
		s.wantHealthy(s.vfs...)
		if _, err := s.give(first.name, vf); err != nil {
			t.Fatal(err)
		}

		s.mustAdd(first, vf)
		done := make(chan error, 1)
		go func() { _, err := s.give(second.name, vf); done <- err }()
		s.del(first, vf)
		if err := <-done; err != nil {
			t.Fatalf("Allocate: %v", err)
		}

		s.mustAdd(second, vf)
		s.del(second, vf)
		s.endClean()
	})
}

// TestTwoAgents: an agent that starts while another one has not ended yet, as in an update, waits
// for it.
func TestTwoAgents(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	first, err := takeJournal(t.Context(), path, func() {}, testr.New(t))
	if err != nil {
		t.Fatal(err)
	}

	waiting := make(chan struct{}, 10)
	log := funcr.New(func(_, args string) { waiting <- struct{}{} }, funcr.Options{})

	type taken struct {
		records *journal.Journal
		err     error
	}

	done := make(chan taken, 1)
	go func() {
		records, err := takeJournal(t.Context(), path, func() {}, log)
		done <- taken{records, err}
	}()

	<-waiting
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}

	second := <-done
	if second.err != nil {
		t.Fatal(second.err)
	}
	defer second.records.Close()

	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := takeJournal(ended, path, func() {}, testr.New(t)); !errors.Is(err,
		boltfile.ErrLocked) {
		t.Errorf("error %v of one that is told to end while it waits", err)
	}
}
