// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// fault is a temporary failure of the node.
type fault struct {
	name string
	// hits causes the fault, and returns when it is over.
	hits func(n *node, random *rand.Rand) error
}

// kill is the fault that kills the agent.
var kill = fault{"agent killed", func(n *node, random *rand.Rand) error {
	n.killAgent()
	pause(random, time.Second)
	n.startAgent()
	return nil
}}

// handoverKilled is the fault that kills one of two agents at a random moment of the handover
// between them, and the other agent a moment later.
var handoverKilled = fault{"handover killed", func(n *node, random *rand.Rand) error {
	agents := []*process{n.theAgent(), n.launch()}
	pause(random, 3*time.Second)
	random.Shuffle(2, func(i, j int) { agents[i], agents[j] = agents[j], agents[i] })
	agents[0].kill()
	pause(random, 2*time.Second)
	agents[1].kill()
	n.startAgent()
	return nil
}}

// clockSet is the fault that sets the machine's clock forwards or backwards while no agent runs.
// The test shifts all times in the journal instead, because it cannot set the machine's clock and
// the agent sees no difference.
var clockSet = fault{"clock set", func(n *node, random *rand.Rand) error {
	n.killAgent()
	defer n.startAgent()

	by := time.Duration(random.Int64N(int64(4*time.Hour))) - 2*time.Hour
	n.skew.Add(int64(by))
	j, err := journal.Open(n.path("state/journal.db"))
	if err != nil {
		return err
	}

	for _, a := range j.All() {
		shift(reflect.ValueOf(&a).Elem(), -by)
		err = errors.Join(err, j.Put(a))
	}

	return errors.Join(err, j.Close())
}}

// shift changes all settable times in a value. Its pointers point to copies afterwards.
func shift(v reflect.Value, by time.Duration) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() && v.CanSet() {
			c := reflect.New(v.Type().Elem())
			c.Elem().Set(v.Elem())
			shift(c.Elem(), by)
			v.Set(c)
		}
	case reflect.Struct:
		if t, ok := v.Interface().(time.Time); ok {
			if !t.IsZero() && v.CanSet() {
				v.Set(reflect.ValueOf(t.Add(by)))
			}
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				shift(v.Field(i), by)
			}
		}
	}
}

// faults are all faults but the ones above.
var faults = []fault{
	{"kubelet gone", func(n *node, random *rand.Rand) error {
		n.kubelet.Lock()
		defer n.kubelet.Unlock()
		n.stopKubelet()
		pause(random, time.Second)
		n.mutex.Lock()
		defer n.mutex.Unlock()
		return n.restartKubelet()
	}},
	{"runtime gone", func(n *node, random *rand.Rand) error {
		n.runtime.Lock()
		defer n.runtime.Unlock()
		n.stopRuntime()
		pause(random, time.Second)
		return n.restartRuntime()
	}},
	{"API server away", func(n *node, random *rand.Rand) error {
		n.api.set(true)
		pause(random, 2*time.Second)
		n.api.set(false)
		return nil
	}},
	{"OPI agent away", func(n *node, random *rand.Rand) error {
		n.opi.Kill()
		pause(random, 2*time.Second)
		return n.opi.Run()
	}},
	{"OPI agent refuses", func(n *node, random *rand.Rand) error {
		n.opi.FailNext("CreateBridgePort", 1+random.IntN(3), codes.Internal, "not today")
		n.opi.DropNext("DeleteBridgePort", 1+random.IntN(3))
		return nil
	}},
	{"disk full", func(n *node, random *rand.Rand) error {
		defer os.Remove(n.path("state/ballast"))
		// The file takes all free space, so that a write fails half-way.
		_ = os.WriteFile(n.path("state/ballast"), make([]byte, stateSize), 0o600)
		pause(random, time.Second)
		return nil
	}},
	{"card reset", func(n *node, random *rand.Rand) error {
		pf := []pci.Address{claimPF, pluginPF}[random.IntN(2)]
		n.cards.reset()
		defer n.cards.reset()
		if err := n.host.RemoveVFs(pf); err != nil {
			return err
		}
		pause(random, time.Second)
		return n.host.AddVFs(pf, vfsOfPF)
	}},
}

// pause waits for a random time of at most most, so that faults hit at different moments.
func pause(random *rand.Rand, most time.Duration) {
	time.Sleep(time.Duration(random.Int64N(int64(most))))
}

// strike causes faults one after the other until ctx ends, and returns the number of each fault.
func (n *node) strike(
	ctx context.Context, random *rand.Rand, every time.Duration, among []fault,
) map[string]int {
	count := map[string]int{}
	for {
		select {
		case <-ctx.Done():
			return count
		case <-time.After(time.Duration(random.Int64N(int64(2 * every)))):
		}

		f := among[random.IntN(len(among))]
		if err := f.hits(n, random); err != nil {
			n.t.Errorf("%s: %v", f.name, err)
		}

		count[f.name]++
	}
}

// sample is the resources that the agent uses.
type sample struct {
	goroutines, descriptors int
	heap                    int // memory in bytes
	journal                 int // size of its file in bytes
}

func (s sample) String() string {
	return fmt.Sprintf("%d goroutines, %d file descriptors, %.1f MB heap, journal of %d KiB",
		s.goroutines, s.descriptors, float64(s.heap)/1e6, s.journal>>10)
}
