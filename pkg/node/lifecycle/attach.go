package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Sandbox is the pod sandbox that wants a Function.
type Sandbox struct {
	// ID is that of the sandbox container; a pod gets a new one for each of its sandboxes.
	ID string
	// NetNS is the path of the sandbox's network namespace.
	NetNS string
	Pod   journal.Pod
}

// Attach takes a reserved Function into a sandbox as the interface that was reserved. For the sandbox that has it
// already it returns what it did the first time. From an older sandbox of the same pod, or one that is gone, the
// Function is first brought back; that another pod still has it is an error.
func (m *Manager) Attach(ctx context.Context, id function.ID, sandbox Sandbox) (netdev.Observed, error) {
	observed, err := m.attach(ctx, id, sandbox)
	if err != nil {
		return netdev.Observed{}, fmt.Errorf("Function %s: %w", id, err)
	}
	return observed, nil
}

func (m *Manager) attach(ctx context.Context, id function.ID, sandbox Sandbox) (netdev.Observed, error) {
	if sandbox.ID == "" || sandbox.NetNS == "" {
		return netdev.Observed{}, fmt.Errorf("sandbox %q with network namespace %q: both must be given", sandbox.ID, sandbox.NetNS)
	}
	for {
		settled, err := m.settleFor(ctx, id, sandbox)
		if err != nil {
			return netdev.Observed{}, err
		}
		if settled.step == Keep {
			return *settled.Record.Observed, nil
		}
		observed, touched, err := m.moveLocked(ctx, settled, sandbox)
		if errors.Is(err, errChanged) {
			continue
		}
		if err != nil && touched {
			err = errors.Join(err, m.endOne(context.WithoutCancel(ctx), party{event: SandboxStops, sandbox: sandbox.ID}, id))
		}
		return observed, err
	}
}

// settleFor makes way for a sandbox. A CNI request has settled that when it reserved the Function.
func (m *Manager) settleFor(ctx context.Context, id function.ID, sandbox Sandbox) (Settled, error) {
	have, exists := m.journal.Get(id)
	if !exists || have.CNI == nil {
		p := party{event: SandboxStarts, pod: sandbox.Pod, sandbox: sandbox.ID, netNS: sandbox.NetNS}
		return m.settle(ctx, p, id)
	}
	if have.CNI.ContainerID != sandbox.ID {
		return Settled{}, taken("is reserved for %s, not for sandbox %s", owner(have), sandbox.ID)
	}
	switch have.State {
	case journal.Reserved:
		return Settled{Record: have, Exists: true, step: Attach}, nil
	case journal.Attached:
		return Settled{Record: have, Exists: true, step: Keep}, nil
	}
	return Settled{}, fmt.Errorf("is %s for sandbox %s; try again", have.State, have.Sandbox)
}

// errChanged says that a record is not the one any more that was decided about.
var errChanged = errors.New("has changed meanwhile; try again")

// moveLocked also says whether a failure left more than a reservation behind.
func (m *Manager) moveLocked(
	ctx context.Context, settled Settled, sandbox Sandbox,
) (observed netdev.Observed, touched bool, err error) {
	unlock, err := m.journal.Lock(ctx, settled.Record.Function)
	if err != nil {
		return netdev.Observed{}, false, err
	}
	defer unlock()
	record, _ := m.journal.Get(settled.Record.Function)
	if !reflect.DeepEqual(record, settled.Record) {
		return netdev.Observed{}, false, errChanged
	}
	return m.move(ctx, record, sandbox)
}

// move looks at the netdev, and takes it into the sandbox.
func (m *Manager) move(ctx context.Context, record journal.Attachment, sandbox Sandbox) (observed netdev.Observed, touched bool, err error) {
	device, before, place, err := m.plan(ctx, record, sandbox.NetNS)
	for tries := 0; record.AnyName && errors.Is(err, netdev.ErrNameTaken) && tries < maxNames; tries++ {
		record.Interface.Name = m.otherName(record)
		device, before, place, err = m.plan(ctx, record, sandbox.NetNS)
	}
	if err != nil {
		return netdev.Observed{}, false, err
	}
	record.State, record.Sandbox, record.Pod, record.BootID = journal.Attaching, sandbox.ID, sandbox.Pod, m.options.BootID
	record.Before, record.Place = &before, place
	record, touched, err = m.carry(ctx, record, device, before, record.Interface)
	if err != nil {
		return netdev.Observed{}, touched, err
	}
	return *record.Observed, true, nil
}

// carry is the write-ahead order: write down, touch, write down. now is what the netdev is. Whatever ends it after the
// first write leaves the record's state, Attaching or Reattaching, from which everything else goes on.
func (m *Manager) carry(
	ctx context.Context, record journal.Attachment, device netdev.Device, now netdev.Snapshot, want function.Interface,
) (attached journal.Attachment, touched bool, err error) {
	start := time.Now()
	if err := m.journal.Put(record); err != nil {
		return record, false, err
	}
	observed, err := m.engine.Attach(ctx, device, now, record.Place, want)
	if err != nil {
		return record, true, err
	}
	record.State, record.Observed, record.AttachedAt, record.LostAt = journal.Attached, new(observed), time.Now().UTC(), time.Time{}
	record.Place.Index = observed.Index
	if err := m.journal.Put(record); err != nil {
		return record, true, err
	}
	if m.options.Devices != nil {
		if err := m.options.Devices.Offer(record); err != nil {
			return record, true, err
		}
	}
	m.announce(record)
	m.log.Info("Function attached", "function", record.Function.String(), "interface", observed.Name,
		"pod", record.Pod.Namespace+"/"+record.Pod.Name, "sandbox", record.Sandbox, "took", time.Since(start))
	return record, true, nil
}

// announceTimeout is how long an interface may take to get its carrier before its neighbours are left to find out.
const announceTimeout = 5 * time.Second

// announce has the neighbours told, while the pod goes on.
func (m *Manager) announce(record journal.Attachment) {
	if m.options.Announcer == nil || record.Interface.Userspace || len(record.Observed.Addresses) == 0 {
		return
	}
	m.announcing.Go(func() {
		ctx, cancel := context.WithTimeout(m.lasting, announceTimeout)
		defer cancel()
		if err := m.options.Announcer.Announce(ctx, record.Place, *record.Observed); err != nil {
			m.log.V(1).Info("The interface's addresses are not announced", "function", record.Function.String(), "reason", err.Error())
		}
	})
}

// maxNames is how many names are tried for an interface that nobody named. A pod has a few interfaces.
const maxNames = 64

// otherName is the name after the record's, "net2" after "net1", that no other Function of the pod has.
func (m *Manager) otherName(record journal.Attachment) string {
	var number int
	_, _ = fmt.Sscanf(record.Interface.Name, "net%d", &number) // 0 for any other name
	for {
		number++
		name := fmt.Sprintf("net%d", number)
		if !slices.ContainsFunc(m.journal.ByPod(record.Pod.UID), func(a journal.Attachment) bool {
			return a.Function != record.Function && a.Interface.Name == name
		}) {
			return name
		}
	}
}

// Patience is how often, within 2 s, a netdev is looked for that is not on the host yet: its driver was just bound, udev
// renames it, or it is on its way back from another namespace.
func Patience() wait.Backoff {
	return wait.Backoff{Duration: 5 * time.Millisecond, Factor: 1.5, Steps: 14}
}

// plan finds the netdev and looks at it.
func (m *Manager) plan(ctx context.Context, record journal.Attachment, netNS string) (
	device netdev.Device, before netdev.Snapshot, place netdev.Place, err error,
) {
	waitErr := wait.ExponentialBackoffWithContext(ctx, Patience(), func(ctx context.Context) (bool, error) {
		var found error
		device, found = Device(m.netdevs, record)
		if record.Interface.Userspace {
			device.Name, found = "", nil
		}
		if found == nil {
			before, place, found = m.engine.Plan(ctx, device, netNS, record.Interface)
		}
		if found == nil && !record.Interface.Userspace {
			found = belongs(before, record.Function)
		}
		err = found
		if errors.Is(found, netdev.ErrNoNetdev) {
			return false, nil
		}
		return true, found
	})
	if err == nil {
		err = waitErr
	}
	return device, before, place, err
}

// belongs refuses a netdev that took the name of the Function's between two looks.
func belongs(s netdev.Snapshot, id function.ID) error {
	if s.Identity.Bus == "pci" && id.Subfunction == "" && s.Identity.Parent != string(id.Address) {
		return fmt.Errorf("netdev %s: belongs to Function %s by now: %w", s.Name, s.Identity.Parent, netdev.ErrNoNetdev)
	}
	return nil
}

// Device is a fresh look at the host's side of a Function. The error is a [netdev.ErrNoNetdev] where the Function has no
// netdev on the host; the PF is then there nevertheless, as far as it is known.
func Device(netdevs NetdevFinder, record journal.Attachment) (netdev.Device, error) {
	device := netdev.Device{Port: portOf(record)}
	if record.IsVF() {
		// Without the PF's netdev nothing can be asked or told about the VF. That matters only to who wants it.
		if name, err := netdevs.Netdev(function.ID{Address: record.PF}); err == nil && name != "" {
			device.PF = &netdev.PF{Name: name, Address: string(record.PF), VF: record.VFIndex}
		}
	}
	name, err := netdevs.Netdev(record.Function)
	if err != nil {
		return device, fmt.Errorf("%w: %w", netdev.ErrNoNetdev, err)
	}
	if name == "" {
		return device, netdev.ErrNoNetdev
	}
	device.Name = name
	return device, nil
}
