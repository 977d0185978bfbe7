// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// limit names a limit that keeps a tenant's objects from being copied.
type limit string

// Limits of a tenant.
const (
	limitNone       limit = ""
	limitPorts      limit = "maxPorts"
	limitBandwidth  limit = "maxBandwidth"
	limitGuaranteed limit = "maxGuaranteedBandwidth"
	limitNodes      limit = "maxNodes"
	limitSegments   limit = "segments"
	limitSize       limit = "size"
)

// limitTracker knows which objects of tenants wait because of a limit. Safe for concurrent use.
type limitTracker struct {
	onChange func(tenant string) // called when the limits that a tenant has reached change

	mu       sync.Mutex
	byTenant map[string]*waitingObjects
}

// waitingObjects are the objects of a tenant that wait. They are also counted, because all tenants
// share a lock, and the cost under it must not grow with what one of them has waiting.
type waitingObjects struct {
	limits map[objectOfKind]limit
	counts map[reachedLimit]int
}

// objectOfKind identifies an object of a tenant's cluster.
type objectOfKind struct {
	kind string // "XPUPorts"
	req  mcreconcile.Request
}

// reachedLimit is a limit, and the kind of the objects that wait because of it.
type reachedLimit struct {
	limit limit
	kind  string
}

func newLimitTracker() *limitTracker {
	return &limitTracker{byTenant: map[string]*waitingObjects{}, onChange: func(string) {}}
}

// set records the limit that an object waits for. limitNone means that it waits for none.
func (r *limitTracker) set(tenant string, object objectOfKind, reason limit) {
	if r.record(tenant, object, reason) {
		r.onChange(tenant)
	}
}

// record is set without the call of onChange. It reports whether the tenant has reached a limit, or
// no longer reaches one.
func (r *limitTracker) record(tenant string, object objectOfKind, reason limit) (news bool) {
	r.mu.Lock()
	defer r.mu.Unlock()

	waiting := r.byTenant[tenant]
	if waiting == nil {
		if reason == limitNone { // the usual case
			return false
		}
		waiting = &waitingObjects{
			limits: map[objectOfKind]limit{}, counts: map[reachedLimit]int{},
		}
		r.byTenant[tenant] = waiting
	}

	news = waiting.set(object, reason)
	if len(waiting.limits) == 0 {
		delete(r.byTenant, tenant)
	}

	return news
}

// set records the limit that an object waits for, and reports whether it is the first one that
// waits for this limit, or was the last one that waited for another.
func (w *waitingObjects) set(object objectOfKind, reason limit) (news bool) {
	before := w.limits[object]
	if before == reason {
		return false
	}

	if before != limitNone {
		delete(w.limits, object)
		was := reachedLimit{before, object.kind}
		if w.counts[was]--; w.counts[was] == 0 {
			delete(w.counts, was)
			news = true
		}
	}

	if reason != limitNone {
		w.limits[object] = reason
		is := reachedLimit{reason, object.kind}
		w.counts[is]++
		news = news || w.counts[is] == 1
	}

	return news
}

// reached returns the limits that the tenant has reached, sorted. It needs the lock.
func (r *limitTracker) reached(tenant string) []reachedLimit {
	waiting := r.byTenant[tenant]
	if waiting == nil {
		return nil
	}
	return slices.SortedFunc(maps.Keys(waiting.counts), func(a, b reachedLimit) int {
		return cmp.Or(cmp.Compare(a.limit, b.limit), cmp.Compare(a.kind, b.kind))
	})
}

// forget drops everything recorded about a tenant.
func (r *limitTracker) forget(tenant string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byTenant, tenant)
}

// message says which limits the tenant has reached and what to do, or "" if it has reached none.
func (r *limitTracker) message(t *v1alpha1.XPUTenant, l Limits) string {
	r.mu.Lock()
	defer r.mu.Unlock()

	var all []string
	for _, reached := range r.reached(t.Name) {
		switch reached.limit {
		case limitPorts:
			all = append(all,
				fmt.Sprintf("it has %d XPUPorts, as many as it may have, and others wait; raise "+
					"spec.maxPorts", maxPorts(t, l)))
		case limitBandwidth:
			all = append(all,
				fmt.Sprintf("XPUPorts wait because it may have %d Mbit/s, or because one has no "+
					"maximum rate; raise spec.maxBandwidth, or have them set vf.maxTxRate",
					ptr.Deref(t.Spec.MaxBandwidth, 0)))
		case limitGuaranteed:
			all = append(all,
				fmt.Sprintf("XPUPorts wait because it may have %d Mbit/s guaranteed; raise "+
					"spec.maxGuaranteedBandwidth", ptr.Deref(t.Spec.MaxGuaranteedBandwidth, 0)))
		case limitNodes:
			all = append(all,
				fmt.Sprintf("it has %d XPUNodes, as many as it may have, and cards of others are "+
					"not found; raise "+
					"spec.maxNodes", maxNodes(t, l)))
		case limitSegments:
			all = append(all, "all of its segments are in use, and others of its XPUNetworks "+
				"wait; enlarge spec.vlans and spec.vnis")
		case limitSize:
			all = append(all,
				fmt.Sprintf("some of its %s have more than %d bytes and are not carried over; "+
					"delete them there", reached.kind, l.ObjectBytes))
		}
	}

	return strings.Join(all, "; ")
}

// maxPorts returns how many XPUPorts the tenant may have.
func maxPorts(t *v1alpha1.XPUTenant, l Limits) int {
	if t.Spec.MaxPorts != nil {
		return int(*t.Spec.MaxPorts)
	}
	return l.Ports
}

// portsAllowance returns what the tenant's XPUPorts may cost.
func portsAllowance(t *v1alpha1.XPUTenant, l Limits) allowance {
	return allowance{
		count: maxPorts(t, l), maximum: t.Spec.MaxBandwidth,
		guaranteed: t.Spec.MaxGuaranteedBandwidth,
	}
}

// maxNodes returns how many XPUNodes the tenant may have.
func maxNodes(t *v1alpha1.XPUTenant, l Limits) int {
	if t.Spec.MaxNodes != nil {
		return int(*t.Spec.MaxNodes)
	}
	return l.Nodes
}

// tooLarge returns a *problem if the object exceeded most bytes, so that the cache has only its
// metadata.
func (tc *tenantCluster) tooLarge(o client.Object, most int) error {
	size := originalBytes(o)
	if size == 0 {
		return nil
	}
	tc.waitsFor = limitSize
	return problemf(v1alpha1.ReasonQuotaExceeded,
		"it has %d bytes, more than the %d that the infra cluster takes; make a smaller one",
		size, most)
}
