package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

const (
	// askTimeout is how long the kubelet may take to say what pods have, while a pod waits for that.
	askTimeout = time.Second
	// sweepTimeout is how long kubelet and API server may take while nobody waits.
	sweepTimeout = 10 * time.Second
	// serveTimeout is how long a netdev that is back waits at a time for its Port. Then the log says what is missing, and
	// it is tried again.
	serveTimeout = 30 * time.Second
)

// shown gathers evidence about the owner of the Function.
func (m *Manager) shown(ctx context.Context, e Evidence, t trigger, d *Decision) (bool, error) {
	switch e {
	case NoOtherPod:
		other := m.otherPod(ctx, t, d)
		if other != "" {
			d.refusal = TakenError{other}
		}
		return other == "", nil
	case NamespaceGone:
		return m.namespaceGone(d.Record)
	case Unneeded:
		return m.unneeded(ctx, t, d.Record), nil
	case ReservedForPod:
		return m.reservedForPod(ctx, d.Record, t.pod)
	case NetdevGone:
		return m.netdevGone(d.Record)
	case DeviceBack:
		return m.deviceBack(ctx, d.Record)
	}
	return false, fmt.Errorf("evidence %q: is unknown", e)
}

// otherPod names a pod that the kubelet gave the Function to and that is not the event's, "" for none, and fills in the
// decision's Resource. A kubelet that does not answer, as it is being restarted, keeps no pod from starting.
func (m *Manager) otherPod(ctx context.Context, t trigger, d *Decision) string {
	if m.options.Kubelet == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if t.event == Prepare {
		_, _ = m.options.Kubelet.Refresh(ctx) // it logs an error itself
		return m.options.Kubelet.InUse(d.id, "")
	}
	assigned, err := m.options.Kubelet.Assigned(ctx)
	if err != nil {
		m.log.Info("The kubelet does not say which pods have which Functions; the request is trusted",
			"function", d.id.String(), "pod", t.pod.Namespace+"/"+t.pod.Name, "error", err.Error())
		return ""
	}
	by, ok := assigned[d.id.String()]
	if ok && t.pod.Name != "" && by.Pod != "" && (by.Namespace != t.pod.Namespace || by.Pod != t.pod.Name) {
		return fmt.Sprintf("the kubelet gave it to %s", by)
	}
	d.Resource = by.Resource
	return ""
}

func (m *Manager) namespaceGone(a journal.Attachment) (bool, error) {
	if a.BootID != m.options.BootID {
		return true, nil
	}
	alive, err := m.engine.Alive(a.Place)
	return err == nil && !alive, err
}

// unneeded is false if anything cannot be found out.
func (m *Manager) unneeded(ctx context.Context, t trigger, a journal.Attachment) bool {
	if m.options.Kubelet == nil || a.Claim.UID == "" && time.Since(a.ReservedAt) < m.options.AbandonedAfter {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	ask := t.assigned
	if ask == nil {
		ask = func() (map[string]podresources.Assignment, error) { return m.options.Kubelet.Assigned(ctx) }
	}
	assigned, err := ask()
	if _, has := assigned[a.Function.String()]; has || err != nil {
		return false
	}
	if a.Claim.UID == "" {
		return true
	}
	if m.options.Claims == nil {
		return false
	}
	pods, allocated, err := m.options.Claims.Consumers(ctx, a.Claim)
	return err == nil && (!allocated || len(pods) == 0)
}

// reservedForPod says whether a claim that was prepared for another pod is reserved for this one too, or instead.
func (m *Manager) reservedForPod(ctx context.Context, a journal.Attachment, pod journal.Pod) (bool, error) {
	if m.options.Claims == nil {
		return false, nil
	}
	pods, allocated, err := m.options.Claims.Consumers(ctx, a.Claim)
	if err != nil {
		return false, fmt.Errorf("claim %s/%s: %w", a.Claim.Namespace, a.Claim.Name, err)
	}
	return allocated && slices.Contains(pods, pod.UID), nil
}

// netdevGone says whether a sandbox that lives has lost what was attached to it.
func (m *Manager) netdevGone(a journal.Attachment) (bool, error) {
	name, err := m.netdevs.Netdev(a.Function)
	gone := errors.Is(err, fs.ErrNotExist)
	if a.Interface.Userspace {
		// A driver that makes netdevs is not the one that was bound for the pod.
		gone = gone || err == nil && a.Setup != nil && a.Setup.Driver != ""
	} else {
		gone = gone || name != "" || errors.Is(err, inventory.ErrNoNetdev)
	}
	if !gone || a.BootID != m.options.BootID {
		return false, nil
	}
	alive, err := m.engine.Alive(a.Place)
	if !alive || err != nil || a.Interface.Userspace {
		return alive, err
	}
	holds, err := m.engine.Holds(a.Place, a.Before.Identity)
	return !holds, err
}

// deviceBack says whether the Function can go back to the sandbox that lost it, and waits for its Port. It fails if the
// Port is not there in time.
func (m *Manager) deviceBack(ctx context.Context, a journal.Attachment) (bool, error) {
	if a.Interface.Userspace || a.BootID != m.options.BootID {
		return false, nil
	}
	id := a.Function
	if ownSF(a) {
		id = function.ID{Address: a.PF} // by which the SF is made again
	}
	if name, err := m.netdevs.Netdev(id); name == "" || err != nil {
		return false, nil
	}
	if m.options.Functions != nil {
		// The kernel may be ahead of the inventory, which must know the Function to say what containers get of it.
		if _, known := m.options.Functions.Get(id); !known {
			return false, nil
		}
	}
	if alive, err := m.engine.Alive(a.Place); !alive || err != nil {
		return false, err
	}
	if m.options.Ports == nil {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, serveTimeout)
	defer cancel()
	err := m.options.Ports.Serve(ctx, a)
	return err == nil, err
}
