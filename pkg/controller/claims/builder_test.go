// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// TestAllocatedOn: an allocation is for the nodes that its node selector names, or for all.
func TestAllocatedOn(t *testing.T) {
	on := func(nodes ...string) *resourceapi.AllocationResult {
		term := corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{
			{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: nodes},
		}}
		return &resourceapi.AllocationResult{NodeSelector: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{term},
		}}
	}

	for name, test := range map[string]struct {
		allocation *resourceapi.AllocationResult
		want       bool
	}{
		"the node":         {on("node2"), true},
		"one of the nodes": {on("node1", "node2"), true},
		"another node":     {on("node1"), false},
		"none": {
			&resourceapi.AllocationResult{NodeSelector: &corev1.NodeSelector{}}, false,
		},
		"any": {&resourceapi.AllocationResult{}, true},
	} {
		if got := allocatedOn(test.allocation, "node2"); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestAllocationStamp: an allocation without a time stamp has an empty one in the Port.
func TestAllocationStamp(t *testing.T) {
	stamp := metav1.NewTime(time.Date(2026, 3, 1, 12, 0, 5, 0, time.FixedZone("CET", 3600)))
	for want, allocation := range map[string]*resourceapi.AllocationResult{
		"":                     {},
		"2026-03-01T11:00:05Z": {AllocationTimestamp: &stamp},
	} {
		c := &resourceapi.ResourceClaim{}
		c.Status.Allocation = allocation
		if got := allocationStamp(c); got != want {
			t.Errorf("stamp %q, want %q", got, want)
		}
	}
}

// away is an API server that does not answer.
type away struct{ client.Client }

var errAway = errors.New("the API server is away")

func (away) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errAway
}

// TestAPIServerAway: what could not be read is tried again, and is not taken for something that
// does not exist.
func TestAPIServerAway(t *testing.T) {
	r := &reconciler{
		Cluster: reconciling.Cluster{Client: away{}},
		Options: Options{Catalog: networks.Catalog{Client: away{}}},
	}
	for what, d := range map[string]*claim.Device{
		"network of a DevicePool": {ID: claim.PoolID{DevicePool: "fast"}},
		"XPUNetwork":              {Config: v1alpha1.InterfaceConfig{Network: "lab"}},
		"tagged XPUNetwork": {Config: v1alpha1.InterfaceConfig{
			Networks: []v1alpha1.InterfaceNetwork{{Name: "lab"}},
		}},
	} {
		_, err := r.joinsOf(t.Context(), &resourceapi.ResourceClaim{}, d)
		var refusal *reconciling.Refusal
		if !errors.Is(err, errAway) || errors.As(err, &refusal) {
			t.Errorf("%s: error %v, want the error of the API server", what, err)
		}
	}
}

// onePool is an API server that has one DevicePool and nothing else.
type onePool struct {
	client.Client
	spec v1alpha1.DevicePoolSpec
}

func (p onePool) Get(
	_ context.Context, _ client.ObjectKey, object client.Object, _ ...client.GetOption,
) error {
	pool, isPool := object.(*v1alpha1.DevicePool)
	if !isPool {
		return errAway
	}
	pool.Spec = p.spec
	return nil
}

// TestBondInPoolWithNetwork: a port of a bond is refused before the network of its DevicePool is
// looked at, and needs no Port without a network.
func TestBondInPoolWithNetwork(t *testing.T) {
	d := &claim.Device{Interface: function.Interface{Bond: &function.Bond{
		Name: "bond0", Mode: function.BondLACP,
	}}}
	for network, want := range map[string]string{
		"": "", "blue": "bond.mode 802.3ad: must be active-backup for a Function that joins a network (blue)",
	} {
		r := &reconciler{Cluster: reconciling.Cluster{
			Client: onePool{spec: v1alpha1.DevicePoolSpec{Network: network}},
		}}
		joins, err := r.joinsOf(t.Context(), &resourceapi.ResourceClaim{}, d)
		refusal, refused := errors.AsType[*reconciling.Refusal](err)
		if len(joins) > 0 || (err != nil) != (want != "") || refused &&
			(refusal.Reason != v1alpha1.ReasonInvalidConfig || !strings.HasPrefix(refusal.Message, want)) {
			t.Errorf("network %q: joins %v, error %v, want %q", network, joins, err, want)
		}
	}
}
