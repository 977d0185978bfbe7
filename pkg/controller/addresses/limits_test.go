// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// claimed returns the n-th Port of claims of a namespace, which has this maximum rate.
func claimed(n int, maximum int32) *v1alpha1.XPUPort {
	name := fmt.Sprint("port-", n)
	p := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: "node1", MAC: fmt.Sprintf("02:00:00:00:00:%02x", n), Network: "blue",
			Function: v1alpha1.FunctionRef{PCIAddress: fmt.Sprintf("0000:3b:%02x.%d", 2+n/8, n%8)},
			Claim:    v1alpha1.ClaimRef{Name: name, UID: "uid"},
		},
	}
	if maximum > 0 {
		p.Spec.Rate = &v1alpha1.PortRate{Maximum: maximum, Guaranteed: maximum / 2}
	}
	return p
}

// ofPod returns a Port that an agent made for a pod of the namespace, n seconds after others.
func ofPod(n int) *v1alpha1.XPUPort {
	p := claimed(n, 0)
	p.Namespace, p.Spec.Claim = "xpu-system", v1alpha1.ClaimRef{}
	p.Spec.Pod = &v1alpha1.PodRef{Namespace: "ns", Name: "pod"}
	p.UID = "uid"
	p.CreationTimestamp = metav1.NewTime(time.Unix(int64(n), 0))
	return p
}

func limitsOf(ports, bandwidth, guaranteed string) (limits []Limit) {
	for name, most := range map[corev1.ResourceName]string{
		HardPorts: ports, HardBandwidth: bandwidth, HardGuaranteed: guaranteed,
	} {
		if most != "" {
			limits = append(limits, Limit{Quota: "q", Name: name, Most: resource.MustParse(most)})
		}
	}
	return limits
}

// refusedWith reports whether an error is a refusal because of a quota, with this text.
func refusedWith(err error, text string) bool {
	refusal, refused := errors.AsType[*reconciling.Refusal](err)
	return refused && refusal.Reason == v1alpha1.ReasonQuotaExceeded &&
		strings.Contains(refusal.Message, text)
}

// TestLimits: the Ports of a namespace are counted and summed up, those that are about to be
// created too. A Port without a maximum fits into no bandwidth. Sums do not overflow.
func TestLimits(t *testing.T) {
	blue := Join{Network: &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}}}
	for name, test := range map[string]struct {
		there   []*v1alpha1.XPUPort
		assumed []*v1alpha1.XPUPort
		port    *v1alpha1.XPUPort
		limits  []Limit
		want    string // of the refusal
	}{
		"no quota": {[]*v1alpha1.XPUPort{claimed(1, 0)}, nil, claimed(2, 0), nil, ""},
		"the last port": {
			[]*v1alpha1.XPUPort{claimed(1, 0)}, nil, claimed(2, 0), limitsOf("2", "", ""), "",
		},
		"one port too many": {
			[]*v1alpha1.XPUPort{claimed(1, 0)}, []*v1alpha1.XPUPort{claimed(2, 0)}, claimed(3, 0),
			limitsOf("2", "", ""), "pods of the namespace have 2 XPUPorts",
		},
		"the last bandwidth": {
			[]*v1alpha1.XPUPort{claimed(1, 600)}, nil, claimed(2, 400), limitsOf("", "1G", "500M"), "",
		},
		"too much bandwidth": {
			[]*v1alpha1.XPUPort{claimed(1, 600)}, nil, claimed(2, 401), limitsOf("", "1G", ""),
			"pods of the namespace have 600 Mbit/s, and 401 are asked for",
		},
		"too much guaranteed": {
			[]*v1alpha1.XPUPort{claimed(1, 600)}, nil, claimed(2, 400), limitsOf("", "", "499M"),
			"300 Mbit/s are guaranteed already, and 200 are asked for",
		},
		"no rate": {
			nil, nil, claimed(1, 0), limitsOf("", "1G", ""), "the interface has no maximum rate",
		},
		"no rate, of one from before": {
			[]*v1alpha1.XPUPort{claimed(1, 0)}, nil, claimed(2, 1), limitsOf("", "1G", ""),
			"1 XPUPorts have no maximum rate",
		},
		"no rate guarantees nothing": {
			[]*v1alpha1.XPUPort{claimed(1, 0)}, nil, claimed(2, 0), limitsOf("", "", "0"), "",
		},
		"no rate, while others are guaranteed too much": {
			[]*v1alpha1.XPUPort{claimed(1, 600)}, nil, claimed(2, 0), limitsOf("", "", "200M"), "",
		},
		"rates beyond an int64 of bit/s": {
			[]*v1alpha1.XPUPort{claimed(1, math.MaxInt32)}, nil, claimed(2, math.MaxInt32),
			limitsOf("", "4294967294M", ""), "",
		},
		"a bit too much": {
			[]*v1alpha1.XPUPort{claimed(1, math.MaxInt32)}, nil, claimed(2, math.MaxInt32),
			limitsOf("", "4294967293999999", ""), "are asked for",
		},
		"a quota beyond an int64": {
			[]*v1alpha1.XPUPort{claimed(1, math.MaxInt32)}, nil, claimed(2, 1), limitsOf("", "90E", ""),
			"",
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := NewAllocator(model.NewPorts(test.there...))
			for _, other := range test.assumed {
				if err := l.Assume(t.Context(), other, nil, blue); err != nil {
					t.Fatal(err)
				}
			}
			err := l.Assume(t.Context(), test.port, test.limits, blue)
			if test.want == "" && err != nil || test.want != "" && !refusedWith(err, test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}

// backwards lists ResourceQuotas in the reverse of the order of their names, as a cache may.
type backwards struct{ client.Reader }

func (backwards) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	quotas := list.(*corev1.ResourceQuotaList)
	for _, name := range []string{"b", "a"} {
		quotas.Items = append(quotas.Items, corev1.ResourceQuota{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
				HardPorts: resource.MustParse("0"), HardGuaranteed: resource.MustParse("0"),
			}},
		})
	}
	return nil
}

// TestLimitsAreSorted: of two quotas, the same one refuses a Port each time that it is tried, so
// that its condition is not written each time.
func TestLimitsAreSorted(t *testing.T) {
	limits, err := LimitsOf(t.Context(), backwards{}, "ns")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, limit := range limits {
		got = append(got, limit.Quota+" "+string(limit.Name))
	}

	want := []string{
		"a " + string(HardPorts), "a " + string(HardGuaranteed), "b " + string(HardPorts),
		"b " + string(HardGuaranteed),
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestLimitsOfPods: of the Ports that agents made, those are admitted first that were made first,
// however many are admitted at a time. A Port that is refused leaves its place when it is gone.
func TestLimitsOfPods(t *testing.T) {
	ports := model.NewPorts(claimed(1, 0), ofPod(3), ofPod(2), ofPod(4))
	l := NewAllocator(ports)
	network := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}}
	limits := limitsOf("3", "", "")
	adopt := func(n int) error {
		_, _, err := l.Adopt(t.Context(), ofPod(n), network, limits)
		return err
	}
	if err := errors.Join(adopt(3), adopt(2)); err != nil {
		t.Error(err)
	}
	if err := adopt(4); !refusedWith(err, "have 3 XPUPorts") {
		t.Errorf("the fourth: %v", err)
	}
	ports.Remove(client.ObjectKeyFromObject(ofPod(2)))
	if err := adopt(4); err != nil {
		t.Errorf("the fourth, when there is room: %v", err)
	}
}

// TestLimitsSideBySide: Ports that are created at the same time do not exceed a limit together.
func TestLimitsSideBySide(t *testing.T) {
	l := NewAllocator(model.NewPorts())
	blue := Join{Network: &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}}}
	var all sync.WaitGroup
	var fit atomic.Int32
	for n := range 32 {
		all.Go(func() {
			err := l.Assume(t.Context(), claimed(n, 100), limitsOf("", "1G", ""), blue)
			if err == nil {
				fit.Add(1)
			} else if !refusedWith(err, "") {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if fit.Load() != 10 {
		t.Errorf("%d Ports of 100 Mbit/s fit into 1 Gbit/s", fit.Load())
	}
}

// TestFitting: of Ports that wait, those fit for which there is room, together with those before
// them that fit.
func TestFitting(t *testing.T) {
	l := NewAllocator(model.NewPorts(claimed(1, 600)))
	waiting := []*v1alpha1.XPUPort{
		claimed(2, 500), claimed(3, 300), claimed(4, 0), claimed(5, 200), claimed(6, 100),
	}
	for name, test := range map[string]struct {
		limits []Limit
		want   []bool
	}{
		"no quota":  {nil, []bool{true, true, true, true, true}},
		"ports":     {limitsOf("3", "", ""), []bool{true, true, false, false, false}},
		"bandwidth": {limitsOf("", "1G", ""), []bool{false, true, false, false, true}},
	} {
		fit, err := l.Fitting(t.Context(), test.limits, waiting)
		if err != nil || !slices.Equal(fit, test.want) {
			t.Errorf("%s: %v, %v; want %v", name, fit, err, test.want)
		}
	}
	if fit, err := l.Fitting(t.Context(), nil, nil); err != nil || len(fit) > 0 {
		t.Errorf("no Ports: %v, %v", fit, err)
	}
}

// TestWhenLimitsChanged: only what may leave more room has claims looked at again. What Kubernetes
// counts does not.
func TestWhenLimitsChanged(t *testing.T) {
	quota := func(change func(*corev1.ResourceQuota)) *corev1.ResourceQuota {
		q := &corev1.ResourceQuota{Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			corev1.ResourcePods: resource.MustParse("5"), HardPorts: resource.MustParse("1"),
		}}}
		change(q)
		return q
	}
	same := func(*corev1.ResourceQuota) {}
	hard := func(name corev1.ResourceName, most string) func(*corev1.ResourceQuota) {
		return func(q *corev1.ResourceQuota) { q.Spec.Hard[name] = resource.MustParse(most) }
	}

	for name, test := range map[string]struct {
		change func(*corev1.ResourceQuota)
		want   bool
	}{
		"nothing":               {same, false},
		"the limit":             {hard(HardPorts, "2"), true},
		"another way to say it": {hard(HardPorts, "1000m"), false},
		"a limit more":          {hard(HardBandwidth, "1G"), true},
		"pods":                  {hard(corev1.ResourcePods, "6"), false},
		"no limit": {
			func(q *corev1.ResourceQuota) { delete(q.Spec.Hard, HardPorts) }, true,
		},
		"scopes": {
			func(q *corev1.ResourceQuota) {
				q.Spec.Scopes = []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeBestEffort}
			}, true,
		},
		"what Kubernetes counts": {
			func(q *corev1.ResourceQuota) {
				q.Status.Used = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("1")}
			}, false,
		},
	} {
		e := event.UpdateEvent{ObjectOld: quota(same), ObjectNew: quota(test.change)}
		if got := limitsChanged.Update(e); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}

	gone := event.DeleteEvent{Object: quota(same)}
	others := event.DeleteEvent{Object: quota(func(q *corev1.ResourceQuota) {
		delete(q.Spec.Hard, HardPorts)
	})}
	if !limitsChanged.Delete(gone) || limitsChanged.Delete(others) ||
		limitsChanged.Create(event.CreateEvent{Object: quota(same)}) {
		t.Error("only the deletion of a quota with limits leaves room")
	}
}
