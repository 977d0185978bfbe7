// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"testing"

	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// older is a cluster that says that it has another version.
type older struct {
	kubernetes.Interface
	version string
}

func (o older) Discovery() discovery.DiscoveryInterfaces {
	return olderDiscovery{o.Interface.Discovery(), o.version}
}

type olderDiscovery struct {
	discovery.DiscoveryInterfaces
	version string
}

func (o olderDiscovery) ServerVersionWithContext(context.Context) (*version.Info, error) {
	return &version.Info{GitVersion: o.version}, nil
}

// featuresOf asks a cluster for its features, as the agent does. The cluster says that it has this
// version, or its own one if the version is "".
func featuresOf(t *testing.T, c *kubeapitest.Cluster, version string) devicemodel.Features {
	t.Helper()
	var clientset kubernetes.Interface
	clientset, err := kubernetes.NewForConfig(c.Agent(nodeName))
	must.Succeed(t, err)
	if version != "" {
		clientset = older{clientset, version}
	}
	ctx, cancel := context.WithCancel(t.Context())
	changed := make(chan struct{}, 1)
	f := &dra.Features{Client: clientset, Node: nodeName, Changed: func() {
		changed <- struct{}{}
	}, Log: testr.New(t)}
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	<-changed
	cancel()
	must.Succeed(t, <-done)
	features, known := f.Current()
	if !known {
		t.Fatal("the features are not known")
	}

	slices, err := clientset.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(slices.Items) > 0 {
		t.Errorf("the question was stored: %v, %v", slices.Items, err)
	}

	return features
}

// TestOlderCluster: an API server with the feature gates of Kubernetes 1.34 lacks the features. The
// admission policies limit agents and the controller to their own objects, which this API server
// does not do itself.
func TestOlderCluster(t *testing.T) {
	cluster.Need(t)
	older, err := kubeapitest.Start("../../../deploy", [2]string{"emulated-version", "1.34"})
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, older.Stop()) })

	if diff := gocmp.Diff(devicemodel.Features{}, featuresOf(t, older, "")); diff != "" {
		t.Errorf("features of 1.34: -want +got\n%s", diff)
	}
	want := devicemodel.DefaultFeatures()
	want.EffectNone = true
	if diff := gocmp.Diff(want, featuresOf(t, cluster, "")); diff != "" {
		t.Errorf("features of a new cluster: -want +got\n%s", diff)
	}

	// The feature gate is on, and the scheduler would end.
	if f := featuresOf(t, cluster, "v1.36.1"); f.Counters || f.CountersHarm == "" || !f.SharedCapacity {
		t.Errorf("features of 1.36.1: %+v, want no counters", f)
	}

	admin, err := kubeapitest.Client(older.Admin())
	must.Succeed(t, err)
	c := allocatedClaim(t, admin)

	writer := func(config *kubeapitest.Cluster, node string) client.Client {
		agent, err := kubeapitest.Client(config.Agent(node))
		must.Succeed(t, err)
		return agent
	}

	controller, err := kubeapitest.Client(older.Controller())
	must.Succeed(t, err)

	own := func(c *resourceapi.ResourceClaim) {
		c.Status.Devices = append(c.Status.Devices, resourceapi.AllocatedDeviceStatus{
			Driver: v1alpha1.GroupName, Pool: c.Status.Allocation.Devices.Results[0].Pool,
			Device: c.Status.Allocation.Devices.Results[0].Device,
			Conditions: []metav1.Condition{
				{Type: "Ready", Status: "True", Reason: "Attached",
					LastTransitionTime: metav1.Now()},
			},
		})
	}

	free := func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} }
	steal := func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor[0].Name = "thief" }
	for _, test := range []struct {
		who    string
		by     client.Client
		change func(*resourceapi.ResourceClaim)
		allow  bool
	}{
		{"another node's agent", writer(older, "node2"), own, false},
		{"an agent without a node", writer(older, ""), own, false},
		{"the node's agent that frees the claim", writer(older, nodeName), free, false},
		{"the node's agent that gives it to another pod", writer(older, nodeName), steal, false},
		{"the controller that frees the claim", controller, free, false},
		{"the node's agent", writer(older, nodeName), own, true},
		{"another node's agent that removes it", writer(older, "node2"),
			func(c *resourceapi.ResourceClaim) { c.Status.Devices = nil }, false},
		{"the controller", controller, func(c *resourceapi.ResourceClaim) {
			c.Status.Devices[0].Conditions[0].Reason = "Other"
		}, true},
	} {
		must.Succeed(t, admin.Get(t.Context(), client.ObjectKeyFromObject(c), c))
		wanted := c.DeepCopy()
		test.change(wanted)
		err := test.by.Status().Update(t.Context(), wanted)
		if test.allow && err != nil || !test.allow && !kubeapitest.DeniedByPolicy(err) &&
			!apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, allowed %t", test.who, err, test.allow)
		}
	}
}

// allocatedClaim returns a claim to which a Function of the node is allocated.
func allocatedClaim(t *testing.T, admin client.Client) *resourceapi.ResourceClaim {
	t.Helper()
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "nic"},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "fast"},
		}}}},
	}

	must.Succeed(t, admin.Create(t.Context(), c))
	c.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
			Request: "nic", Driver: v1alpha1.GroupName, Device: "0000-3b-01-0",
			Pool: claim.PoolID{Node: nodeName, PF: "0000:3b:00.0", DevicePool: "fast"}.String(),
		}}}},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: "pod1", UID: types.UID("pod1-uid")},
		},
	}

	must.Succeed(t, admin.Status().Update(t.Context(), c))
	return c
}

// TestClusterWithLists: an API server with the feature gate of lists takes and keeps the slices of
// a ConnectX-8 with Data Direct. One without it gets the first value of each list.
func TestClusterWithLists(t *testing.T) {
	cluster.Need(t)
	lists, err := kubeapitest.Start("../../../deploy",
		[2]string{"feature-gates", "DRAListTypeAttributes=true"})
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, lists.Stop()) })

	if diff := gocmp.Diff(devicemodel.AllFeatures(), featuresOf(t, lists, "")); diff != "" {
		t.Errorf("features: -want +got\n%s", diff)
	}
	// The scheduler would refuse claims.
	if f := featuresOf(t, lists, "v1.36.6"); f.Lists || f.ListsHarm == "" || !f.Counters {
		t.Errorf("features of 1.36.6: %+v, want no lists", f)
	}

	f := pooltest.VF(0x3b, 0)
	f.DataDirectRoots, f.NUMANodes = []string{"pci0008:00"}, []int{1, 0}
	p := pooltest.DRA("fast", f)
	p.Spec.DataDirect, p.Spec.ListNUMANodes = true, true
	full := devicemodel.Resources(nodeName, []pool.Pool{p},
		func(function.Function) []function.Problem { return nil },
		func(function.ID, string) bool { return false })
	for name, c := range map[string]*kubeapitest.Cluster{"lists": lists, "none": cluster} {
		t.Run(name, func(t *testing.T) {
			clientset, err := kubernetes.NewForConfig(c.Agent(nodeName))
			must.Succeed(t, err)
			for _, p := range featuresOf(t, c, "").Reduce(full).Pools {
				want := p.Slices[0].Devices[0].Attributes
				kept, err := clientset.ResourceV1().ResourceSlices().Create(t.Context(),
					&resourceapi.ResourceSlice{
						ObjectMeta: metav1.ObjectMeta{GenerateName: "lists-"},
						Spec: resourceapi.ResourceSliceSpec{
							Driver: v1alpha1.GroupName, NodeName: new(nodeName),
							Devices: p.Slices[0].Devices,
							Pool: resourceapi.ResourcePool{
								Name: nodeName + "/lists", Generation: 1, ResourceSliceCount: 1,
							},
						},
					}, metav1.CreateOptions{})
				must.Succeed(t, err)
				t.Cleanup(func() {
					must.Succeed(t, clientset.ResourceV1().ResourceSlices().Delete(
						context.Background(), kept.Name, metav1.DeleteOptions{}))
				})
				if diff := gocmp.Diff(want, kept.Spec.Devices[0].Attributes); diff != "" {
					t.Errorf("attributes -published +kept\n%s", diff)
				}
			}
		})
	}
}
