// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
	"github.com/opiproject/xpu-device-plugin/test/qemu/settings"
	"github.com/opiproject/xpu-device-plugin/test/qemu/stage"
)

var (
	lifeCount = flag.Int("lives", 40, "pods that live and die in TestLives")
	lifeSeed  = flag.Uint64("seed", 0,
		"of what TestLives does at random; 0 is another one each time")
)

// moods are temporary behaviours of the card, as lines of its personality. In each mood the PF does
// not report a VF during its reset, and neither PF nor VF accept settings for the VF.
var moods = map[string]string{
	"truthful": "",
	"silent":   "get=EAGAIN\n",
	"resets": "mac.reset=150\nmac.follow=reset\nvlan.reset=150\ntrust.reset=150\n" +
		"link.reset=150\nvf.mtu.reset=100\n",
	"resets, and all are left out": "mac.reset=150\nmac.follow=reset\nvlan.reset=150\nget.any=EAGAIN\n",
	"busy": "mac=EBUSY\nmac.zero=EAGAIN\nvlan=EAGAIN\nvlan.zero=EBUSY\nmax=EBUSY\nmax.zero=EBUSY\n" +
		"spoofchk=EAGAIN\nspoofchk.zero=EAGAIN\ntrust=EBUSY\ntrust.zero=EBUSY\n",
}

// always is a part of each mood.
const always = "get.busy=EAGAIN\nset.busy=EAGAIN\nset.wait=50\nvf.mac.busy=EAGAIN\nvf.up.busy=EBUSY\n"

// outlasting is how long the card does not report one VF. It is longer than the agent tries to
// release the VF before it gives up the Function.
const outlasting = 40 * time.Second

// way is how a pod lives on a card that misbehaves.
type way string

const (
	ordinary way = "ordinary"
	// hostile means that the pod harms its interface as NET_ADMIN allows; see [lifetime.harm].
	hostile way = "hostile"
	// namespaceGone means that the network namespace ends before the agent learns of the pod's end.
	namespaceGone way = "namespace gone"
	// unseen means that the pod ends while the card does not report its VF for long. There is one
	// such pod.
	unseen way = "unseen"
)

// TestLives checks that pods leave no trace on the VFs of a card that at random reports nothing,
// resets and refuses, while the agent is killed from time to time. After each pod the VF is as it
// was before the first pod, or the Function is in quarantine until the card reports the truth.
func TestLives(t *testing.T) {
	card.InGuest(t, "simnic")
	seed := cmp.Or(*lifeSeed, rand.Uint64())
	t.Logf("seed %d", seed)
	l := newLives(t, seed)
	l.Start()

	var living sync.WaitGroup
	for index := range l.vfs {
		living.Go(func() { l.lead(index, rand.New(rand.NewPCG(seed, uint64(index)))) })
	}

	go func() { living.Wait(); close(l.ended) }()
	stop := make(chan struct{})
	var weather sync.WaitGroup
	weather.Go(func() { l.weather(stop, rand.New(rand.NewPCG(seed, 100))) })
	kills := l.killNowAndThen(rand.New(rand.NewPCG(seed, 101)))
	close(stop)
	weather.Wait()

	l.End()
	l.WantNothingLeft()
	l.conclude(kills)
}

// lives are pods on the VFs of one PF, and the moods of the card.
type lives struct {
	*node.Node
	t      *testing.T
	pf     pci.Address
	vfs    []function.ID
	stage  *stage.Stage
	host   *netns.Namespace
	before []remains

	next  atomic.Int64  // number of the next life
	ended chan struct{} // gets a value for each ended life, and is closed after the last one

	card sync.Mutex // held while the card's mood must stay or changes
	mood string

	agent sync.Mutex // held while the agent is killed, or may not be killed for long
	tried atomic.Bool

	mutex    sync.Mutex
	ran      int
	outcomes map[string]int // number of lives by outcome: free, or the reason of a quarantine
	refusals map[string]int // number of errors of ADD and DEL by message
	changed  map[string]int // how many pods changed a setting, by its name
}

// remains are the traces of a life: the netdev on the host with the settings of its driver and the
// kernel, the PF's report about the VF, and the settings in effect.
type remains struct {
	Netdev   node.NetdevState
	Settings map[string]string
	Told     node.VFState
	Effect   stage.VF
}

func newLives(t *testing.T, seed uint64) *lives {
	t.Helper()
	pf := card.PFs(t)[0]
	l := &lives{
		t: t, pf: pf, vfs: node.VFs(t, pf), stage: stage.New(t, pf), ended: make(chan struct{}, 1),
		host:     netns.Current(t),
		outcomes: map[string]int{}, refusals: map[string]int{}, changed: map[string]int{},
	}

	l.Node = node.New(t, node.Options{Pools: []v1alpha1.DevicePool{
		node.Pool("fast", v1alpha1.FunctionSelector{RootDevices: []string{string(pf)}}),
	}})
	t.Cleanup(func() {
		l.stage.Write(t, "")
		l.stage.Clear(t)
		if t.Failed() {
			t.Logf("to do the same again: -only lives -seed %d", seed)
		}
	})

	l.stage.Write(t, always)
	for index := range l.vfs {
		l.before = append(l.before, l.remains(index))
	}

	return l
}

// remains reads the present state. The card must report the truth, and the netdev must be on the
// host.
func (l *lives) remains(index int) remains {
	effect := l.stage.Settled(l.t, index)
	host := node.HostState(l.t)
	netdev := host[string(l.vfs[index].Address)]
	has, err := settings.Of(l.host, netdev.Name)
	if err != nil {
		l.t.Errorf("settings of %s: %v", netdev.Name, err)
	}
	return remains{
		Netdev: netdev, Settings: has, Told: host.VF(l.t, l.pf, index), Effect: effect,
	}
}

// weather changes the card's mood again and again.
func (l *lives) weather(stop <-chan struct{}, random *rand.Rand) {
	names := slices.Sorted(maps.Keys(moods))
	for {
		l.card.Lock()
		l.mood = always + moods[names[random.IntN(len(names))]]
		l.stage.Write(l.t, l.mood)
		l.card.Unlock()

		select {
		case <-stop:
			return
		case <-time.After(time.Duration(100+random.IntN(700)) * time.Millisecond):
		}
	}
}

// truly calls do while the card reports the truth and refuses nothing.
func (l *lives) truly(do func()) {
	l.card.Lock()
	defer l.card.Unlock()
	l.stage.Write(l.t, always)
	defer func() { l.stage.Write(l.t, l.mood) }()
	do()
}

// hide makes the card not report a VF for as long as a reset takes.
func (l *lives) hide(index int) error {
	l.card.Lock()
	defer l.card.Unlock()
	defer func() { l.stage.Write(l.t, l.mood) }()

	l.stage.Write(l.t, fmt.Sprintf("%smac.reset=%d\n", always, outlasting.Milliseconds()))
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer handle.Close()

	pf, err := handle.LinkByName(card.Netdev(l.pf))
	if err != nil {
		return err
	}

	mac, err := net.ParseMAC(l.stage.Settled(l.t, index).MAC)
	if err != nil {
		return err
	}

	return handle.LinkSetVfHardwareAddr(pf, index, mac)
}

// killNowAndThen kills the agent after some lives. It returns the number of kills when all lives
// have ended. A new agent again tries the full time to release a VF that the card does not report,
// so an agent that must give up is not killed.
func (l *lives) killNowAndThen(random *rand.Rand) (kills int) {
	wait := 3
	for range l.ended {
		if wait--; wait > 0 || !l.agent.TryLock() {
			continue
		}

		// so that the agent is killed at a random moment of other lives
		time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond)
		l.Kill()
		l.Start()
		l.agent.Unlock()
		kills++
		wait = 10 + random.IntN(10)
	}

	return kills
}

// lead runs lives on a VF, one after the other. Each three lives have one of each way, so that a few
// lives have a hostile pod too.
func (l *lives) lead(index int, random *rand.Rand) {
	ways := []way{ordinary, hostile, namespaceGone}
	for {
		number := int(l.next.Add(1)) - 1
		if number >= *lifeCount || l.t.Failed() {
			return
		}

		one := &lifetime{lives: l, index: index, vf: l.vfs[index], random: random,
			way: ways[number%len(ways)]}
		one.name = fmt.Sprintf("life%d", number)
		one.late = number >= len(l.vfs)
		begin := time.Now()
		if err := one.live(byte(number%250 + 1)); err != nil {
			l.t.Errorf("%s on %s, %s: %v", one.name, one.vf, one.way, err)
		}

		l.t.Logf("%s on %s, %s: %s after %s", one.name, one.vf, one.way, one.end,
			time.Since(begin).Round(time.Millisecond))
		l.ended <- struct{}{}
	}
}

// conclude logs the results of the lives, and fails the test if nothing was seen.
func (l *lives) conclude(kills int) {
	l.t.Helper()
	l.t.Logf("%d of %d pods ran, the agent was killed %d times; outcomes %v",
		l.ran, *lifeCount, kills, l.outcomes)

	for _, text := range slices.Sorted(maps.Keys(l.refusals)) {
		l.t.Logf("%d times: %s", l.refusals[text], text)
	}

	l.t.Logf("hostile pods changed %d settings: %s", len(l.changed),
		strings.Join(slices.Sorted(maps.Keys(l.changed)), ", "))
	if len(l.changed) < 50 {
		l.t.Errorf("hostile pods changed %d settings, want 50 at least", len(l.changed))
	}

	if l.ran < *lifeCount/2 {
		l.t.Errorf("%d of %d pods ran, want half of them at least", l.ran, *lifeCount)
	}

	for _, outcome := range []string{"free", "NotRestored"} {
		if l.outcomes[outcome] == 0 {
			l.t.Errorf("no life ended as %s: %v", outcome, l.outcomes)
		}
	}
}

// lifetime is one pod from its creation to its end.
type lifetime struct {
	*lives
	index      int
	vf         function.ID
	random     *rand.Rand
	way        way
	late       bool // lives ended before on the same VF
	name       string
	end        string           // the outcome of the life
	accomplice *netns.Namespace // belongs to a hostile pod and outlives it
}

func (l *lifetime) live(host byte) error {
	if err := l.await("allocated", l.allocate); err != nil {
		return err
	}

	pod := l.NewPod(l.name, host)
	conf := l.conf()
	_, refused := pod.Add(l.vf, conf)
	l.note("ADD", refused)

	if refused == nil {
		if err := l.run(pod); err != nil {
			return err
		}
	}

	err := l.await("DEL", func() error {
		err := pod.Del(l.vf, conf)
		l.note("DEL", err)
		return err
	})

	if err != nil {
		return err
	}

	return l.outcome()
}

// allocate plays the kubelet, which gives a pod only healthy Functions.
func (l *lifetime) allocate() error {
	if !slices.Contains(l.Kubelet.Healthy(resource), l.vf.String()) {
		return fmt.Errorf("%s is not offered: %v", l.vf, l.Kubelet.Devices(resource))
	}
	_, err := l.Allocate(resource, l.vf)
	return err
}

// conf returns a configuration with some settings that the card supports.
func (l *lifetime) conf() node.NetConf {
	conf := node.NetConf{}
	for name, value := range map[string]any{
		"mac": fmt.Sprintf("02:00:00:00:01:%02x", l.index), "mtu": 1400, "vlan": 100 + l.index,
		"max_tx_rate": 500, "spoofchk": "on", "trust": "on",
	} {
		if l.random.IntN(2) == 0 {
			conf[name] = value
		}
	}

	return conf
}

// note counts the error of a command, without the parts of the message that differ each time.
func (l *lifetime) note(command string, refused error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()

	switch {
	case refused != nil:
		text := strings.NewReplacer(l.name, "<pod>", l.vf.String(), "<VF>").Replace(refused.Error())
		l.refusals[command+": "+text]++
	case command == "ADD":
		l.ran++
	}
}

// noteChanged counts the settings that a pod has changed.
func (l *lifetime) noteChanged(settings []string) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	for _, name := range settings {
		l.changed[name]++
	}
}

// run plays the pod while it has its interface.
func (l *lifetime) run(pod *node.Pod) error {
	if !pod.Ready() {
		return errors.New("net1 is not there, up and with its address after ADD")
	}

	if l.late && l.tried.CompareAndSwap(false, true) {
		l.way = unseen
		l.agent.Lock()
		return l.hide(l.index)
	}

	switch l.way {
	case hostile:
		return l.harm(pod)
	case namespaceGone:
		return pod.Close()
	}

	return nil
}

// harm does what a tenant with NET_ADMIN can do: it changes each setting of the driver and the
// kernel, reads all frames, sets other names and another MAC and MTU, and puts a macvlan on the interface into the namespace of an accomplice. A VF that
// resets refuses some of it.
func (l *lifetime) harm(pod *node.Pod) error {
	h := pod.Handle()
	net1, err := h.LinkByName("net1")
	if err != nil {
		return err
	}

	changed, err := settings.ChangeAll(pod.Namespace, "net1")
	if err != nil {
		return err
	}
	l.noteChanged(changed)

	l.accomplice, err = netns.Make(filepath.Join(l.t.TempDir(), "accomplice"))
	if err != nil {
		return err
	}

	spy := netlink.NewLinkAttrs()
	spy.Name, spy.ParentIndex = "spy", net1.Attrs().Index
	spy.Namespace = netlink.NsFd(l.accomplice.Fd())
	steps := []error{
		h.SetPromiscOn(net1), h.LinkSetAllmulticastOn(net1),
		h.LinkAdd(&netlink.Macvlan{LinkAttrs: spy, Mode: netlink.MACVLAN_MODE_PRIVATE}),
		h.LinkSetAlias(net1, "evil"), h.LinkSetDown(net1), h.LinkSetName(net1, "evil0"),
	}

	for n := range 20 {
		steps = append(steps,
			h.LinkAddAltName(net1, fmt.Sprintf("%s-%d-%s", l.name, n, strings.Repeat("x", 100))))
	}

	_ = h.LinkSetMTU(net1, 1000+l.random.IntN(400))
	_ = h.LinkSetHardwareAddr(net1, []byte{0x02, 0, 0, 0, 0, 0x66})

	return errors.Join(steps...)
}

// outcome waits for the outcome of the life. A free Function must be as it was, at once. A Function
// in quarantine must become free when the card reports the truth and the accomplice has gone.
func (l *lifetime) outcome() error {
	var quarantine *nodestate.Quarantine
	err := l.await("an outcome", func() (err error) {
		quarantine, err = l.left()
		return err
	})
	if err != nil {
		return err
	}

	outcome := "free"
	if quarantine != nil {
		outcome = quarantine.Reason
		if outcome == "" || quarantine.Message == "" {
			return fmt.Errorf("quarantine without reason: %+v", quarantine)
		}
	} else if err := l.clean(); err != nil {
		return err
	}

	l.end = outcome
	l.mutex.Lock()
	l.outcomes[outcome]++
	l.mutex.Unlock()

	if l.accomplice != nil {
		if err := l.accomplice.Close(); err != nil {
			return err
		}
	}

	if l.way == unseen {
		l.agent.Unlock()
	}

	err = l.await("the end of the reset", func() error {
		if l.stage.VF(l.t, l.index).Resets {
			return fmt.Errorf("%s resets", l.vf)
		}
		return nil
	})

	if err != nil {
		return err
	}

	l.truly(func() { err = l.freed(quarantine != nil) })
	return err
}

// left returns the agent's quarantine of the Function, or nil and no error if the Function is free.
func (l *lifetime) left() (*nodestate.Quarantine, error) {
	ctx, cancel := context.WithTimeout(l.t.Context(), 5*time.Second)
	defer cancel()

	state, err := l.Admin().State(ctx)
	if err != nil {
		return nil, err
	}

	i := slices.IndexFunc(state.Functions, func(f nodestate.Function) bool { return f.ID == l.vf })
	switch {
	case i < 0:
		return nil, fmt.Errorf("the agent does not know %s", l.vf)
	case state.Functions[i].Attachment == nil:
		return nil, nil
	case state.Functions[i].Attachment.Quarantine != nil:
		return state.Functions[i].Attachment.Quarantine, nil
	}

	return nil, fmt.Errorf("%s is %s", l.vf, state.Functions[i].Attachment.State)
}

// clean checks that a Function that the agent reports as free has no settings of the pod in effect,
// whatever the card reports.
func (l *lifetime) clean() error {
	want, got := l.before[l.index].Effect, l.stage.VF(l.t, l.index)
	got.Resets = want.Resets // a reset takes nothing back
	if diff := gocmp.Diff(want, got); diff != "" {
		return fmt.Errorf("the Function is free, but in effect is (-before +now):\n%s", diff)
	}
	if l.accomplice == nil {
		return nil
	}
	if _, err := l.accomplice.Handle().LinkByName("spy"); err == nil {
		return errors.New("the Function is free, but an accomplice still has a macvlan on it")
	}

	return nil
}

// freed ends a quarantine, and checks that all is as it was. The card reports the truth. A driver
// that is bound again may have taken the name of a netdev that is in a pod. Then the agent logs
// that this netdev has another name from now on.
func (l *lifetime) freed(quarantined bool) error {
	if quarantined {
		err := l.await("free again", func() error {
			q, err := l.left()
			if err != nil || q == nil {
				return err
			}
			ctx, cancel := context.WithTimeout(l.t.Context(), 10*time.Second)
			defer cancel()
			said, err := l.Admin().Release(ctx, nodestate.Release{Function: l.vf})
			return fmt.Errorf("release: %q, %w", said, err)
		})
		if err != nil {
			return err
		}
	}

	now, want := l.remains(l.index), l.before[l.index]
	note := fmt.Sprintf("netdev=%s reason=\"name %s is taken", now.Netdev.Name, want.Netdev.Name)
	if now.Netdev.Name != want.Netdev.Name && strings.Contains(l.Log(), note) {
		l.end += ", with another name"
		l.before[l.index].Netdev.Name = now.Netdev.Name
		want.Netdev.Name = now.Netdev.Name
	}

	if diff := gocmp.Diff(want, now); diff != "" {
		return fmt.Errorf("(-before +now):\n%s", diff)
	}

	return nil
}

// await waits until check returns no error. It may be called on every goroutine.
func (l *lifetime) await(what string, check func() error) error {
	for end := time.Now().Add(2 * node.Patience); ; time.Sleep(50 * time.Millisecond) {
		err := check()
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: not within %s: %w", what, 2*node.Patience, err)
		}
	}
}
