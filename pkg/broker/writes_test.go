// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// writes collects a broker's writes, such as "PATCH xpuports/status". It ignores Leases and events.
// Safe for concurrent use.
type writes struct {
	mu   sync.Mutex
	made []string
}

type counting struct {
	*writes
	next http.RoundTripper
}

var written = regexp.MustCompile(`/(xpu[a-z]+)/[^/]+(/status)?$`)

func (c counting) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := c.next.RoundTrip(request)
	path := written.FindStringSubmatch(request.URL.Path)
	if err == nil && response.StatusCode < 300 && request.Method != http.MethodGet && path != nil {
		c.mu.Lock()
		c.made = append(c.made, request.Method+" "+path[1]+path[2])
		c.mu.Unlock()
	}
	return response, err
}

// expect waits until exactly these writes of XPUPorts have happened, and then forgets them. It
// ignores writes of networks, because their time is not fixed.
func (w *writes) expect(s *testCluster, what string, want ...string) {
	s.Helper()
	s.eventually(what+" costs what it must", func() error {
		w.mu.Lock()
		defer w.mu.Unlock()

		ports := slices.DeleteFunc(slices.Clone(w.made), func(write string) bool {
			return !strings.Contains(write, " xpuports")
		})
		slices.Sort(ports)
		if diff := cmp.Diff(want, ports); diff != "" {
			return fmt.Errorf("writes (-want +got):\n%s", diff)
		}

		w.made = nil
		return nil
	})
}

func (w *writes) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	made := w.made
	w.made = nil
	return made
}

// TestWrites checks that an XPUPort costs one write to each cluster when it is created and one when
// it is deleted.
func TestWrites(t *testing.T) {
	w := newWorld(t)
	w.stopBroker()
	made := &writes{}
	w.infra.startBroker("infra-1", func(next http.RoundTripper) http.RoundTripper {
		return counting{made, next}
	})
	_, agent := w.scene(w.a, nil)
	// The first port of a network changes the network's status.
	_, neighbour := w.a.claim("neighbour", "node1", "fast", vf(9))
	w.a.portIs(neighbour, v1alpha1.ReasonUp)
	network := w.a.network("quiet", 0)
	w.a.networkIs(network, v1alpha1.ReasonUp) // all earlier writes are done
	made.take()

	o, port := w.a.claim("nic", "node1", "fast", vf(0))
	w.a.portIs(port, v1alpha1.ReasonUp)
	made.expect(w.infra, "an XPUPort that comes", "PATCH xpuports", "PATCH xpuports/status")
	w.a.delete(o)
	w.a.delete(port)
	w.a.gone(port)
	made.expect(w.infra, "an XPUPort that goes", "DELETE xpuports", "PATCH xpuports")
	w.serves(agent, "c1pf0vf9")

	t.Run("nothing happens", func(t *testing.T) {
		w.stopBroker = func() {}
		second := &writes{}
		w.infra.startBroker("infra-1", func(next http.RoundTripper) http.RoundTripper {
			return counting{second, next}
		})
		other := w.a.network("another", 0)
		w.a.networkIs(other, v1alpha1.ReasonUp)

		for _, write := range second.take() {
			if write == "PATCH xpuports" || write == "PATCH xpuports/status" ||
				write == "PATCH xpus" || write == "PATCH xpus/status" ||
				write == "PATCH xpunodes" {
				t.Errorf("a broker that starts writes what is there already: %s", write)
			}
		}
	})
}
