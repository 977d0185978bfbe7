// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

const poolName = "node1/0000-3b-00-0/fast"

// server is an API server with the PodGroup "train" of two pods.
type server struct {
	client.Client
	pods   map[string]*corev1.Pod
	claims map[string]*resourceapi.ResourceClaim
	group  schedulingapi.PodGroupSpec
	// noPods and noGroups are the answers to requests for pods and PodGroups, nil for what there is.
	noPods, noGroups error

	lists []string // each kind that was listed, with the limit
}

func newServer(pods ...*corev1.Pod) *server {
	s := &server{pods: map[string]*corev1.Pod{}, claims: map[string]*resourceapi.ResourceClaim{}}
	s.group.SchedulingPolicy.Gang = &schedulingapi.GangSchedulingPolicy{MinCount: 2}
	for _, p := range pods {
		s.pods[p.Name] = p
	}
	return s
}

// with adds claims and returns the server.
func (s *server) with(claims ...*resourceapi.ResourceClaim) *server {
	for _, c := range claims {
		s.claims[c.Name] = c
	}
	return s
}

func (s *server) Get(
	_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption,
) error {
	switch o := object.(type) {
	case *corev1.Pod:
		if p := s.pods[key.Name]; s.noPods != nil || p != nil {
			p.DeepCopyInto(o)
			return s.noPods
		}
	case *resourceapi.ResourceClaim:
		if c := s.claims[key.Name]; c != nil {
			c.DeepCopyInto(o)
			return nil
		}
	case *schedulingapi.PodGroup:
		o.Name, o.Spec = key.Name, s.group
		return s.noGroups
	}
	return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
}

func (s *server) List(
	_ context.Context, list client.ObjectList, options ...client.ListOption,
) error {
	var o client.ListOptions
	o.ApplyOptions(options)
	s.lists = append(s.lists, fmt.Sprintf("%T %d", list, o.Limit))

	switch l := list.(type) {
	case *schedulingapi.PodGroupList:
		l.Items = []schedulingapi.PodGroup{
			{ObjectMeta: metav1.ObjectMeta{Name: "train"}, Spec: s.group},
		}
		return s.noGroups
	case *corev1.PodList:
		names := slices.Sorted(maps.Keys(s.pods))
		from, _ := strconv.Atoi(o.Continue) // "" is 0
		to := min(len(names), from+int(o.Limit))
		for _, name := range names[from:to] {
			l.Items = append(l.Items, *s.pods[name])
		}
		if l.Continue = ""; to < len(names) {
			l.Continue = strconv.Itoa(to)
		}
		return s.noPods
	}
	return nil
}

// podOfGroup returns a pod that names claims, and a PodGroup unless it is "".
func podOfGroup(name, group string, claims ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: name, UID: types.UID(name + "-uid"),
	}}
	if group != "" {
		p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &group}
	}
	for _, c := range claims {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims,
			corev1.PodResourceClaim{Name: c, ResourceClaimName: ptr.To(c)})
	}
	return p
}

// claimOf returns a claim with the device, reserved for the pods.
func claimOf(name, device string, pods ...string) *resourceapi.ResourceClaim {
	c := claimtest.Allocated(name, claimtest.Result("nic", poolName, device))
	c.Namespace = "default"
	for _, p := range pods {
		reserve(c, p)
	}
	c.Status.Allocation.AllocationTimestamp = ptr.To(metav1.Now())
	c.Status.Allocation.Devices.Results[0].BindingConditions = []string{
		v1alpha1.ConditionProvisioned,
	}
	return c
}

func reserve(c *resourceapi.ResourceClaim, pod string) {
	c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
		Resource: "pods", Name: pod, UID: types.UID(pod + "-uid"),
	})
}

// tells has the claim report a condition of its device.
func tells(c *resourceapi.ResourceClaim, condition metav1.Condition) *resourceapi.ResourceClaim {
	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: v1alpha1.GroupName, Pool: poolName,
		Device:     c.Status.Allocation.Devices.Results[0].Device,
		Conditions: []metav1.Condition{condition},
	}}
	return c
}

// foreign returns a claim with a device of another driver.
func foreign(name string, pods ...string) *resourceapi.ResourceClaim {
	c := claimOf(name, "gpu", pods...)
	c.Status.Allocation.Devices.Results[0].Driver = "gpu.example.com"
	return c
}

func gangsOf(s *server) *Gangs {
	return newGangs(reconciling.Cluster{Client: s, Live: s}, 5*time.Minute)
}

// judged returns the verdict for a claim whose Ports are up, after its gang was judged.
func judged(t *testing.T, g *Gangs, c *resourceapi.ResourceClaim) Verdict {
	t.Helper()
	if _, err := g.Ask(t.Context(), c, Up, ""); err != nil {
		t.Fatal(err)
	}
	time.Sleep(g.resting("default"))
	if _, err := g.evaluate(t.Context(), namespaceRequest("default")); err != nil {
		t.Fatal(err)
	}
	v, err := g.Ask(t.Context(), c, Up, "")
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestPodGroupsNotRead: nothing is held if the API server does not serve PodGroups. If it does not
// answer, nothing is decided.
func TestPodGroupsNotRead(t *testing.T) {
	groups := schema.GroupResource{Group: schedulingapi.GroupName, Resource: "podgroups"}
	kind := schedulingapi.SchemeGroupVersion.WithKind("PodGroup")
	for name, test := range map[string]struct {
		err  error
		want Answer
	}{
		"not served":     {&meta.NoKindMatchError{GroupKind: kind.GroupKind()}, Alone},
		"served no more": {apierrors.NewNotFound(groups, ""), Alone},
		"away":           {errors.New("the API server is away"), Wait},
	} {
		c := claimOf("c", "0000-3b-00-2", "a")
		s := newServer(podOfGroup("a", "train", "c")).with(c)
		s.noGroups = test.err
		g := gangsOf(s)
		if v, err := g.Ask(t.Context(), c, Up, ""); err != nil || v.Answer != Wait {
			t.Errorf("%s: first %+v, %v", name, v, err)
		}

		_, err := g.evaluate(t.Context(), namespaceRequest("default"))
		if (err == nil) != (test.want == Alone) {
			t.Errorf("%s: error %v", name, err)
		}
		if v, err := g.Ask(t.Context(), c, Up, ""); err != nil || v.Answer != test.want {
			t.Errorf("%s: then %+v, %v", name, v, err)
		}
	}
}

// TestReadsLittleAtOnce: objects of tenants can be large, so that few of them are read at once.
func TestReadsLittleAtOnce(t *testing.T) {
	c := claimOf("c", "0000-3b-00-2", "a")
	s := newServer(podOfGroup("a", "train", "c"), podOfGroup("z", "train", "d")).
		with(c, tells(claimOf("d", "0000-3b-00-3", "z"),
			metav1.Condition{Type: v1alpha1.ConditionProvisioned, Status: metav1.ConditionTrue}))
	for i := range 40 {
		name := fmt.Sprint("other", i)
		s.pods[name] = podOfGroup(name, "")
	}

	if v := judged(t, gangsOf(s), c); v.Answer != Alone {
		t.Errorf("%+v: the pod of the last page was not seen", v)
	}
	if want := slices.Repeat([]string{"*v1.PodList 16"}, 3); !slices.Equal(s.lists, want) {
		t.Errorf("listed %q, want %q", s.lists, want)
	}
}

// TestNotGivenBack: the scheduler takes no claims back from groups with constraints or parents, so
// that they are not held.
func TestNotGivenBack(t *testing.T) {
	for name, set := range map[string]func(*schedulingapi.PodGroupSpec){
		"constraints": func(s *schedulingapi.PodGroupSpec) {
			s.SchedulingConstraints = &schedulingapi.PodGroupSchedulingConstraints{}
		},
		"parent": func(s *schedulingapi.PodGroupSpec) {
			s.ParentCompositePodGroupName = ptr.To("all")
		},
	} {
		c := claimOf("c", "0000-3b-00-2", "a")
		s := newServer(podOfGroup("a", "train", "c")).with(c)
		set(&s.group)
		if v := judged(t, gangsOf(s), c); v.Answer != Alone {
			t.Errorf("%s: %+v", name, v)
		}
	}
}

func forbidden(resource string) error {
	return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("role"))
}

// TestForbidden: a controller that may not read PodGroups or pods holds nothing, but only once that
// has lasted: a role that is being replaced says nothing about gangs.
func TestForbidden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := claimOf("c", "0000-3b-00-2", "a")
		s := newServer(podOfGroup("a", "train", "c")).with(c)
		g := gangsOf(s)
		s.noGroups = forbidden("podgroups")
		if v := judged(t, g, c); v.Answer != Wait {
			t.Errorf("forbidden once: %+v", v)
		}
		result, err := g.evaluate(t.Context(), namespaceRequest("default"))
		if err != nil || result.RequeueAfter == 0 {
			t.Errorf("not read again: %+v, %v", result, err)
		}

		s.noGroups = nil
		time.Sleep(lookAround)
		if v := judged(t, g, c); v.Answer != Wait {
			t.Errorf("allowed again: %+v", v)
		}

		s.noGroups = forbidden("podgroups")
		for range 3 {
			if v := judged(t, g, c); v.Answer != Wait {
				t.Errorf("forbidden a second time: %+v", v)
			}
			time.Sleep(lookAround / 3)
		}
		if v := judged(t, g, c); v.Answer != Alone {
			t.Errorf("forbidden for long: %+v", v)
		}
	})
}

// TestForbiddenPod: claims report alone if the controller may not read their pods for long.
func TestForbiddenPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := claimOf("c", "0000-3b-00-2", "a")
		s := newServer(podOfGroup("a", "", "c")).with(c)
		g := gangsOf(s)
		s.noPods = forbidden("pods")
		if _, err := g.Ask(t.Context(), c, Up, ""); !apierrors.IsForbidden(err) {
			t.Errorf("forbidden once: %v", err)
		}

		// Such a moment is not the begin of the next.
		time.Sleep(2 * lookAround)
		for range 3 {
			if _, err := g.Ask(t.Context(), c, Up, ""); !apierrors.IsForbidden(err) {
				t.Errorf("forbidden a second time: %v", err)
			}
			time.Sleep(lookAround / 3)
		}
		for range 2 {
			if v, err := g.Ask(t.Context(), c, Up, ""); err != nil || v.Answer != Alone {
				t.Errorf("forbidden for long: %+v, %v", v, err)
			}
			time.Sleep(2 * lookAround)
		}
	})
}

// TestEvidence covers which pods count as ready, and which show that their gang was complete.
func TestEvidence(t *testing.T) {
	up := metav1.Condition{Type: v1alpha1.ConditionProvisioned, Status: metav1.ConditionTrue}
	device := func() *resourceapi.ResourceClaim { return claimOf("d", "0000-3b-00-3") }
	reserved := func(c *resourceapi.ResourceClaim, pods ...string) *resourceapi.ResourceClaim {
		for _, p := range pods {
			reserve(c, p)
		}
		return c
	}
	finished := podOfGroup("b", "train", "d")
	finished.Spec.NodeName, finished.Status.Phase = "node1", corev1.PodSucceeded

	for name, test := range map[string]struct {
		minCount int32
		other    *corev1.Pod
		claim    *resourceapi.ResourceClaim // of the other pod, nil if it does not exist
		want     Answer
	}{
		"was told": {3, podOfGroup("b", "train", "d"), tells(reserved(device(), "b"), up), Alone},
		"another pod was told": {
			2, podOfGroup("b", "train", "d"), tells(reserved(device(), "x"), up), Wait,
		},
		"two pods were told": {
			2, podOfGroup("b", "train", "d"), tells(reserved(device(), "b", "x"), up), Wait,
		},
		"a finished pod of three":  {3, finished, nil, Wait},
		"a finished pod of two":    {2, finished, nil, Alone},
		"foreign, not reserved":    {2, podOfGroup("b", "train", "d"), foreign("d"), Wait},
		"foreign, of another":      {2, podOfGroup("b", "train", "d"), foreign("d", "x"), Wait},
		"foreign only, not bound":  {2, podOfGroup("b", "train", "d"), foreign("d", "b"), Wait},
		"no claim, not bound":      {2, podOfGroup("b", "train"), nil, Wait},
		"the claim does not exist": {2, podOfGroup("b", "train", "d"), nil, Wait},
	} {
		c := claimOf("c", "0000-3b-00-2", "a")
		s := newServer(podOfGroup("a", "train", "c"), test.other).with(c)
		s.group.SchedulingPolicy.Gang.MinCount = test.minCount
		if test.claim != nil {
			s.with(test.claim)
		}
		if v := judged(t, gangsOf(s), c); v.Answer != test.want {
			t.Errorf("%s: %+v, want answer %d", name, v, test.want)
		}
	}
}

// TestForeignClaim: a pod with devices of ours waits for its claims of other drivers.
func TestForeignClaim(t *testing.T) {
	for name, test := range map[string]struct {
		gpu  *resourceapi.ResourceClaim
		want Answer
	}{
		"not reserved": {foreign("gpu"), Wait},
		"reserved":     {foreign("gpu", "a"), Alone},
	} {
		c := claimOf("c", "0000-3b-00-2", "a")
		s := newServer(podOfGroup("a", "train", "c", "gpu")).with(c, test.gpu)
		s.group.SchedulingPolicy.Gang.MinCount = 1
		if v := judged(t, gangsOf(s), c); v.Answer != test.want {
			t.Errorf("%s: %+v, want answer %d", name, v, test.want)
		}
	}
}

// TestExtendedResource: a pod that asks for a DeviceClass by an extended resource waits for the claim
// that the scheduler makes for it. A resource that a device plugin may serve never gets one.
func TestExtendedResource(t *testing.T) {
	const class = corev1.ResourceName(resourceapi.ResourceDeviceClassPrefix + "gpu")
	made := &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "gpu"}
	for name, test := range map[string]struct {
		asks corev1.ResourceName
		n    string
		made *corev1.PodExtendedResourceClaimStatus
		gpu  *resourceapi.ResourceClaim
		want Answer
	}{
		"no claim yet":    {class, "1", nil, foreign("gpu"), Wait},
		"not reserved":    {class, "1", made, foreign("gpu"), Wait},
		"reserved":        {class, "1", made, foreign("gpu", "a"), Alone},
		"none wanted":     {class, "0", nil, foreign("gpu"), Alone},
		"a device plugin": {"nvidia.com/gpu", "1", nil, foreign("gpu"), Alone},
	} {
		c := claimOf("c", "0000-3b-00-2", "a")
		p := podOfGroup("a", "train", "c")
		p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{test.asks: resource.MustParse(test.n)},
		}}}
		p.Status.ExtendedResourceClaimStatus = test.made
		s := newServer(p).with(c, test.gpu)
		s.group.SchedulingPolicy.Gang.MinCount = 1
		if v := judged(t, gangsOf(s), c); v.Answer != test.want {
			t.Errorf("%s: %+v, want answer %d", name, v, test.want)
		}
	}
}

// TestOtherPod: a claim that a pod outside the gang uses now does not wait for the gang.
func TestOtherPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := claimOf("c", "0000-3b-00-2", "a", "x")
		s := newServer(podOfGroup("a", "train", "c"), podOfGroup("x", "", "c")).with(c)
		g := gangsOf(s)
		if v := judged(t, g, c); v.Answer != Wait {
			t.Errorf("of the gang: %+v", v)
		}

		delete(s.pods, "a")
		c.Status.ReservedFor = c.Status.ReservedFor[1:]
		if v := judged(t, g, c); v.Answer != Alone {
			t.Errorf("of the other pod: %+v", v)
		}
	})
}

// TestPodGone: a claim whose pod is gone asks again.
func TestPodGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := claimOf("c", "0000-3b-00-2", "a")
		s := newServer(podOfGroup("a", "train", "c")).with(c)
		g := gangsOf(s)
		if v := judged(t, g, c); v.Answer != Wait {
			t.Errorf("of the gang: %+v", v)
		}

		delete(s.pods, "a")
		if v := judged(t, g, c); v.Answer != Alone {
			t.Errorf("without a pod: %+v", v)
		}
	})
}

// TestGivenBackBefore: a claim that was given back by the controller before this one has the others
// given back, but only while this one begins: its clock may be ahead of the scheduler's.
func TestGivenBackBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, first := (*Gangs)(nil), true
		for range 2 {
			a, b := claimOf("c", "0000-3b-00-2", "a"), claimOf("d", "0000-3b-00-3", "b")
			a.Status.Allocation.AllocationTimestamp.Time = time.Now().Add(-10 * time.Second)
			tells(b, metav1.Condition{
				Type: v1alpha1.ConditionProvisionFailed, Status: metav1.ConditionTrue,
				Reason: v1alpha1.ReasonGangFailed, Message: "because of x",
				LastTransitionTime: metav1.NewTime(time.Now().Add(-6 * time.Second)),
			})
			s := newServer(podOfGroup("a", "train", "c"), podOfGroup("b", "train", "d")).with(a, b)
			if first {
				g = gangsOf(s)
			}
			g.Client, g.Live = s, s
			want := Wait
			if first {
				want = GiveBack
			}
			if v := judged(t, g, a); v.Answer != want {
				t.Errorf("first %t: %+v, want answer %d", first, v, want)
			}

			g.Forget(client.ObjectKeyFromObject(a))
			g.Forget(client.ObjectKeyFromObject(b))
			time.Sleep(lookAround)
			first = false
		}
	})
}

// TestRest: the controller spends a small part of its requests on a namespace with many pods.
func TestRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := claimOf("c", "0000-3b-00-2", "a")
		s := newServer(podOfGroup("a", "train", "c")).with(c)
		for i := range 100*pageSize - 1 {
			name := fmt.Sprint("other", i)
			s.pods[name] = podOfGroup(name, "")
		}
		g := gangsOf(s)
		if _, err := g.Ask(t.Context(), c, Up, ""); err != nil {
			t.Fatal(err)
		}

		var begins []time.Duration
		start := time.Now()
		for time.Since(start) < 5*time.Second {
			before, begin := len(s.lists), time.Since(start)
			result, err := g.evaluate(t.Context(), namespaceRequest("default"))
			if err != nil {
				t.Fatal(err)
			}
			if len(s.lists) > before {
				begins = append(begins, begin)
			}
			time.Sleep(min(result.RequeueAfter, 500*time.Millisecond)) // until something happens
		}
		rest := 101 * requestPause // 100 pages and a PodGroup
		if want := []time.Duration{0, rest, 2 * rest}; !slices.Equal(begins, want) {
			t.Errorf("read at %v, want %v", begins, want)
		}
	})
}
