package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

const (
	// askTimeout is how long the kubelet may take to say what pods have, while a pod waits for that.
	askTimeout = time.Second
	// sweepTimeout is how long kubelet and API server may take while nobody waits.
	sweepTimeout = 10 * time.Second
)

// otherPod names a pod that the kubelet gave the Function to and that is not the party's, "" for none. A kubelet that
// does not answer, as it is being started again, keeps no pod from starting.
func (m *Manager) otherPod(ctx context.Context, p party, id function.ID, s *Settled) string {
	if m.options.Kubelet == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if p.event == Prepare {
		_, _ = m.options.Kubelet.Refresh(ctx) // which logs that it does not know
		return m.options.Kubelet.InUse(id, "")
	}
	assigned, err := m.options.Kubelet.Assigned(ctx)
	if err != nil {
		m.log.Info("The kubelet does not say which pods have which Functions; the request is trusted",
			"function", id.String(), "pod", p.pod.Namespace+"/"+p.pod.Name, "error", err.Error())
		return ""
	}
	by, ok := assigned[id.String()]
	switch {
	case !ok:
		return ""
	case p.pod.Name != "" && by.Pod != "" && (by.Namespace != p.pod.Namespace || by.Pod != p.pod.Name):
		return fmt.Sprintf("the kubelet gave it to %s", by)
	}
	s.Resource = by.Resource
	return ""
}

// shown gathers evidence about whoever has the Function.
func (m *Manager) shown(ctx context.Context, e Evidence, p party, a journal.Attachment) (bool, error) {
	switch e {
	case NamespaceGone:
		return m.namespaceGone(a)
	case Unneeded:
		return m.unneeded(ctx, p, a), nil
	case ReservedForPod:
		return m.reservedForPod(ctx, a, p.pod)
	case NetdevGone:
		return m.netdevGone(a)
	case DeviceBack:
		return m.deviceBack(ctx, a)
	}
	return false, fmt.Errorf("evidence %q: is unknown", e)
}

func (m *Manager) namespaceGone(a journal.Attachment) (bool, error) {
	if a.BootID != m.options.BootID {
		return true, nil
	}
	alive, err := m.engine.Alive(a.Place)
	return err == nil && !alive, err
}

// unneeded is false where anything cannot be found out.
func (m *Manager) unneeded(ctx context.Context, p party, a journal.Attachment) bool {
	if m.options.Kubelet == nil || a.Claim.UID == "" && time.Since(a.ReservedAt) < m.options.AbandonedAfter {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	ask := p.assigned
	if ask == nil {
		ask = m.options.Kubelet.Assigned
	}
	assigned, err := ask(ctx)
	if err != nil {
		return false
	}
	if _, has := assigned[a.Function.String()]; has {
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

// reservedForPod says whether a claim that was prepared for another pod is this pod's as well, or by now.
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
