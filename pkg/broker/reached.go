// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// limit is one that keeps objects of a tenant from being carried over.
type limit string

// Limits of a tenant.
const (
	limitNone     limit = ""
	limitPorts    limit = "maxPorts"
	limitNodes    limit = "maxNodes"
	limitSegments limit = "segments"
	limitSize     limit = "size"
)

// reached knows which objects of tenants wait because of a limit. Safe for concurrent use.
type reached struct {
	changed func(tenant string) // called when a tenant has reached other limits than before

	mu sync.Mutex
	by map[string]map[objectOfKind]limit // by tenant
}

// objectOfKind is an object of a tenant's cluster.
type objectOfKind struct {
	kind string // "XPUPorts"
	req  mcreconcile.Request
}

func newReached() *reached {
	return &reached{by: map[string]map[objectOfKind]limit{}, changed: func(string) {}}
}

// set records by which limit an object waits, limitNone for none.
func (r *reached) set(tenant string, object objectOfKind, by limit) {
	r.mu.Lock()
	if r.by[tenant][object] == by { // as nearly always
		r.mu.Unlock()
		return
	}

	before := r.limits(tenant)
	if by == limitNone {
		delete(r.by[tenant], object)
	} else {
		if r.by[tenant] == nil {
			r.by[tenant] = map[objectOfKind]limit{}
		}
		r.by[tenant][object] = by
	}

	if len(r.by[tenant]) == 0 {
		delete(r.by, tenant)
	}

	news := !slices.Equal(before, r.limits(tenant))
	r.mu.Unlock()

	if news {
		r.changed(tenant)
	}
}

// limits are those that the tenant has reached, each with the kind of which objects wait.
func (r *reached) limits(tenant string) []string {
	all := map[string]bool{}
	for object, by := range r.by[tenant] {
		all[string(by)+" "+object.kind] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// forget drops what is known of a tenant.
func (r *reached) forget(tenant string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.by, tenant)
}

// message says which limits the tenant has reached, and what to do; "" if it has reached none.
func (r *reached) message(t *v1alpha1.XPUTenant, l Limits) string {
	r.mu.Lock()
	defer r.mu.Unlock()

	var all []string
	for _, text := range r.limits(t.Name) {
		by, kind, _ := strings.Cut(text, " ")
		switch limit(by) {
		case limitPorts:
			all = append(all,
				fmt.Sprintf("it has %d XPUPorts, as many as it may have, and others wait; raise "+
					"spec.maxPorts", maxPorts(t, l)))
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
					"delete them there", kind,
					l.ObjectBytes))
		}
	}

	return strings.Join(all, "; ")
}

// maxPorts is how many XPUPorts the tenant may have.
func maxPorts(t *v1alpha1.XPUTenant, l Limits) int {
	if t.Spec.MaxPorts != nil {
		return int(*t.Spec.MaxPorts)
	}
	return l.Ports
}

// maxNodes is how many XPUNodes the tenant may have.
func maxNodes(t *v1alpha1.XPUTenant, l Limits) int {
	if t.Spec.MaxNodes != nil {
		return int(*t.Spec.MaxNodes)
	}
	return l.Nodes
}

// tooLarge returns a *problem if only the metadata of the object was kept.
func (s *site) tooLarge(o client.Object, most int) error {
	size := largeBytes(o)
	if size == 0 {
		return nil
	}
	s.waitsFor = limitSize
	return problemf(v1alpha1.ReasonQuotaExceeded,
		"it has %d bytes, more than the %d that the infra cluster takes; make a smaller one",
		size, most)
}
