package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// party is who an event is about. What does not belong to the event is empty.
type party struct {
	event Event
	pod   journal.Pod
	// claim is that of Prepare and Unprepare, and of an Add for a claim's Function; resource that of Allocate and GiveUp.
	claim    types.UID
	resource string
	// containerID and ifName are those of Add and Del.
	containerID, ifName string
	// sandbox is that of SandboxStarts and SandboxStops; netNS is where the former finds its network namespace.
	sandbox, netNS string
	// but, where set, keeps a Del from what came after it.
	but func(journal.Attachment) bool
	// assigned, where set, is the answer of a kubelet that was asked before: one for all reservations of a Sweep.
	assigned func(context.Context) (map[string]podresources.Assignment, error)
}

// partyOf is who asks for a reservation: a claim, or else a CNI request, or else the kubelet for whichever pod.
func partyOf(want journal.Attachment) party {
	switch {
	case want.CNI != nil:
		return party{
			event: Add, pod: want.Pod, claim: want.Claim.UID, containerID: want.CNI.ContainerID, ifName: want.CNI.IfName,
		}
	case want.Claim.UID != "":
		return party{event: Prepare, pod: want.Pod, claim: want.Claim.UID}
	}
	return party{event: Allocate, resource: want.Resource}
}

// owns says whether the record is that of the party itself.
func (p party) owns(a journal.Attachment) bool {
	switch p.event {
	case Prepare, Unprepare:
		return journal.ClaimIs(p.claim)(a)
	case Add, Del:
		return journal.ContainerIs(p.containerID, p.ifName)(a) && (p.but == nil || !p.but(a))
	case SandboxStarts:
		return a.Sandbox == p.sandbox
	case SandboxStops:
		// A request for a claim's Function ends with its sandbox, also where it never got as far as that.
		return a.Sandbox == p.sandbox || a.Sandbox == "" && a.CNI != nil && a.CNI.Claimed != nil && a.CNI.ContainerID == p.sandbox
	case Sweep, Resume, DeviceChanges:
		return true
	}
	return false
}

// isPod says whether the record is for the party's pod. Old runtimes do not tell the UID.
func (p party) isPod(a journal.Attachment) bool {
	if p.pod.UID == "" {
		return a.Pod.Namespace == p.pod.Namespace && a.Pod.Name == p.pod.Name && a.Pod.Name != ""
	}
	return a.Pod.UID == p.pod.UID
}

// whose says whose Function it is for the party.
func (p party) whose(a journal.Attachment, exists bool) Whose {
	switch {
	case !exists:
		return Nobodys
	case p.owns(a):
		return Own
	case a.Claim.UID != "":
		sameContainer := a.CNI != nil && a.Sandbox != "" && a.Sandbox == p.containerID
		if p.event == Add && (p.isPod(a) || journal.ClaimIs(p.claim)(a)) && !sameContainer || p.event == SandboxStarts && (a.Pod.UID == "" || p.isPod(a)) {
			return PodsClaim
		}
		return AnotherClaims
	case a.CNI == nil && (p.event != GiveUp || a.Resource == p.resource):
		return NextPods
	case a.CNI != nil && p.event == Add && p.isPod(a) && a.CNI.ContainerID != p.containerID:
		return PodsRequest
	}
	return AnotherRequests
}

// rule is what the table says.
func (p party) rule(a journal.Attachment, exists bool) Rule {
	rule, ok := table[p.event][p.whose(a, exists)][phaseOf(a, exists)]
	if !ok {
		return always(Refuse) // the table's test says that there is none
	}
	return rule
}

// TakenError says who has a Function that somebody else asks for.
type TakenError struct{ reason string }

func (e TakenError) Error() string { return e.reason }

func taken(format string, args ...any) error { return TakenError{fmt.Sprintf(format, args...)} }

// Settled is a Function that whoever asks for it may have, or has.
type Settled struct {
	// Record is that of the Function; the zero value if Exists is false.
	Record journal.Attachment
	Exists bool
	// Resource is the extended resource by which the kubelet gave the Function to the pod of a CNI request, "" where it
	// did not, or was not asked.
	Resource string

	step Step
}

// Settle makes way for whoever asks for the Function: the claim, the CNI request, or else the kubelet, as want says it. It
// waits until ctx ends for what is being released, and takes back what is left from before. A [TakenError] says that
// somebody else has it. Nothing is reserved by this.
func (m *Manager) Settle(ctx context.Context, want journal.Attachment) (Settled, error) {
	s, err := m.settle(ctx, partyOf(want), want.Function)
	if err != nil {
		return s, fmt.Errorf("Function %s: %w", want.Function, err)
	}
	return s, nil
}

// settle decides until there is nothing in the way.
func (m *Manager) settle(ctx context.Context, p party, id function.ID) (Settled, error) {
	for {
		have, exists := m.journal.Get(id)
		s := Settled{Record: have, Exists: exists}
		step, refusal, err := m.decide(ctx, p, id, &s)
		switch {
		case err != nil:
		case step == Refuse:
			err = refusal
		case step == Wait:
			err = m.await(ctx, have)
		case step == BringBack || step == EndRequest || step == Release:
			err = m.makeWay(ctx, p, have, step)
		default:
			s.step = step
			return s, nil
		}
		if err != nil {
			return s, err
		}
	}
}

// decide looks the step up and gathers the evidence for it. refusal is the reason of a [Refuse].
func (m *Manager) decide(ctx context.Context, p party, id function.ID, s *Settled) (step Step, refusal, err error) {
	rule := p.rule(s.Record, s.Exists)
	refusal = takenBy(p, s.Record, s.Exists)
	switch rule.If {
	case "":
		return rule.Step, refusal, nil
	case NoOtherPod:
		if other := m.otherPod(ctx, p, id, s); other != "" {
			return rule.Else, TakenError{other}, nil
		}
		return rule.Step, refusal, nil
	}
	shown, err := m.shown(ctx, rule.If, p, s.Record)
	switch {
	case err != nil:
		return "", nil, err
	case shown:
		return rule.Step, refusal, nil
	}
	return rule.Else, refusal, nil
}

// takenBy says why the party cannot have the Function.
func takenBy(p party, a journal.Attachment, exists bool) error {
	switch {
	case !exists:
		return errors.New("is not reserved")
	case p.event == SandboxStarts && a.Claim.UID == "" && a.CNI == nil:
		return errors.New("is allocated, but nobody asked yet for an interface")
	case a.State == journal.Releasing:
		return taken("is being released from %s", owner(a))
	case a.Sandbox != "" && a.CNI != nil:
		return taken("is %s in pod %s/%s (sandbox %s) as %s", a.State, a.Pod.Namespace, a.Pod.Name, a.Sandbox, a.CNI.IfName)
	case a.Sandbox != "":
		return taken("is %s in pod %s/%s (sandbox %s) by claim %s", a.State, a.Pod.Namespace, a.Pod.Name, a.Sandbox, a.Claim.Name)
	case a.Claim.UID != "" && a.Pod.Name != "":
		return taken("belongs to %s and is for pod %s/%s (UID %s)", owner(a), a.Pod.Namespace, a.Pod.Name, a.Pod.UID)
	}
	return taken("belongs to %s", owner(a))
}

// owner names the one that has a Function.
func owner(a journal.Attachment) string {
	switch {
	case a.Claim.UID != "":
		return fmt.Sprintf("claim %s/%s (UID %s)", a.Claim.Namespace, a.Claim.Name, a.Claim.UID)
	case a.Pod.UID != "":
		return fmt.Sprintf("pod %s/%s (UID %s)", a.Pod.Namespace, a.Pod.Name, a.Pod.UID)
	case a.CNI != nil:
		return fmt.Sprintf("container %s as %s", a.CNI.ContainerID, a.CNI.IfName)
	}
	return "a pod by an extended resource"
}

// await returns when the record is another one. A release that was interrupted is continued.
func (m *Manager) await(ctx context.Context, have journal.Attachment) error {
	if have.State == journal.Releasing {
		return m.waitFree(ctx, have.Function)
	}
	err := loop.Until(ctx, m.journal.Subscribe, func() bool {
		now, exists := m.journal.Get(have.Function)
		return !exists || !reflect.DeepEqual(have, now)
	})
	if err != nil {
		return fmt.Errorf("is %s in pod %s/%s, which is gone for the kubelet: its CNI DEL has not come: %w",
			have.State, have.Pod.Namespace, have.Pod.Name, err)
	}
	return nil
}

// makeWay takes the Function from whoever has it, if that is still the one of the decision.
func (m *Manager) makeWay(ctx context.Context, p party, have journal.Attachment, step Step) error {
	if p.netNS != "" {
		// A sandbox that is gone by now, and comes late, must not take the Function from the one that followed it.
		if _, err := os.Stat(p.netNS); err != nil {
			return fmt.Errorf("network namespace of sandbox %s: %w", p.sandbox, err)
		}
	}
	m.log.Info("Function is taken back from before", "function", have.Function.String(), "for", string(p.event),
		"from", owner(have), "sandbox", have.Sandbox, "state", have.State, "step", string(step))
	return m.ifStill(ctx, have, func() error { return m.carryOut(ctx, have, step) })
}

// ifStill calls f with the Function's lock, if the record is still the one that was decided about. It must be decided
// again otherwise.
func (m *Manager) ifStill(ctx context.Context, have journal.Attachment, f func() error) error {
	return m.with(ctx, have.Function, func(now journal.Attachment) error {
		if !reflect.DeepEqual(have, now) {
			return nil
		}
		return f()
	})
}

// end does what an event means that takes Functions back and needs no evidence. Nothing happens to a Function that is not
// the party's any more.
func (m *Manager) end(ctx context.Context, p party, id function.ID) error {
	if err := m.endOne(ctx, p, id); err != nil {
		return fmt.Errorf("Function %s: %w", id, err)
	}
	return nil
}

func (m *Manager) endOne(ctx context.Context, p party, id function.ID) error {
	err := m.with(ctx, id, func(a journal.Attachment) error {
		step := p.rule(a, true).Step
		if step == Ignore && !p.owns(a) {
			m.log.V(1).Info("Late event ignored", "function", id.String(), "event", string(p.event),
				"claim", a.Claim.Name, "sandbox", a.Sandbox)
		}
		return m.carryOut(ctx, a, step)
	})
	m.tell(id)
	return err
}

// carryOut takes a step that takes a Function back. The caller has the Function's lock.
func (m *Manager) carryOut(ctx context.Context, a journal.Attachment, step Step) error {
	if step == EndRequest {
		step = Release
		if a.Claim.UID != "" {
			step = BringBack
		}
	}
	switch {
	case step == Lose:
		return m.lose(ctx, a)
	case step == Release:
		return m.bringBack(ctx, a, journal.Releasing)
	case step == BringBack && a.State != journal.Reserved:
		return m.bringBack(ctx, a, journal.Detaching)
	case step == BringBack && a.CNI != nil && a.CNI.Claimed != nil:
		return m.journal.Put(a.Untouched())
	}
	return nil
}
