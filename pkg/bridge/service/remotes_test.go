// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestRemotesAreWrittenDown checks that the data plane learns which addresses it has had before,
// until it was brought to the current ones, also after a restart.
func TestRemotesAreWrittenDown(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	remotes := func(text string) *plane.Remotes {
		t.Helper()
		r, err := plane.ParseRemotes([]byte("remotes: [{addresses: [" + text + "]}]"))
		must.Succeed(t, err)
		return r
	}

	fake := newFakePlane(false)
	a := open(t, path, fake)
	_, err := a.networks.create(t.Context(), "net-blue", segmentOf(10, 1000))
	must.Succeed(t, err)
	_, err = a.networks.create(t.Context(), "net-red", segmentOf(20))
	must.Succeed(t, err)

	set := func(text, want string) {
		t.Helper()
		must.Succeed(t, a.SetRemotes(t.Context(), remotes(text)))
		s := fake.segments["net-blue"]
		if got := fmt.Sprint(s.Unicast, s.Remotes, s.Stale); got != want {
			t.Errorf("remotes and stale addresses are %s, want %s", got, want)
		}
	}

	set("10.0.0.1, 10.0.0.2", "true [10.0.0.1 10.0.0.2] []")
	set("10.0.0.2, 10.0.0.3", "true [10.0.0.2 10.0.0.3] [10.0.0.1]")
	fake.failure = errors.New("the kernel is busy")
	must.Succeed(t, a.SetRemotes(t.Context(), remotes("10.0.0.4")))
	fake.failure = nil
	must.Succeed(t, a.Close())

	fake = newFakePlane(false)
	a, err = newAgent(Config{State: path, Remotes: remotes("10.0.0.5")}, logr.Discard(),
		withPlane(fake))
	must.Succeed(t, err)
	defer a.Close()
	a.reconcileAll()
	want := "[10.0.0.2 10.0.0.3 10.0.0.4]"
	if got := fmt.Sprint(fake.segments["net-blue"].Stale); got != want {
		t.Errorf("after the restart %s are stale, want %s", got, want)
	}
	set("10.0.0.5", "true [10.0.0.5] []")
	if s := fake.segments["net-red"]; s.Unicast || s.Remotes != nil {
		t.Errorf("a network without a VNI has remotes: %+v", s)
	}

	_, err = a.networks.delete(t.Context(), blue, false)
	must.Succeed(t, err)
	if len(a.sentRemotes.byID) != 0 {
		t.Errorf("addresses are left: %v", a.sentRemotes.byID)
	}
}
