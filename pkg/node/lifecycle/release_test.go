// SPDX-License-Identifier: Apache-2.0

package lifecycle_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// attachesNothing has the methods of an engine that a release does not call.
type attachesNothing struct{}

var errNoAttach = errors.New("a release attaches nothing")

func (attachesNothing) Plan(
	context.Context, netdev.Device, string, function.Interface,
) (netdev.Snapshot, netdev.Place, error) {
	return netdev.Snapshot{}, netdev.Place{}, errNoAttach
}

func (attachesNothing) Attach(
	context.Context, netdev.Device, netdev.Snapshot, netdev.Place, function.Interface,
) (netdev.Observed, error) {
	return netdev.Observed{}, errNoAttach
}

func (attachesNothing) Add(
	context.Context, netdev.Attached, []netip.Prefix, []function.Route,
) (netdev.Observed, error) {
	return netdev.Observed{}, errNoAttach
}

func (attachesNothing) Check(context.Context, netdev.Device, netdev.Attached) ([]string, error) {
	return nil, errNoAttach
}

// returning plays the kernel that ends a namespace in the background: for some calls, the netdev is
// in no namespace.
type returning struct {
	attachesNothing
	// gone is the number of calls that do not find the netdev.
	gone  int
	looks int
	fail  error
	// where is the error of these calls; nil stands for netdev.ErrGone.
	where error
	notes []string
	// enforced has the snapshots that were restored without a netdev.
	enforced []netdev.Snapshot
}

func (r *returning) Restore(
	_ context.Context, _ netdev.Device, s netdev.Snapshot, _ netdev.Place,
) (netdev.Restored, error) {
	if s.Name == "" {
		r.enforced = append(r.enforced, s)
		return netdev.Restored{}, r.fail
	}

	r.looks++
	if r.looks <= r.gone {
		return netdev.Restored{}, cmp.Or(r.where, netdev.ErrGone)
	}
	return netdev.Restored{Name: "ens3f0v1", Notes: r.notes}, r.fail
}

func (r *returning) Alive(netdev.Place) (bool, error) { return false, nil }

func (r *returning) Holds(netdev.Place, netdev.Identity) (bool, error) { return false, nil }

func TestNowhere(t *testing.T) {
	const never = 1 << 30
	hardware, virtual := netdev.Identity{Parent: "0000:3b:02.1", Bus: "pci"}, netdev.Identity{
		Kind: "veth", Peer: 3,
	}
	there := finderFunc(func(function.ID) (string, error) { return "", nil })
	removed := finderFunc(func(function.ID) (string, error) {
		return "", fmt.Errorf("is gone: %w", fs.ErrNotExist)
	})
	unknown := finderFunc(func(function.ID) (string, error) {
		return "", errors.New("cannot be read")
	})
	driverless := finderFunc(func(function.ID) (string, error) { return "", inventory.ErrNoNetdev })
	anew := finderFunc(func(function.ID) (string, error) { return "ens3f0v1", nil })
	refusal := errors.New("refused")
	tests := map[string]struct {
		identity netdev.Identity
		gone     int
		where    error
		fail     error
		netdevs  finderFunc
		// stopped is the age of the release when the netdev is looked for again.
		stopped time.Duration
		err     error
	}{
		"returns late": {hardware, 2, nil, nil, there, 0, nil},
		"hardware is expected back": {
			hardware, never, nil, nil, there, 0, netdev.ErrGone,
		},
		"hardware does not come back": {
			hardware, never, nil, nil, there, time.Hour, nil,
		},
		"hardware lost its driver": {hardware, never, nil, nil, driverless, 0, nil},
		"it lost its driver, the pod lives": {
			hardware, never, netdev.ErrAway, nil, driverless, 0, nil,
		},
		"a veth in a namespace of the pod": {
			virtual, never, netdev.ErrAway, nil, driverless, 0, netdev.ErrAway,
		},
		"what the PF enforces cannot be put back": {
			hardware, never, nil, refusal, driverless, 0, refusal,
		},
		"a veth ends with its pod":      {virtual, never, nil, nil, there, 0, nil},
		"the Function is gone":          {hardware, never, nil, nil, removed, 0, nil},
		"a property cannot be put back": {hardware, 0, nil, refusal, there, 0, refusal},
		"whether the Function is gone is not known": {
			hardware, never, nil, nil, unknown, 0, netdev.ErrGone,
		},
		"it is not known for long": {hardware, never, nil, nil, unknown, time.Hour, nil},
		"the Function is gone, not the pod": {
			hardware, never, netdev.ErrAway, nil, removed, 0, nil,
		},
		"in a namespace that the pod made": {
			hardware, never, netdev.ErrAway, nil, there, 0, netdev.ErrAway,
		},
		"a veth that was made anew": {
			virtual, never, netdev.ErrAway, nil, anew, 0, nil,
		},
		"a veth in one, without its Function": {
			virtual, never, netdev.ErrAway, nil, removed, 0, netdev.ErrAway,
		},
	}

	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := openJournal(t)
				a := journal.Attachment{
					Function: lifecycletest.ID(0), Claim: journal.Claim{UID: "claim-1"},
					State: journal.Detaching, BootID: "boot-1", Sandbox: "s1",
					Before:    &netdev.Snapshot{Name: "ens3f0v1", Identity: test.identity},
					StoppedAt: time.Now(),
				}

				must.Succeed(t, j.Put(a))
				engine := &returning{gone: test.gone, fail: test.fail, where: test.where}
				r := lifecycle.New(j, engine, test.netdevs, lifecycle.Options{
					BootID: "boot-1", Patience: wait.Backoff{Duration: time.Millisecond, Steps: 4},
				}, logr.Discard())
				err := r.Unprepare(t.Context(), "claim-1")
				if test.stopped > 0 {
					if !errors.Is(err, netdev.ErrGone) {
						t.Errorf("error %v at first, want %v", err, netdev.ErrGone)
					}
					time.Sleep(test.stopped)
					err = r.Unprepare(t.Context(), "claim-1")
				}

				if !errors.Is(err, test.err) {
					t.Errorf("error %v, want %v", err, test.err)
				}

				record, ok := j.Get(a.Function)
				if free := test.err == nil; ok == free {
					t.Errorf("free %v, want %v", !ok, free)
				}
				if ok && record.State != journal.Releasing {
					t.Errorf("state %s", record.State)
				}
			})
		})
	}
}

// inVLAN returns a VF that is in a VLAN for its pod, and was in none before.
func inVLAN() journal.Attachment {
	return journal.Attachment{
		Function: function.ID{Address: "0000:3b:02.1"}, PF: "0000:3b:00.0", PFName: "ens3f0",
		VFIndex: 1,
		Claim:   journal.Claim{UID: "claim-1"}, State: journal.Attaching, BootID: "boot-1",
		Sandbox: "s1", StoppedAt: time.Now(),
		Before: &netdev.Snapshot{
			Name: "ens3f0v1", VF: &netdev.VFState{Proto: "802.1q"}, Rate: &function.Rate{Max: 10},
			Identity: netdev.Identity{Parent: "0000:3b:02.1", Bus: "pci"},
		},
		Interface: function.Interface{Name: "net1", VF: &function.VFConfig{VLAN: new(100)}},
	}
}

// netdevs has the netdevs of inVLAN: for each address, the name on the host, or an error that says
// why there is no netdev.
type netdevs map[pci.Address]any

func (n netdevs) Netdev(id function.ID) (string, error) {
	name, _ := n[id.Address].(string)
	err, _ := n[id.Address].(error)
	return name, err
}

// The settings of the PF are restored even if the netdev is gone.
func TestGoneLeavesPFAsItWas(t *testing.T) {
	t.Parallel()
	a := inVLAN()
	for name, where := range map[string]error{
		"with its namespace": netdev.ErrGone, "from its namespace": netdev.ErrAway,
	} {
		t.Run(name, func(t *testing.T) {
			j, engine := openJournal(t), &returning{gone: 1 << 30, where: where}
			must.Succeed(t, j.Put(a))

			r := lifecycle.New(j, engine,
				netdevs{a.PF: "ens3f0", a.Function.Address: inventory.ErrNoNetdev},
				lifecycle.Options{BootID: "boot-1", Patience: wait.Backoff{Steps: 1}},
				logr.Discard())

			must.Succeed(t, r.Unprepare(t.Context(), "claim-1"))
			if want := []netdev.Snapshot{
				{VF: a.Before.VF, Rate: a.Before.Rate},
			}; !reflect.DeepEqual(engine.enforced, want) {
				t.Errorf("restored %+v, want %+v", engine.enforced, want)
			}
		})
	}
}

// The next pod does not get a VF with the last pod's settings, even if the PF was out of reach at
// the release.
func TestPFAway(t *testing.T) {
	t.Parallel()
	const vf, pf = "0000:3b:02.1", "0000:3b:00.0"
	inVLAN := inVLAN()
	without := inVLAN
	without.Interface.VF = nil
	for name, test := range map[string]struct {
		attachment journal.Attachment
		netdevs    netdevs
		// lost says that the VF's netdev is gone.
		lost    bool
		pending bool
	}{
		"PF on the host": {
			inVLAN, netdevs{pf: "ens3f0", vf: "ens3f0v1"}, false, false,
		},
		"PF in another namespace": {inVLAN, netdevs{vf: "ens3f0v1"}, false, true},
		"VF without a netdev beside it": {
			inVLAN, netdevs{vf: inventory.ErrNoNetdev}, true, true,
		},
		"PF without a driver": {
			inVLAN, netdevs{pf: inventory.ErrNoNetdev, vf: "ens3f0v1"}, false, true,
		},
		"VFs ended with the PF's driver": {
			inVLAN, netdevs{pf: inventory.ErrNoNetdev, vf: fs.ErrNotExist}, true, false,
		},
		"card unplugged": {
			inVLAN, netdevs{pf: fs.ErrNotExist, vf: fs.ErrNotExist}, true, false,
		},
		"nothing was enforced for the pod": {without, netdevs{vf: "ens3f0v1"}, false, false},
	} {
		for operation, do := range map[string]func(*lifecycle.Manager) error{
			"release": func(r *lifecycle.Manager) error {
				return r.Unprepare(t.Context(), "claim-1")
			},
			"detach": func(r *lifecycle.Manager) error {
				return r.Detach(t.Context(), inVLAN.Function, "s1")
			},
		} {
			t.Run(name+", "+operation, func(t *testing.T) {
				j, engine, netdevs := openJournal(t), &returning{}, maps.Clone(test.netdevs)
				if test.lost {
					engine.gone = 1 << 30
				}

				must.Succeed(t, j.Put(test.attachment))
				options := lifecycle.Options{BootID: "boot-1", Patience: wait.Backoff{Steps: 1}}
				err := do(lifecycle.New(j, engine, netdevs, options, logr.Discard()))
				record, exists := j.Get(inVLAN.Function)
				if touched := exists && record.Before != nil; touched != test.pending {
					t.Errorf("there is a record %v: %+v", exists, record)
				}
				if !test.pending {
					must.Succeed(t, err)
					return
				}

				mustFail(t, err,
					`its PF 0000:3b:00.0 (ens3f0) has no netdev on the host, so that what it enforces for the pod `+
						`cannot be undone: vf vlan is "100 qos 0 proto 802.1q", was "none"; move the PF's netdev back`)
				netdevs[pf] = "ens3f0"
				must.Succeed(t, do(lifecycle.New(j, engine, netdevs, options, logr.Discard())))
			})
		}
	}
}

// TestOwnSF: an SF that was made for its owner is deleted by its release. If an agent deleted it
// and then ended, the next agent does not wait for it, and does not report an error.
func TestOwnSF(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		netdev any
		looks  int
		log    []string
	}{
		"deleted": {
			fmt.Errorf("is gone: %w", fs.ErrNotExist), 0, []string{"deleted already", "released"},
		},
		"there": {"ens3f0s88", 1, []string{"released"}},
	} {
		t.Run(name, func(t *testing.T) {
			j, engine := openJournal(t), &returning{
				notes: []string{"name ens3f0s88 is taken by another netdev"},
			}
			a := withSetup(journal.Attached)
			a.Setup = &journal.Setup{SF: true}
			must.Succeed(t, j.Put(a))
			var logged []string
			log := funcr.New(func(_, line string) {
				logged = append(logged, line)
			}, funcr.Options{Verbosity: 1})
			r := lifecycle.New(j, engine, netdevs{a.Function.Address: test.netdev},
				lifecycle.Options{BootID: "boot-1", Setup: orderedSetup{&order{}}}, log)
			must.Succeed(t, r.Unprepare(t.Context(), "claim-1"))
			if _, exists := j.Get(a.Function); exists || engine.looks != test.looks {
				t.Errorf("there is a record: %v; %d looks, want %d", exists, engine.looks,
					test.looks)
			}
			if !slices.EqualFunc(logged, test.log, strings.Contains) {
				t.Errorf("logged %q, want %q", logged, test.log)
			}
		})
	}
}

// A netdev that was in no namespace when its caller gave up does not count as gone.
func TestNowhereCancelled(t *testing.T) {
	t.Parallel()
	j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
	must.Succeed(t, err)
	defer j.Close()

	must.Succeed(t, j.Put(journal.Attachment{
		Function: lifecycletest.ID(0), Claim: journal.Claim{UID: "claim-1"},
		State: journal.Detaching, BootID: "boot-1",
		Before: &netdev.Snapshot{Name: "ens3f0v1", Identity: netdev.Identity{Kind: "veth"}},
	}))

	ctx, cancel := context.WithCancel(t.Context())
	netdevs := finderFunc(func(function.ID) (string, error) { cancel(); return "", nil })
	r := lifecycle.New(j, &returning{gone: 1 << 30}, netdevs, lifecycle.Options{BootID: "boot-1"},
		logr.Discard())
	if err := r.Unprepare(ctx, "claim-1"); err == nil {
		t.Error("released")
	}
	if record, ok := j.Get(lifecycletest.ID(0)); !ok || record.State != journal.Releasing {
		t.Errorf("record %v, state %s", ok, record.State)
	}
}

func openJournal(t *testing.T) *journal.Journal {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
	must.Succeed(t, err)
	t.Cleanup(func() { j.Close() })
	return j
}

// releasing returns the record of a Function whose release waits for a hook.
func releasing(hooks *journal.Hooks) journal.Attachment {
	a := claimed(0)
	a.State, a.StoppedAt, a.RestoredAt, a.Hooks = journal.Releasing, time.Unix(1e9,
		0).UTC(), time.Unix(1e9+1, 0).UTC(), hooks
	return a
}

func TestFreeAtOnce(t *testing.T) {
	t.Parallel()
	j := openJournal(t)
	r := lifecycle.New(j, nil, nil, lifecycle.Options{}, logr.Discard())
	must.Succeed(t, r.Free(t.Context(), lifecycletest.ID(0)))
	reserved := claimed(0)
	reserved.State = journal.Reserved
	must.Succeed(t, j.Put(reserved))
	must.Succeed(t, r.Free(t.Context(), lifecycletest.ID(0)))
}

func TestFreeWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := openJournal(t)
		queue := &hooks{name: "port"}
		r := lifecycle.New(j, nil, nil, lifecycle.Options{Hooks: queue}, logr.Discard())
		must.Succeed(t, j.Put(releasing(&journal.Hooks{Next: "port"})))
		done := make(chan error, 1)
		go func() { done <- r.Free(t.Context(), lifecycletest.ID(0)) }()
		synctest.Wait()
		if len(queue.added) == 0 {
			t.Error("who waits for hooks does not see to it that they run")
		}

		must.Succeed(t, j.Put(releasing(&journal.Hooks{Next: "10-tell", Done: []string{"port"}})))
		synctest.Wait()

		select {
		case err := <-done:
			t.Fatalf("Free = %v before the hooks are done", err)
		default:
		}

		must.Succeed(t, j.Delete(lifecycletest.ID(0)))
		must.Succeed(t, <-done)
	})
}

func TestFreeGivesUp(t *testing.T) {
	tests := map[string]struct {
		record journal.Attachment
		want   []string
	}{
		"a hook runs": {
			releasing(&journal.Hooks{Next: "port"}),
			[]string{"pod default/pod", "waits for its post-delete hooks"},
		},
		"a hook fails": {releasing(&journal.Hooks{
			Next: "port", Attempts: 3, Error: "xPU xpu-1 cannot be reached",
		}),
			[]string{"pod default/pod", "hook port", "xPU xpu-1 cannot be reached"}},
		"the netdev is not back": {journal.Attachment{
			Function: lifecycletest.ID(0), State: journal.Releasing, BootID: "boot-1",
			StoppedAt: time.Now(),
			Before: &netdev.Snapshot{
				Name: "ens3f0v1", Identity: netdev.Identity{Parent: "0000:3b:02.1", Bus: "pci"},
			},
		}, []string{"is not back from its last pod", "refused"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := openJournal(t)
				must.Succeed(t, j.Put(test.record))
				netdevs := finderFunc(func(function.ID) (string, error) { return "", nil })
				r := lifecycle.New(j, &returning{fail: errors.New("refused")}, netdevs,
					lifecycle.Options{
						BootID: "boot-1", Hooks: &hooks{},
						Patience: wait.Backoff{Duration: time.Millisecond, Steps: 2},
					}, logr.Discard())

				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()

				begin := time.Now()
				err := r.Free(ctx, lifecycletest.ID(0))
				if !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != time.Minute {
					t.Errorf("error %v after %s, want the end of a minute", err, time.Since(begin))
				}

				for _, text := range append(test.want, "Function "+lifecycletest.ID(0).String()) {
					if !strings.Contains(err.Error(), text) {
						t.Errorf("error %q, want %q in it", err, text)
					}
				}
			})
		})
	}
}

// A release that failed is continued for a caller that waits.
func TestFreeContinues(t *testing.T) {
	t.Parallel()
	j := openJournal(t)
	must.Succeed(t, j.Put(journal.Attachment{
		Function: lifecycletest.ID(0), State: journal.Releasing, BootID: "boot-1",
		StoppedAt: time.Now(), Before: &netdev.Snapshot{Name: "ens3f0v1"},
	}))

	netdevs := finderFunc(func(function.ID) (string, error) { return "", nil })
	r := lifecycle.New(j, &returning{}, netdevs, lifecycle.Options{BootID: "boot-1"},
		logr.Discard())
	must.Succeed(t, r.Free(t.Context(), lifecycletest.ID(0)))
	if _, exists := j.Get(lifecycletest.ID(0)); exists {
		t.Error("not free")
	}
}

// TestDetachOfARequestThatFailed: the stop of a sandbox also ends a CNI request for a claim's
// Function that was never attached. The Function is again as the claim wants it.
func TestDetachOfARequestThatFailed(t *testing.T) {
	t.Parallel()
	claimed := claimed(0)
	for name, test := range map[string]struct {
		request *journal.CNI
		over    bool
	}{
		"of this sandbox": {
			&journal.CNI{ContainerID: "s1", IfName: "net1", Claimed: &claimed.Interface}, true,
		},
		"of another": {
			&journal.CNI{ContainerID: "s2", IfName: "net1", Claimed: &claimed.Interface}, false,
		},
		"without a claim": {&journal.CNI{ContainerID: "s1", IfName: "net1"}, false},
		"of nobody":       {nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			j := openJournal(t)
			a := claimed
			a.State, a.CNI, a.Interface.Name = journal.Reserved, test.request, "net1"
			must.Succeed(t, j.Put(a))
			r := lifecycle.New(j, &returning{}, nil, lifecycle.Options{BootID: "boot-1"},
				logr.Discard())
			must.Succeed(t, r.Detach(t.Context(), a.Function, "s1"))
			if got, _ := j.Get(a.Function); got.State != journal.Reserved ||
				(got.CNI == nil) != test.over {
				t.Errorf("record %+v", got)
			}
		})
	}
}
