// SPDX-License-Identifier: Apache-2.0

package sessions

import (
	"context"
	"crypto/sha256"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestFailuresOfXPUThatIsGone: a call that ends after its XPU is gone is not reported, because the
// XPU has no metrics any more.
func TestFailuresOfXPUThatIsGone(t *testing.T) {
	failures := 0
	s := New(Options{
		Debounce: time.Hour, CheckInterval: time.Hour, CheckTimeout: time.Second,
		Failed: func(_, operation string, _ error) {
			if operation == "ListPorts" {
				failures++
			}
		},
		Log: testr.New(t),
	})
	dialect, err := dialects.Named("")
	must.Succeed(t, err)
	_, err = s.Open("card", sha256.Sum256(nil), opi.Config{
		Endpoint: "127.0.0.1:1", Dialect: dialect, Installation: "n1",
	})
	must.Succeed(t, err)
	session := s.byXPU["card"].Session
	call := func() {
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := session.ListPorts(ended); err == nil {
			t.Error("a call succeeds after its context has ended")
		}
	}

	call()
	if failures != 1 {
		t.Errorf("%d failures, want 1", failures)
	}
	s.Forget("card")
	call()
	if failures != 1 {
		t.Error("a failure is reported of an XPU that is gone")
	}
	s.running.Wait()
}

// TestForgetIsNotified: the listeners hear of the end of a session of an XPU that is gone, and not
// of an XPU that never had one.
func TestForgetIsNotified(t *testing.T) {
	s := New(Options{})
	var heard []string
	s.listeners = append(s.listeners, func(xpu string, c Change) {
		if c == ConnectionChanged {
			heard = append(heard, xpu)
		}
	})
	s.Refuse("card", "no TLS")
	heard = nil
	for range 2 {
		s.Forget("card")
		s.Forget("never there")
	}
	if len(heard) != 1 || heard[0] != "card" {
		t.Errorf("changes of %q, want one of card", heard)
	}
}
