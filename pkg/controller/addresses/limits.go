// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// Names in spec.hard of a ResourceQuota that xpu-controller heeds. Kubernetes itself counts none of
// them.
const (
	// HardPorts is the most XPUPorts of pods of the namespace.
	HardPorts corev1.ResourceName = v1alpha1.GroupName + "/ports"
	// HardBandwidth is the highest sum of the maximum rates of these XPUPorts, in bit/s.
	HardBandwidth corev1.ResourceName = v1alpha1.GroupName + "/bandwidth"
	// HardGuaranteed is the highest sum of their guaranteed rates, in bit/s.
	HardGuaranteed corev1.ResourceName = v1alpha1.GroupName + "/guaranteed-bandwidth"
)

// Limit is a limit that a ResourceQuota sets for a namespace.
type Limit struct {
	Quota string // name of the ResourceQuota
	Name  corev1.ResourceName
	Most  resource.Quantity
}

// LimitsOf returns the limits of a namespace, sorted by the quotas' names, so that the refusal of a
// Port that waits stays the same. A ResourceQuota with scopes is for some pods only, and a Port
// does not tell for which, so that it does not count.
func LimitsOf(ctx context.Context, c client.Reader, namespace string) ([]Limit, error) {
	if namespace == "" {
		return nil, nil
	}
	var quotas corev1.ResourceQuotaList
	if err := c.List(ctx, &quotas, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("ResourceQuotas of namespace %s: %w", namespace, err)
	}

	var limits []Limit
	for i := range quotas.Items {
		limits = append(limits, limitsIn(&quotas.Items[i])...)
	}

	slices.SortStableFunc(limits, func(a, b Limit) int { return cmp.Compare(a.Quota, b.Quota) })
	return limits, nil
}

// limitsIn returns the limits that one ResourceQuota sets.
func limitsIn(quota *corev1.ResourceQuota) (limits []Limit) {
	if len(quota.Spec.Scopes) > 0 || quota.Spec.ScopeSelector != nil {
		return nil
	}
	for _, name := range []corev1.ResourceName{HardPorts, HardBandwidth, HardGuaranteed} {
		if most, limited := quota.Spec.Hard[name]; limited {
			limits = append(limits, Limit{Quota: quota.Name, Name: name, Most: most})
		}
	}
	return limits
}

// WhenLimitsChanged selects changes of ResourceQuotas that may leave more room than before.
var WhenLimitsChanged = builder.WithPredicates(limitsChanged)

// limitsChanged compares what is limited. The generation of a ResourceQuota never changes, and its
// status changes with every pod.
var limitsChanged = predicate.Funcs{
	CreateFunc: func(event.CreateEvent) bool { return false },
	UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld.(*corev1.ResourceQuota), e.ObjectNew.(*corev1.ResourceQuota)
		return !equality.Semantic.DeepEqual(limitsIn(before), limitsIn(after))
	},
	DeleteFunc: func(e event.DeleteEvent) bool {
		return len(limitsIn(e.Object.(*corev1.ResourceQuota))) > 0
	},
}

// checkLimits returns a refusal if the Port does not fit into what is left of the limits of its
// namespace. It is called in a transaction.
func (l *Allocator) checkLimits(
	ports model.View, port *v1alpha1.XPUPort, limits []Limit,
) error {
	if len(limits) == 0 {
		return nil
	}
	used := l.costOfOthers(ports, port)
	for _, limit := range limits {
		if err := limit.check(used, v1alpha1.CostOf(port)); err != nil {
			return err
		}
	}
	return nil
}

// Fitting reports for each of these Ports of one namespace, which are not created yet, whether it
// fits into the limits together with the Ports that there are and those before it that fit.
func (l *Allocator) Fitting(
	ctx context.Context, limits []Limit, ports []*v1alpha1.XPUPort,
) (fit []bool, err error) {
	if len(ports) == 0 {
		return nil, nil
	}

	err = l.ports.Transact(ctx, func(view model.View) error {
		l.expire()
		used := l.costOfOthers(view, ports[0])
		for _, port := range ports {
			cost := v1alpha1.CostOf(port)
			fits := !slices.ContainsFunc(limits, func(limit Limit) bool {
				return limit.check(used, cost) != nil
			})
			if fits {
				used = used.Plus(cost)
			}
			fit = append(fit, fits)
		}
		return nil
	})
	return fit, err
}

// costOfOthers returns what the other Ports of the namespace cost that are there, about to be
// created, or to be admitted before this one.
func (l *Allocator) costOfOthers(
	ports model.View, port *v1alpha1.XPUPort,
) (sum v1alpha1.PortSum) {
	namespace, own := model.NamespaceOf(port), client.ObjectKeyFromObject(port)
	for _, other := range ports.By(model.ByNamespace, namespace) {
		key := client.ObjectKeyFromObject(other)
		_, assumed := l.assumed[key]
		if key != own && !assumed && (v1alpha1.IsAdmitted(other) || precedes(other, port)) {
			sum = sum.Plus(v1alpha1.CostOf(other))
		}
	}
	for key, other := range l.assumed {
		if key != own && model.NamespaceOf(other.port) == namespace {
			sum = sum.Plus(v1alpha1.CostOf(other.port))
		}
	}
	return sum
}

// precedes orders Ports that wait for their admission, so that each of two does not wait for the
// other, and not both are admitted.
func precedes(a, b *v1alpha1.XPUPort) bool {
	if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return a.CreationTimestamp.Before(&b.CreationTimestamp)
	}
	return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) < 0
}

// check returns a refusal if the sum of both costs exceeds the limit.
func (l Limit) check(used, cost v1alpha1.PortSum) error {
	sum := used.Plus(cost)
	refuse := func(format string, args ...any) error {
		return reconciling.Refuse(v1alpha1.ReasonQuotaExceeded, "ResourceQuota %s: %s is %s, and %s",
			l.Quota, l.Name, l.Most.String(), fmt.Sprintf(format, args...))
	}
	exceeds := func(mbits int64) bool {
		return l.Most.Cmp(*resource.NewScaledQuantity(mbits, resource.Mega)) < 0
	}

	switch {
	case l.Name == HardPorts && l.Most.CmpInt64(int64(sum.Ports)) < 0:
		return refuse("pods of the namespace have %d XPUPorts", used.Ports)
	case l.Name == HardGuaranteed && cost.Guaranteed > 0 && exceeds(sum.Guaranteed):
		return refuse("%d Mbit/s are guaranteed already, and %d are asked for", used.Guaranteed,
			cost.Guaranteed)
	case l.Name == HardBandwidth && cost.Unlimited > 0:
		return refuse("the interface has no maximum rate; set vf.maxTxRate, or max_tx_rate of the " +
			"network configuration")
	case l.Name == HardBandwidth && used.Unlimited > 0:
		return refuse("%d XPUPorts have no maximum rate; set vf.maxTxRate or max_tx_rate for them, and "+
			"make their pods anew", used.Unlimited)
	case l.Name == HardBandwidth && exceeds(sum.Maximum):
		return refuse("pods of the namespace have %d Mbit/s, and %d are asked for", used.Maximum,
			cost.Maximum)
	}
	return nil
}
