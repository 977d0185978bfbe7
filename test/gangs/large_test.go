// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var largeKills = flag.Int("large-kills", 2,
	"how many times TestLargeGangKilled kills something, up to four times under each gang")

const (
	largeNodes = 64
	largeRails = 8 // of each node
	// cardsOfAgent is how many cards have their OPI agent in one process, which is killed as a whole.
	cardsOfAgent = 16
)

// TestLargeGangKilled: gangs that need all Functions of 64 nodes are bound as a whole, whoever is
// killed meanwhile, and nothing of them is left at the xPUs afterwards.
func TestLargeGangKilled(t *testing.T) {
	w := newWorld(t, largeNodes)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))

	var took []time.Duration
	for killed := 0; killed < *largeKills; {
		name := fmt.Sprint("train", len(took))
		refuses := w.temper(random)
		begin := time.Now()
		pods := w.gang(name, largeNodes, largeRails, true)

		var victims []string
		for range min(4, *largeKills-killed) {
			time.Sleep(time.Duration(random.Int64N(int64(6 * time.Second)))) // until the kill
			victims = append(victims, fmt.Sprintf("%s after %s", w.killOne(random, cardsOfAgent),
				time.Since(begin).Round(100*time.Millisecond)))
			killed++
		}
		w.bound(pods, 5*time.Minute)
		took = append(took, time.Since(begin))
		t.Logf("%s: bound after %s, refusal %t, killed %d: %s", name,
			took[len(took)-1].Round(100*time.Millisecond), refuses, killed, victims)
		w.servesAll()
		w.clear(name)
		w.servesNothing()
	}

	slices.Sort(took)
	t.Logf("%d kills under %d gangs of %d pods x %d rails: bound after %s (median), %s (longest)",
		*largeKills, len(took), largeNodes, largeRails,
		took[len(took)/2].Round(100*time.Millisecond),
		took[len(took)-1].Round(100*time.Millisecond))
}

// temper gives each agent another slowness. One gang in eight has a Port refused for 5 s.
func (w *world) temper(random *rand.Rand) (refuses bool) {
	for _, agent := range w.agents {
		delay := time.Duration(random.Int64N(int64(2 * time.Second)))
		agent.Set(func(b *opitest.Behaviour) { b.UpDelay, b.Realise = delay, nil })
	}
	if refuses = random.IntN(8) == 0; refuses {
		w.agents[random.IntN(len(w.agents))].Set(func(b *opitest.Behaviour) {
			b.Realise = refuseFirstFor(5 * time.Second)
		})
	}
	return refuses
}

// refuseFirstFor has an OPI agent refuse the first port that it is asked for, for this time.
func refuseFirstFor(duration time.Duration) func(id string) error {
	refused, until := "", time.Time{}
	return func(id string) error {
		if refused == "" {
			refused, until = id, time.Now().Add(duration)
		}
		if refused == id && time.Now().Before(until) {
			return errors.New("no such representor")
		}
		return nil
	}
}

// servesAll waits until all Ports are at the agents, those that an agent lost included.
func (w *world) servesAll() {
	w.Helper()
	w.serves(largeRails)
}

// servesNothing waits until no agent has a port.
func (w *world) servesNothing() {
	w.Helper()
	w.serves(0)
}

func (w *world) serves(ports int) {
	w.Helper()
	must.EventuallySucceed(w, "the ports of the gang are at the agents", func() error {
		for i, agent := range w.agents {
			if has := len(agent.Ports()); has != ports {
				return fmt.Errorf("the agent of %s has %d ports, want %d", nodeName(i), has, ports)
			}
		}
		return nil
	})
}
