// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// node is a node whose Functions change, and whose sriovnet can be wrong or hang.
type node struct {
	*Verifier
	changes chan struct{}

	mutex     sync.Mutex
	functions []function.Function
	compared  int
	changed   int // how often the agent was notified
	wrong     bool
	hang      chan struct{} // nil if it does not hang
}

// started returns a node whose Verifier runs until ctx ends. ended is closed then. A comparison
// hangs until hang is closed, unless hang is nil.
func started(
	t *testing.T, ctx context.Context, hang chan struct{},
) (n *node, ended chan struct{}) {
	n = &node{changes: make(chan struct{}, 1), functions: host(), hang: hang}
	ended = make(chan struct{})
	n.Verifier = NewVerifier(Options{
		Functions: func() []function.Function {
			n.mutex.Lock()
			defer n.mutex.Unlock()
			return n.functions
		},
		Ports: ports, Reader: n.reader, Log: testr.New(t),
		Changed: func() {
			n.mutex.Lock()
			defer n.mutex.Unlock()
			n.changed++
		},
	})
	go func() {
		defer close(ended)
		if err := n.Run(ctx, n.changes); err != nil {
			t.Error(err)
		}
	}()
	return n, ended
}

func (n *node) reader() Reader {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.compared++
	r, hang := agreeing(), n.hang
	if n.wrong {
		r.SFNumOfAux = func(string) (int, error) { return 7, nil }
	}
	r.PFFromVF = func(string) (string, error) {
		if hang != nil {
			<-hang
		}
		return pf, nil
	}
	return r
}

// change changes the node, wakes the Verifier, and waits for the time.
func (n *node) change(pause time.Duration, change func()) {
	n.mutex.Lock()
	change()
	n.mutex.Unlock()
	n.changes <- struct{}{}
	time.Sleep(pause)
	synctest.Wait()
}

// took returns how many comparisons there were since the last call.
func (n *node) took() (comparisons int) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	comparisons, n.compared = n.compared, 0
	return comparisons
}

// TestVerifier checks when an agent compares.
func TestVerifier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := started(t, t.Context(), nil)
		if n.Last() != nil {
			t.Error("there is a result before the first comparison")
		}

		time.Sleep(quiet)
		synctest.Wait()
		if last := n.Last(); n.took() != 1 || last == nil || last.Same != 19 {
			t.Errorf("after the start: %+v", last)
		}

		for what, change := range map[string]func(*function.Function){
			"a pod takes a netdev":    func(f *function.Function) { f.Netdev = "" },
			"a pod gets a VF by VFIO": func(f *function.Function) { f.Driver = "vfio-pci" },
			"the link goes down":      func(f *function.Function) { f.LinkUp = false },
		} {
			n.change(2*interval, func() {
				n.functions = host()
				change(&n.functions[2])
			})
			if got := n.took(); got != 0 {
				t.Errorf("%s: %d comparisons, want none", what, got)
			}
		}

		n.change(quiet, func() { n.functions, n.wrong = host()[:3], true })
		n.change(pause, func() { n.functions = host()[:2] })
		n.change(pause, func() {})
		if last := n.Last(); n.took() != comparisons || last.Different != 1 {
			t.Errorf("after a VF has gone: %+v", last)
		}

		n.change(interval/2, func() { n.functions = host()[:3] })
		if got := n.took(); got != 0 {
			t.Errorf("%d comparisons in less than a minute after the last one", got)
		}
		n.change(interval, func() { n.wrong = false })
		if last := n.Last(); n.took() != 1 || last.Different != 0 {
			t.Errorf("after a VF has come: %+v", last)
		}

		n.change(interval, func() { n.functions[0].Driver = "vfio-pci" })
		if got := n.took(); got != 1 {
			t.Errorf("%d comparisons after a PF got another driver, want 1", got)
		}

		n.change(interval, func() { n.wrong = true })
		result, err := n.Verify(t.Context())
		must.Succeed(t, err)
		if got := n.took(); got != comparisons || result.Different != 1 {
			t.Errorf("on request: %d comparisons, %+v", got, result)
		}
		synctest.Wait()
		if n.changed != 5 {
			t.Errorf("the agent was notified %d times, want once for each result", n.changed)
		}
	})
}

// TestVerifierHangs checks that a driver that never answers is reported, and keeps neither a
// request nor the agent's end waiting.
func TestVerifierHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		n, _ := started(t, t.Context(), hang)
		time.Sleep(quiet)

		ctx, cancel := context.WithTimeout(t.Context(), patience/2)
		defer cancel()
		if _, err := n.Verify(ctx); err == nil || !strings.Contains(err.Error(), "has not ended") {
			t.Errorf("error %v", err)
		}

		time.Sleep(patience)
		if last := n.Last(); last == nil || !strings.Contains(last.Skipped, "hangs") {
			t.Errorf("%+v, want that it hangs", last)
		}

		close(hang)
		time.Sleep(interval)
		synctest.Wait()
		if last := n.Last(); last.Skipped != "" || last.Same != 19 {
			t.Errorf("%+v, want that all is the same", last)
		}
	})

	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		defer close(hang)
		ctx, cancel := context.WithCancel(t.Context())
		_, ended := started(t, ctx, hang)
		time.Sleep(quiet)
		synctest.Wait()
		cancel()
		<-ended
	})
}
