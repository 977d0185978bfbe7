// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

var now = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)

// member returns a pod with one claim of its name.
func member(name string, set func(*pod)) pod {
	p := pod{name: name, claims: []gangClaim{{
		key: types.NamespacedName{Name: name}, allocation: name, allocated: now.Add(-time.Minute),
	}}}
	if set != nil {
		set(&p)
	}
	return p
}

// TestDecide covers when a gang may be bound and when it is given back.
func TestDecide(t *testing.T) {
	up := func(name string) pod { return member(name, nil) }
	bound := func(p *pod) { p.bound = true }
	lacks := func(p *pod) { p.lacks = "a Port is not up" }
	failed := func(p *pod) { p.claims[0].failed = "Failed: on fire" }
	given := func(p *pod) {
		p.lacks, p.claims[0].givenBack = "given back", "because of x"
		p.claims[0].givenBackAt = now.Add(-30 * time.Second)
	}
	allocatedAfter := func(p *pod) { p.claims[0].allocated = now }

	for name, test := range map[string]struct {
		minCount int
		late     bool
		pods     []pod
		want     []Answer
		message  string
	}{
		"complete":            {2, false, []pod{up("a"), up("b")}, []Answer{Alone, Alone}, ""},
		"a Port is missing":   {2, false, []pod{up("a"), member("b", lacks)}, []Answer{Wait, Wait}, ""},
		"a pod is missing":    {2, false, []pod{up("a")}, []Answer{Wait}, ""},
		"unknown size":        {0, false, []pod{up("a"), member("b", lacks)}, []Answer{Alone, Alone}, ""},
		"more than necessary": {2, false, []pod{up("a"), up("b"), member("c", lacks)}, []Answer{Alone, Alone, Alone}, ""},
		"a pod without devices is bound": {
			2, false, []pod{up("a"), member("b", bound)}, []Answer{Alone, Alone}, "",
		},
		"begun": {
			3, false,
			[]pod{up("a"), member("b", func(p *pod) { p.begun = true }), member("c", lacks)},
			[]Answer{Alone, Alone, Alone}, "",
		},
		"refused": {
			2, false, []pod{up("a"), member("b", failed)}, []Answer{Wait, GiveBack},
			"Failed: on fire",
		},
		"a spare is refused": {
			2, false, []pod{up("a"), member("b", failed), up("c")}, []Answer{Alone, Alone, Alone}, "",
		},
		"refused, late": {
			2, true, []pod{up("a"), member("b", failed)}, []Answer{GiveBack, GiveBack},
			"with 1 of 2 pods: pod b: Failed: on fire",
		},
		"late": {
			5, true,
			[]pod{up("a"), member("b", lacks), member("c", lacks), member("d", lacks), member("e", lacks)},
			[]Answer{GiveBack, GiveBack, GiveBack, GiveBack, GiveBack},
			"with 1 of 5 pods: pod b: a Port is not up; pod c: a Port is not up; " +
				"pod d: a Port is not up; and 1 other pods",
		},
		"late without a pod": {
			2, true, []pod{up("a")}, []Answer{GiveBack}, "with 1 of 2 pods: it has 1 pods",
		},
		"the last controller did not tell all": {
			3, false, []pod{member("a", given), up("b"), member("c", allocatedAfter)},
			[]Answer{GiveBack, GiveBack, Wait}, "because of x",
		},
		"given back before, but complete": {
			1, false, []pod{member("a", given), up("b")}, []Answer{Alone, Alone}, "",
		},
	} {
		g := gang{name: "train", minCount: test.minCount, pods: test.pods,
			deadline: now.Add(time.Minute), begins: true}
		if test.late {
			g.deadline = now
		}

		verdicts := decide(g, now)
		for i, p := range test.pods {
			v := verdicts[types.NamespacedName{Name: p.name}]
			if v.Answer != test.want[i] || v.allocation != p.name || v.Group != "train" {
				t.Errorf("%s: pod %s: %+v, want answer %d", name, p.name, v, test.want[i])
			}
			if v.Answer == GiveBack && !strings.Contains(v.Message, test.message) {
				t.Errorf("%s: pod %s: message %q, want ...%s...", name, p.name, v.Message,
					test.message)
			}
		}
	}
}

// TestRefusedRail: of a pod with two claims, both are given back when a Port of one is refused, and
// for a reason that does not give back the gang.
func TestRefusedRail(t *testing.T) {
	p := member("a", nil)
	p.claims = append(p.claims, gangClaim{
		key: types.NamespacedName{Name: "second"}, failed: "Failed: on fire",
	})
	verdicts := decide(gang{name: "train", minCount: 1, pods: []pod{p},
		deadline: now.Add(time.Minute)}, now)
	for _, name := range []string{"a", "second"} {
		v := verdicts[types.NamespacedName{Name: name}]
		if v.Answer != GiveBack || v.Reason != v1alpha1.ReasonSiblingFailed {
			t.Errorf("claim %s: %+v", name, v)
		}
	}
}

// TestPodOf: a claim is of the pod for which it is reserved, and else of the one that it was made
// for. Others than pods are no pods.
func TestPodOf(t *testing.T) {
	pods := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "a", UID: "1"}
	group := resourceapi.ResourceClaimConsumerReference{
		APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "train", UID: "2",
	}
	owner := metav1.OwnerReference{
		APIVersion: "v1", Kind: "Pod", Name: "b", UID: "3", Controller: ptr.To(true),
	}

	for name, test := range map[string]struct {
		reserved []resourceapi.ResourceClaimConsumerReference
		owners   []metav1.OwnerReference
		want     string
	}{
		"reserved": {
			[]resourceapi.ResourceClaimConsumerReference{group, pods},
			[]metav1.OwnerReference{owner}, "a 1",
		},
		"made for":    {nil, []metav1.OwnerReference{owner}, "b 3"},
		"for a group": {[]resourceapi.ResourceClaimConsumerReference{group}, nil, " "},
		"for nobody":  {nil, nil, " "},
	} {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{OwnerReferences: test.owners}}
		c.Status.ReservedFor = test.reserved
		if pod, uid := podOf(c); pod+" "+string(uid) != test.want {
			t.Errorf("%s: pod %q with UID %q, want %q", name, pod, uid, test.want)
		}
	}
}

// TestGroupName: a pod may have a group without a name, of a kind that is not known yet.
func TestGroupName(t *testing.T) {
	for want, group := range map[string]*corev1.PodSchedulingGroup{
		"train": {PodGroupName: ptr.To("train")}, "": {},
	} {
		if got := groupName(&corev1.Pod{Spec: corev1.PodSpec{SchedulingGroup: group}}); got != want {
			t.Errorf("group %q, want %q", got, want)
		}
	}
	if got := groupName(&corev1.Pod{}); got != "" {
		t.Errorf("group %q of a pod without one", got)
	}
}
