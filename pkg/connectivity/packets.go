// SPDX-License-Identifier: Apache-2.0

package connectivity

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/connectivity/wire"
)

// mostAsked is how many other pods of a network each pod asks: those after it, in a ring. With up
// to nine pods each asks all others.
const mostAsked = 8

// How long a pod waits for each answer. The first packets of a segment may take a second, while the
// xPUs make it. Silence is believed after less time, because packets within the network pass
// meanwhile.
const (
	answerPatience  = 10 * time.Second
	silencePatience = 3 * time.Second
)

// asking is a question to a pod.
type asking struct {
	question wire.Question
	to       *pod
}

// packetKind is a kind of packets: of a version of IP, and small or as large as the interface takes.
type packetKind struct {
	v6   bool
	full bool
}

func (k packetKind) of(question wire.Question) bool {
	return k.v6 == question.Address.Is6() && k.full == (question.Size > 0)
}

func (k packetKind) String() string {
	text := "packets"
	if k.full {
		text = "packets of the full MTU"
	}
	if k.v6 {
		return text + ", IPv6"
	}
	return text + ", IPv4"
}

// checkPackets has the pods of each network ask each other.
func (t *Test) checkPackets(ctx context.Context) ([]Check, error) {
	questions := map[*pod][]asking{}
	for _, n := range t.networks {
		pods := t.podsOf(n.Name)
		for i, p := range pods {
			for k := 1; k < len(pods) && k <= mostAsked; k++ {
				questions[p] = append(questions[p], questionsTo(p, pods[(i+k)%len(pods)], n)...)
			}
		}
	}

	order := wire.Order{Patience: answerPatience}
	reports, problems, err := t.carryOut(ctx, order, questions)
	if err != nil {
		return nil, err
	}

	var checks []Check
	for _, n := range t.networks {
		for _, kind := range []packetKind{{false, false}, {false, true}, {true, false}, {true, true}} {
			if c := t.answered(n.Name, kind, questions, reports, problems); c.Name != "" {
				checks = append(checks, c)
			}
		}
	}
	return checks, nil
}

// questionsTo returns what one pod asks another: small and large packets to the address of each
// subnet.
func questionsTo(from, to *pod, n v1alpha1.XPUNetwork) (all []asking) {
	for _, subnet := range subnets(n) {
		i := slices.IndexFunc(to.found.Addresses, func(a netip.Prefix) bool {
			return subnet.Contains(a.Addr())
		})
		if i < 0 {
			continue // the check of interfaces has said so
		}
		address := to.found.Addresses[i].Addr()
		for _, size := range []int{0, min(from.found.MTU, to.found.MTU)} {
			all = append(all, asking{wire.Question{Address: address, Size: size}, to})
		}
	}
	return all
}

// answered checks that the questions of a kind have the right answers. Its Name is empty if there
// were no questions.
func (t *Test) answered(
	network string, kind packetKind, questions map[*pod][]asking, reports map[*pod]wire.Report,
	problems map[*pod]error,
) Check {
	c := Check{OK: true}
	good, all := 0, 0
	for _, p := range t.podsOf(network) {
		for i, q := range questions[p] {
			if !kind.of(q.question) {
				continue
			}

			all++
			if problems[p] != nil {
				t.fails(&c, p, "%v", problems[p])
				continue
			}
			answer := reports[p].Answers[i]
			if wrong := judge(q, answer); wrong != "" {
				t.fails(&c, p, "%s", wrong)
				continue
			}
			good++
			c.Took = max(c.Took, answer.Took)
		}
	}

	if all > 0 {
		c.Name = fmt.Sprintf("%s: %d of %d %s", network, good, all, kind)
	}
	return c
}

// judge returns what is wrong with the answer to a question, or "".
func judge(q asking, a wire.Answer) string {
	size := ""
	if q.question.Size > 0 {
		size = fmt.Sprintf(" with %d bytes", q.question.Size)
	}

	switch {
	case a.Error != "":
		return fmt.Sprintf("to %s at %s%s: %s", q.to, q.question.Address, size, a.Error)
	case a.Unsent:
		return fmt.Sprintf("to %s at %s%s: nothing was sent, because no route leads there by %s",
			q.to, q.question.Address, size, interfaceName)
	case a.From == nil:
		return fmt.Sprintf("no answer from %s at %s%s", q.to, q.question.Address, size)
	case a.From.Pod != q.to.name:
		return fmt.Sprintf("asked %s at %s, and %s of network %s answered", q.to,
			q.question.Address, a.From.Pod, a.From.Network)
	}
	return ""
}

// checkSeparation checks that no packet passes between two networks. The pods of each network send
// packets to the addresses of the other networks' pods, and to all pods of their own segment.
func (t *Test) checkSeparation(ctx context.Context) ([]Check, error) {
	if len(t.networks) < 2 {
		return nil, nil
	}

	questions := map[*pod][]asking{}
	for _, p := range t.pods {
		if p.found != nil {
			questions[p] = t.strangers(p)
		}
	}
	order := wire.Order{Call: true, Patience: silencePatience}
	reports, problems, err := t.carryOut(ctx, order, questions)
	if err != nil {
		return nil, err
	}

	// What the last caller said has arrived when each pod has done one more order.
	none := map[*pod][]asking{}
	for p := range questions {
		none[p] = nil
	}
	heard, deaf, err := t.carryOut(ctx, wire.Order{}, none)
	if err != nil {
		return nil, err
	}
	for p, problem := range deaf {
		problems[p] = problem
	}

	var checks []Check
	for i, a := range t.networks {
		for _, b := range t.networks[i+1:] {
			if !isRouted(a, b) {
				checks = append(checks, t.separate(a.Name, b.Name, questions, reports, heard, problems))
			}
		}
	}
	return checks, nil
}

// isRouted reports whether the xPUs route between the networks.
func isRouted(a, b v1alpha1.XPUNetwork) bool {
	return a.Spec.Routed != nil && b.Spec.Routed != nil && a.Spec.Routed.VRF == b.Spec.Routed.VRF
}

// strangers returns the questions of a pod to pods of other networks. An address that a pod of its
// own network has too is left out, because that pod would answer.
func (t *Test) strangers(p *pod) (all []asking) {
	own := map[netip.Addr]bool{}
	for _, q := range t.podsOf(p.network) {
		for _, a := range q.found.Addresses {
			own[a.Addr()] = true
		}
	}

	for _, n := range t.networks {
		if n.Name == p.network {
			continue
		}
		for _, other := range t.podsOf(n.Name)[:min(mostAsked, len(t.podsOf(n.Name)))] {
			for _, a := range other.found.Addresses {
				if !own[a.Addr()] && len(all) < wire.MaxQuestions {
					all = append(all, asking{wire.Question{Address: a.Addr()}, other})
				}
			}
		}
	}
	return all
}

// separate checks that no packet has passed between two networks. Silence between them shows
// something only if pods of each network have heard calls of their own network, in each IP version.
func (t *Test) separate(
	a, b string, questions map[*pod][]asking, reports, heard map[*pod]wire.Report,
	problems map[*pod]error,
) Check {
	c := Check{OK: true, Name: fmt.Sprintf("%s and %s: no packets between them", a, b),
		Took: silencePatience}
	for _, network := range []string{a, b} {
		other := b
		if network == b {
			other = a
		}

		within, unsent := map[bool]bool{}, 0 // by whether it is IPv6
		pods := t.podsOf(network)
		for _, p := range pods {
			if problems[p] != nil {
				t.fails(&c, p, "%v", problems[p])
			}
			for i, answer := range reports[p].Answers {
				t.judgeSilence(&c, p, questions[p][i], answer, other)
				if answer.Unsent && questions[p][i].to.network == other {
					unsent++
				}
			}
			for _, call := range heard[p].Called {
				within[call.IPv6] = true
			}
			for _, peer := range heard[p].Heard {
				if peer.Network == other {
					t.fails(&c, p, "heard %s of network %s", peer.Pod, peer.Network)
				}
			}
		}

		if len(pods) < 2 {
			c.lacks(fmt.Sprintf("%s of %s could call, so that silence shows nothing",
				counted(len(pods), "pod"), network))
			continue
		}
		for _, v6 := range t.versions(network) {
			if !within[v6] {
				c.breaks()
				c.Notes = append(c.Notes, fmt.Sprintf("no pod of %s has heard another one of %[1]s "+
					"call by %s, so that silence shows nothing", network, versionName(v6)))
			}
		}
		if unsent > 0 {
			c.Notes = append(c.Notes, fmt.Sprintf("%s of pods of %s to addresses of %s not sent, "+
				"because no route leads there by %s: only calls were tried", counted(unsent,
				"question"), network, other, interfaceName))
		}
	}

	if !t.shareVersion(a, b) {
		c.lacks("no IP version is common to both, so that silence shows nothing")
	}
	return c
}

// versions returns the IP versions of which pods of a network have addresses, as whether they are
// IPv6. Pods call by these.
func (t *Test) versions(network string) (all []bool) {
	for _, v6 := range []bool{false, true} {
		if slices.ContainsFunc(t.podsOf(network), func(p *pod) bool {
			return slices.ContainsFunc(p.found.Addresses, func(a netip.Prefix) bool {
				return a.Addr().Is6() == v6
			})
		}) {
			all = append(all, v6)
		}
	}
	return all
}

// shareVersion reports whether two networks have an IP version in common.
func (t *Test) shareVersion(a, b string) bool {
	return slices.ContainsFunc(t.versions(a), func(v6 bool) bool {
		return slices.Contains(t.versions(b), v6)
	})
}

func versionName(v6 bool) string {
	if v6 {
		return "IPv6"
	}
	return "IPv4"
}

// judgeSilence fails the check if a pod of the other network has answered, or if a question could
// not be asked.
func (t *Test) judgeSilence(c *Check, p *pod, q asking, answer wire.Answer, other string) {
	switch {
	case q.to.network != other:
	case answer.Error != "":
		t.fails(c, p, "could not ask %s at %s: %s", q.to, q.question.Address, answer.Error)
	case answer.From != nil && answer.From.Network == other:
		t.fails(c, p, "%s of network %s answered at %s", answer.From.Pod, other,
			q.question.Address)
	}
}

// carryOut gives an order to each pod that has an entry in questions, and returns what they report,
// and why others do not.
func (t *Test) carryOut(
	ctx context.Context, order wire.Order, questions map[*pod][]asking,
) (reports map[*pod]wire.Report, problems map[*pod]error, err error) {
	t.orders++
	order.Number = t.orders
	waiting, cancel := context.WithTimeout(ctx, t.Timeout+order.Patience)
	defer cancel()

	pods := slices.Collect(maps.Keys(questions))
	found, wrong := make([]wire.Report, len(pods)), make([]error, len(pods))
	var all sync.WaitGroup
	for i, p := range pods {
		all.Go(func() {
			mine := order
			for _, q := range questions[p] {
				mine.Questions = append(mine.Questions, q.question)
			}
			if wrong[i] = t.give(waiting, p, mine); wrong[i] == nil {
				found[i], wrong[i] = p.report(waiting, order.Number)
			}
		})
	}
	all.Wait()
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}

	reports, problems = map[*pod]wire.Report{}, map[*pod]error{}
	for i, p := range pods {
		if n := len(found[i].Answers); wrong[i] == nil && n != len(questions[p]) {
			wrong[i] = fmt.Errorf("%d answers to %d questions", n, len(questions[p]))
		}
		if wrong[i] != nil {
			problems[p] = wrong[i]
			continue
		}
		reports[p] = found[i]
	}
	return reports, problems, nil
}
