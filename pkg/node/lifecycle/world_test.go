// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// world is a node in memory with a real journal. It has namespaces, netdevs, hooks, the kubelet and
// the API server. An agent can end after any write to the journal. From then on, nothing that it
// does has an effect.
type world struct {
	t       *testing.T
	records *journal.Journal
	netdevs map[function.ID]*netdevice
	// alive has the network namespaces by path.
	alive map[string]bool
	// due has the Functions whose hooks have not run since their last release, with the name of the
	// hook that must run.
	due map[function.ID]string
	// last has the records of the last check.
	last map[function.ID]journal.Attachment

	kubelet kubelet
	claims  claims

	agent *life
	// mutex protects everything, because the agent works on several Functions at a time.
	mutex sync.Mutex
}

// life is one run of the agent.
type life struct {
	*Manager
	// writes is the number of writes to the journal until the agent ends; negative for no end.
	writes atomic.Int64
}

// netdevice says where a Function's netdev is, "" for the host, and whether it is as it was.
type netdevice struct {
	in      string
	changed bool
	// gone says that there is no device. made counts how often the device was made anew.
	gone bool
	made int
	// leaks says that something of the pod is on the netdev, wherever the netdev is.
	leaks bool
}

// identity returns the identity of the netdev, which differs from all other Functions and from
// earlier netdevs of this Function.
func (d *netdevice) identity(name string) netdev.Identity {
	return netdev.Identity{Parent: name, Index: d.made}
}

var errDead = errors.New("the agent has ended")

func newWorld(t *testing.T, functions ...function.ID) *world {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })

	w := &world{
		t: t, records: j, netdevs: map[function.ID]*netdevice{}, alive: map[string]bool{},
		due:     map[function.ID]string{},
		last:    map[function.ID]journal.Attachment{},
		claims:  claims{consumers: map[types.UID][]types.UID{}},
		kubelet: kubelet{have: map[string]podresources.Assignment{}},
	}

	for _, id := range functions {
		w.netdevs[id] = &netdevice{}
	}

	w.start(-1)
	return w
}

// start replaces the agent by one that ends after the given number of writes.
func (w *world) start(writes int) {
	l := &life{}
	l.writes.Store(int64(writes))
	l.Manager = New(mortalJournal{w.records, w, l}, mortalEngine{w, l}, w, Options{
		BootID: "boot-1", Hooks: mortalQueue{w, l}, Kubelet: &w.kubelet, Claims: w.claims,
		GoneAfter: -1,
	}, logr.Discard())
	w.agent = l
}

func (l *life) dead() bool { return l.writes.Load() == 0 }

// mortalJournal is the journal of an agent that may end after a write.
type mortalJournal struct {
	*journal.Journal
	world *world
	life  *life
}

func (j mortalJournal) write(do func() error) error {
	j.world.mutex.Lock()
	defer j.world.mutex.Unlock()

	if j.life.dead() {
		return errDead
	}
	if err := do(); err != nil {
		return err
	}
	if j.life.writes.Add(-1) == 0 {
		return errDead
	}

	return nil
}

func (j mortalJournal) Put(a journal.Attachment) error {
	return j.write(func() error { return j.Journal.Put(a) })
}

func (j mortalJournal) Delete(id function.ID) error {
	return j.write(func() error { return j.Journal.Delete(id) })
}

// mortalEngine moves the world's netdevs until its agent ends.
type mortalEngine struct {
	*world
	life *life
}

func (e mortalEngine) Plan(
	_ context.Context, device netdev.Device, netNS string, _ function.Interface,
) (netdev.Snapshot, netdev.Place, error) {
	if !e.alive[netNS] {
		return netdev.Snapshot{}, netdev.Place{}, fmt.Errorf("network namespace %s: is gone", netNS)
	}

	e.world.mutex.Lock()
	defer e.world.mutex.Unlock()

	s := netdev.Snapshot{Name: device.Name}
	d := e.netdev(s)
	if d.gone || d.in != "" {
		return netdev.Snapshot{}, netdev.Place{}, netdev.ErrNoNetdev
	}

	s.Identity = d.identity(device.Name)
	return s, netdev.Place{NetNS: netNS}, nil
}

func (e mortalEngine) Attach(
	_ context.Context, _ netdev.Device, before netdev.Snapshot, place netdev.Place,
	want function.Interface,
) (netdev.Observed, error) {
	e.world.mutex.Lock()
	defer e.world.mutex.Unlock()

	d := e.netdev(before)
	switch {
	case e.life.dead():
		return netdev.Observed{}, errDead
	case d.gone || d.identity(before.Name) != before.Identity:
		return netdev.Observed{}, netdev.ErrNoNetdev
	case d.in != "":
		e.t.Errorf("netdev %s is taken from %s to %s", before.Name, d.in, place.NetNS)
	case !e.alive[place.NetNS]:
		return netdev.Observed{}, fmt.Errorf("network namespace %s: is gone", place.NetNS)
	}

	d.in, d.changed = place.NetNS, true
	return netdev.Observed{Name: want.Name}, nil
}

func (e mortalEngine) Restore(
	_ context.Context, _ netdev.Device, before netdev.Snapshot, place netdev.Place,
) (netdev.Restored, error) {
	e.world.mutex.Lock()
	defer e.world.mutex.Unlock()

	switch {
	case e.life.dead():
		return netdev.Restored{}, errDead
	case before.Name == "": // the netdev is gone, and only what the PF enforces is restored
		return netdev.Restored{}, nil
	}

	d := e.netdev(before)
	switch {
	case d.gone && e.alive[place.NetNS]:
		return netdev.Restored{}, netdev.ErrAway
	case d.gone:
		return netdev.Restored{}, netdev.ErrGone
	}

	if d.leaks {
		return netdev.Restored{}, netdev.ErrLeaks
	}

	d.in, d.changed = "", false
	return netdev.Restored{Name: before.Name}, nil
}

func (e mortalEngine) Holds(place netdev.Place, who netdev.Identity) (bool, error) {
	e.world.mutex.Lock()
	defer e.world.mutex.Unlock()
	for id, d := range e.netdevs {
		if d.in == place.NetNS && d.identity(id.String()) == who {
			return true, nil
		}
	}
	return false, nil
}

func (e mortalEngine) Add(
	context.Context, netdev.Attached, []netip.Prefix, []function.Route,
) (netdev.Observed, error) {
	return netdev.Observed{}, errDead
}

func (e mortalEngine) Check(context.Context, netdev.Device, netdev.Attached) ([]string, error) {
	return nil, errDead
}

func (e mortalEngine) Alive(place netdev.Place) (bool, error) { return e.alive[place.NetNS], nil }

// netdev returns the netdev of which the snapshot was made.
func (w *world) netdev(s netdev.Snapshot) *netdevice {
	for id, d := range w.netdevs {
		if id.String() == s.Name {
			return d
		}
	}
	w.t.Fatalf("there is no netdev %s", s.Name)
	return nil
}

// Netdev returns the name of the netdev on the host, for a Function or its PF.
func (w *world) Netdev(id function.ID) (string, error) {
	w.mutex.Lock()
	defer w.mutex.Unlock()

	d, ok := w.netdevs[id]
	switch {
	case !ok:
		return "pf", nil
	case d.gone:
		return "", fs.ErrNotExist
	case d.in != "":
		return "", nil
	}

	return id.String(), nil
}

// mortalQueue has one hook after each release. The world runs it.
type mortalQueue struct {
	*world
	life *life
}

func (q mortalQueue) First(journal.Attachment) string { return "port" }

func (q mortalQueue) Add(id function.ID) {
	q.world.mutex.Lock()
	defer q.world.mutex.Unlock()
	// The Port of a quarantined Function may be deleted earlier, which does not concern the next
	// owner.
	if a, _ := q.records.Get(id); !q.life.dead() && a.Restored() {
		q.due[id] = "port"
	}
}

// endHooks runs the hooks of all Functions that are back, as a queue does that continues from the
// journal.
func (w *world) endHooks() {
	w.t.Helper()
	for _, a := range w.records.All() {
		if !a.Restored() {
			continue
		}
		if err := w.records.Delete(a.Function); err != nil {
			w.t.Fatal(err)
		}
		delete(w.due, a.Function)
	}
}

// look makes the agent check all devices.
func (w *world) look() {
	w.t.Helper()
	w.agent.writes.Store(-1)
	for _, a := range w.records.All() {
		if _, err := w.agent.reconcile(w.t.Context(), trigger{event: DeviceChanges}, a.Function,
			nil); err != nil {
			w.t.Errorf("device of Function %s: %v", a.Function, err)
		}
	}
}

// inSandbox moves a netdev to where the record says that it is.
func (w *world) inSandbox(a journal.Attachment) {
	back := a.State == journal.Detaching || a.State == journal.Reattaching || a.Quarantined()
	if a.State == journal.Attached || back && a.Place.NetNS != "" {
		d := w.netdevs[a.Function]
		d.in, d.changed = a.Place.NetNS, true
	}
}

// unplug removes a Function's device, with its netdev wherever that is.
func (w *world) unplug(id function.ID) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	// along with everything that is on it
	*w.netdevs[id] = netdevice{gone: true, made: w.netdevs[id].made}
}

// plug makes a new device after unplug.
func (w *world) plug(id function.ID) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if d := w.netdevs[id]; d.gone {
		*d = netdevice{made: d.made + 1}
	}
}

// allocatedAgain reports whether the kubelet may have allocated a Function once more for the same
// pod, which has not used it.
func allocatedAgain(before, now journal.Attachment) bool {
	now.ReservedAt, now.Made = before.ReservedAt, before.Made
	return triggerOf(now).event == Allocate && now.State == journal.Reserved && now.Ended == nil &&
		reflect.DeepEqual(before, now)
}

// check fails the test if the records contradict the world.
func (w *world) check(when string) {
	w.t.Helper()
	for id, d := range w.netdevs {
		a, exists := w.records.Get(id)
		phase, returned := a.State, a.Restored()
		before, existed := w.last[id]
		if existed && exists && !a.ReservedAt.Equal(before.ReservedAt) &&
			!allocatedAgain(before, a) {
			w.t.Errorf("%s: Function %s went from %s to %s without a release", when,
				id, describeOwner(before), describeOwner(a))
		}

		delete(w.last, id)
		if exists {
			w.last[id] = a
		}

		switch {
		case (phase == Free || phase == Reserved || returned) && (d.in != "" || d.changed):
			w.t.Errorf("%s: Function %s is %s, and its netdev is in %q, changed: %t", when,
				id, phase, d.in, d.changed)
		case phase == Lost && !d.gone && w.alive[a.Place.NetNS]:
			w.t.Errorf("%s: Function %s is back, and its pod has not got it", when, id)
		case phase == Attached && d.in != a.Place.NetNS && w.alive[a.Place.NetNS]:
			w.t.Errorf("%s: Function %s is attached to %s, and its netdev is in %q", when, id,
				a.Place.NetNS, d.in)
		case phase == Attached && a.Sandbox == "":
			w.t.Errorf("%s: Function %s is attached to nobody", when, id)
		case w.due[id] != "" && !returned:
			w.t.Errorf("%s: Function %s is %s before its hooks are done", when, id, phase)
		case a.Quarantined() && (w.agent.Quarantined(id) == "" || w.agent.Releasing(id) != ""):
			w.t.Errorf("%s: Function %s is quarantined, and not kept from others", when, id)
		case returned && w.agent.Releasing(id) == "":
			w.t.Errorf("%s: Function %s is offered before its hooks are done", when, id)
		}
	}
}

// settleAll lets time pass after the last pod. No Function may have an owner for ever.
func (w *world) settleAll(when string) {
	w.t.Helper()
	w.start(-1)
	clear(w.kubelet.have)
	clear(w.claims.consumers)

	for path := range w.alive {
		w.alive[path] = false
	}

	w.kubelet.err = nil
	for id, d := range w.netdevs {
		d.leaks = false
		w.plug(id)
	}

	for range 12 {
		if err := w.agent.Recover(w.t.Context()); err != nil {
			w.t.Errorf("%s: %v", when, err)
		}
		w.endHooks()
		w.agent.sweep(w.t.Context())
		w.endHooks()
		time.Sleep(time.Minute)
	}

	for _, a := range w.records.All() {
		w.t.Errorf("%s: Function %s is %s of %s for ever", when, a.Function, a.State,
			describeOwner(a))
	}

	w.check(when)
}
