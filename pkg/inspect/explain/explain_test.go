// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

var at = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// cluster has pod web with a claim of one VF in network blue, and no problems.
type cluster struct {
	pod     *corev1.Pod
	claim   *resourceapi.ResourceClaim
	port    *v1alpha1.XPUPort
	pool    *v1alpha1.DevicePool
	network *v1alpha1.XPUNetwork
	events  []corev1.Event
	state   *nodestate.State
	agent   error // why the agent cannot be asked
	why     []string
	target  string
	away    string // why the node's agent does not run, as its XPUNode says
	class   string // extended resource of a DeviceClass
	more    []client.Object
	listing error // what the API server answers to a list of DevicePools, XPUNetworks or XPUPorts
	getting error // what it answers to a read of a ResourceClaimTemplate
}

func (c *cluster) attachment() *nodestate.Attachment { return c.state.Functions[0].Attachment }

func newCluster() *cluster {
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid"),
			CreationTimestamp: metav1.NewTime(at)}
	}

	c := &cluster{
		pod: &corev1.Pod{
			ObjectMeta: meta("web"),
			Spec: corev1.PodSpec{
				NodeName: "node1",
				ResourceClaims: []corev1.PodResourceClaim{
					{Name: "nic", ResourceClaimTemplateName: new("blue")},
				},
				Containers: []corev1.Container{{Name: "main"}},
			},
			Status: corev1.PodStatus{
				Phase: corev1.PodRunning,
				ResourceClaimStatuses: []corev1.PodResourceClaimStatus{
					{Name: "nic", ResourceClaimName: new("web-nic")},
				},
				Conditions: []corev1.PodCondition{
					{Type: corev1.PodScheduled, Status: corev1.ConditionTrue,
						LastTransitionTime: metav1.NewTime(at.Add(2 * time.Second))},
					{Type: corev1.PodReady, Status: corev1.ConditionTrue,
						LastTransitionTime: metav1.NewTime(at.Add(5 * time.Second))},
				},
			},
		},
		claim: &resourceapi.ResourceClaim{ObjectMeta: meta("web-nic")},
		port: &v1alpha1.XPUPort{
			ObjectMeta: meta("node1-0000-3b-01-0"),
			Spec: v1alpha1.XPUPortSpec{
				NodeName: "node1", XPU: "xpu-1", Network: "blue", MAC: "02:00:00:00:00:01",
				Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:01.0"},
				Claim:    v1alpha1.ClaimRef{Name: "web-nic", UID: "web-nic-uid"},
			},
			Status: v1alpha1.XPUPortStatus{MTU: 1400, Addresses: []string{"10.1.0.2/24"},
				BridgePort: "vf-1", Conditions: []metav1.Condition{
					{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Up",
						LastTransitionTime: metav1.NewTime(at.Add(3 * time.Second))},
				}},
		},
		pool: &v1alpha1.DevicePool{
			ObjectMeta: metav1.ObjectMeta{Name: "fast"}, Spec: v1alpha1.DevicePoolSpec{
				Publish: v1alpha1.PublishDRA, Network: "blue",
			},
		},
		network: &v1alpha1.XPUNetwork{
			ObjectMeta: metav1.ObjectMeta{Name: "blue"}, Spec: v1alpha1.XPUNetworkSpec{VLAN: 10},
		},
		state: &nodestate.State{Functions: []nodestate.Function{{
			ID: function.ID{Address: "0000:3b:01.0"}, Kind: function.VF, Pool: "fast",
			Attachment: &nodestate.Attachment{
				State: "Attached",
				Pod:   nodestate.Pod{Namespace: "default", Name: "web", UID: "web-uid"},
				Claim: nodestate.Claim{
					Namespace: "default", Name: "web-nic", UID: "web-nic-uid", Request: "nic",
				},
				Interface: nodestate.Interface{
					Name: "net1", MAC: "02:00:00:00:00:01", MTU: 1400,
					Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.2/24")},
				},
				ReservedAt: at.Add(3 * time.Second), AttachedAt: at.Add(4 * time.Second),
			},
		}}},
	}

	c.claim.Status.Allocation = &resourceapi.AllocationResult{
		AllocationTimestamp: &metav1.Time{Time: at.Add(time.Second)},
	}
	c.claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{
		{Request: "nic", Driver: v1alpha1.GroupName, Pool: "node1/0000-3b-00-0/fast",
			Device: "0000-3b-01-0"},
	}

	return c
}

// warn adds a warning about the pod.
func (c *cluster) warn(reason, message string) {
	c.events = append(c.events, corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: reason},
		InvolvedObject: corev1.ObjectReference{
			Kind: "Pod", Namespace: "default", Name: "web", UID: "web-uid",
		},
		Type: corev1.EventTypeWarning, Reason: reason, Message: message,
		LastTimestamp: metav1.NewTime(at),
	})
}

func (c *cluster) explain(t *testing.T) *Pod {
	t.Helper()
	scheme := runtime.NewScheme()
	builder := runtime.NewSchemeBuilder(corev1.AddToScheme, resourceapi.AddToScheme,
		v1alpha1.AddToScheme)
	if err := builder.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}

	objects := []client.Object{c.pod, c.pool}
	if c.away != "" {
		objects = append(objects, &v1alpha1.XPUNode{
			ObjectMeta: metav1.ObjectMeta{Name: "node1"},
			Status: v1alpha1.XPUNodeStatus{Conditions: []metav1.Condition{{
				Type: v1alpha1.ConditionAgentReady, Status: metav1.ConditionFalse, Message: c.away,
			}}},
		})
	}
	if c.class != "" {
		objects = append(objects, &resourceapi.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: "plain"},
			Spec:       resourceapi.DeviceClassSpec{ExtendedResourceName: &c.class},
		})
	}
	objects = append(objects, &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: "xpu-gone"},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
			CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "xpu.opiproject.org" && ` +
				`device.attributes["xpu.opiproject.org"].pool == "gone"`},
		}}},
	})
	if c.claim != nil {
		objects = append(objects, c.claim)
	}

	if c.port != nil {
		objects = append(objects, c.port)
	}

	if c.network != nil {
		objects = append(objects, c.network)
	}

	for i := range c.events {
		objects = append(objects, &c.events[i])
	}
	objects = append(objects, c.more...)

	refuse := interceptor.Funcs{List: func(ctx context.Context, w client.WithWatch,
		list client.ObjectList, options ...client.ListOption,
	) error {
		switch list.(type) {
		case *v1alpha1.DevicePoolList, *v1alpha1.XPUNetworkList, *v1alpha1.XPUPortList:
			if c.listing != nil {
				return c.listing
			}
		}
		return w.List(ctx, list, options...)
	}, Get: func(ctx context.Context, w client.WithWatch, key client.ObjectKey,
		object client.Object, options ...client.GetOption,
	) error {
		if _, isTemplate := object.(*resourceapi.ResourceClaimTemplate); isTemplate && c.getting != nil {
			return c.getting
		}
		return w.Get(ctx, key, object, options...)
	}}
	p, err := Of(t.Context(), Sources{
		Reader: fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
			WithInterceptorFuncs(refuse).Build(),
		State: func(context.Context, string) (*nodestate.State, error) { return c.state, c.agent },
		Schedule: func(context.Context, *corev1.Pod) ([]string, string, error) {
			return c.why, c.target, nil
		},
	}, types.NamespacedName{Namespace: "default", Name: "web"})

	if err != nil {
		t.Fatal(err)
	}

	return p
}

// TestNoPod: an error about the pod names its namespace, which is the usual mistake.
func TestNoPod(t *testing.T) {
	reader := fake.NewClientBuilder().Build()
	_, err := Of(t.Context(), Sources{Reader: reader},
		types.NamespacedName{Namespace: "default", Name: "none"})
	if !apierrors.IsNotFound(err) || !strings.Contains(err.Error(), "pod default/none: ") {
		t.Errorf("error %v", err)
	}
}

func pending(c *cluster) {
	c.pod.Spec.NodeName, c.pod.Status.Phase, c.pod.Status.Conditions = "", corev1.PodPending, nil
	c.claim.Status.Allocation, c.port, c.state = nil, nil, nil
}

// bound puts the pod on its node, before anything else has happened there.
func bound(c *cluster) {
	c.pod.Status.Phase, c.pod.Status.Conditions = corev1.PodPending, c.pod.Status.Conditions[:1]
	c.state.Functions[0].Attachment = nil
}

func byResource(c *cluster) {
	c.pod.Spec.ResourceClaims, c.pod.Status.ResourceClaimStatuses = nil, nil
	c.pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
		"xpu.opiproject.org/fast": resource.MustParse("1"),
	}
	c.pool.Spec.Publish = v1alpha1.PublishDevicePlugin
	c.port.Spec.Claim, c.port.Spec.Pod = v1alpha1.ClaimRef{}, &v1alpha1.PodRef{
		Namespace: "default", Name: "web", UID: "web-uid",
	}
	a := c.attachment()
	a.Claim, a.Resource = nodestate.Claim{}, "xpu.opiproject.org/fast"
}

// reported has the claim's status say that the interface is attached.
func reported(c *cluster) {
	c.claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: v1alpha1.GroupName, Pool: "node1/0000-3b-00-0/fast", Device: "0000-3b-01-0",
		Conditions: []metav1.Condition{{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Attached",
		}},
		NetworkData: &resourceapi.NetworkDeviceData{
			InterfaceName: "net1", HardwareAddress: "02:00:00:00:00:01", IPs: []string{"10.1.0.2/24"},
		},
	}}
}

// configure gives the claim parameters for a driver.
func (c *cluster) configure(driver, fields string) {
	parameters := strings.Replace(fields, "{", `{"apiVersion": "xpu.opiproject.org/v1alpha1", `+
		`"kind": "InterfaceConfig", `, 1)
	opaque := resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
	}}
	c.claim.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{
		{DeviceConfiguration: opaque},
	}
	c.claim.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{
		{Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: opaque},
	}
}

func TestVerdict(t *testing.T) {
	const title = "interface net1, request nic of claim web-nic"
	for name, test := range map[string]struct {
		change func(*cluster)
		ok     bool
		want   string
	}{
		"all is well": {func(*cluster) {}, true, "nothing is wrong"},
		"no Function": {func(c *cluster) {
			c.pod.Spec.ResourceClaims = nil
		}, true, "the pod asks for no Function: it has no ResourceClaim for one, and no extended " +
			"resource of a DevicePool"},
		"no claim yet": {func(c *cluster) {
			pending(c)
			c.pod.Status.ResourceClaimStatuses = nil
		}, false, "claim nic is not Requested: there is no ResourceClaimTemplate blue in namespace " +
			"default: make it there, because a pod cannot use those of other namespaces, or name " +
			"another one"},
		"no claim yet of a template that is there": {func(c *cluster) {
			pending(c)
			c.pod.Status.ResourceClaimStatuses = nil
			c.more = append(c.more, &resourceapi.ResourceClaimTemplate{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "blue"},
			})
		}, false, "claim nic is not Requested: the ResourceClaim of template blue has not been made " +
			"yet: see that kube-controller-manager runs"},
		"no claim yet of a template that cannot be read": {func(c *cluster) {
			pending(c)
			c.pod.Status.ResourceClaimStatuses = nil
			c.getting = apierrors.NewForbidden(schema.GroupResource{}, "", nil)
		}, false, "claim nic is not Requested: the ResourceClaim of template blue has not been made " +
			"yet, and ResourceClaimTemplates cannot be read: see that the template is in namespace " +
			"default, and that kube-controller-manager runs"},
		"no pool of a class with a shorter name": {func(c *cluster) {
			pending(c)
			c.why = []string{"none of 2 nodes can take it: needs 1 of DeviceClass xpu-gone-fast, and can " +
				"have 0"}
		}, false, "claim web-nic is not Allocated: none of 2 nodes can take it: needs 1 of DeviceClass " +
			"xpu-gone-fast, and can have 0"},
		"no pool of the class": {func(c *cluster) {
			pending(c)
			c.why = []string{"none of 2 nodes can take it: needs 1 of DeviceClass xpu-gone, and can have 0"}
		}, false, "claim web-nic is not Allocated: none of 2 nodes can take it: needs 1 of DeviceClass " +
			"xpu-gone, and can have 0; there is no DevicePool gone, whose Functions DeviceClass xpu-gone " +
			"selects: make it, or name another class"},
		"no such attribute": {func(c *cluster) {
			pending(c)
			c.why = []string{"CEL runtime error: no such key: numa."}
		}, false, "claim web-nic is not Allocated: CEL runtime error: no such key: numa.; a device lacks " +
			"this attribute: kubectl get resourceslices -o yaml shows which attributes there are"},
		"no such claim": {func(c *cluster) {
			pending(c)
			c.claim = nil
		}, false, "claim nic is not Requested: ResourceClaim web-nic does not exist: create it"},
		"no node": {func(c *cluster) {
			pending(c)
			c.why = []string{"none of 2 nodes can take it: all 8 are in use", "  node1:"}
		}, false, "claim web-nic is not Allocated: none of 2 nodes can take it: all 8 are in use"},
		"a node soon": {func(c *cluster) {
			pending(c)
			c.target = "node2"
		}, false, "claim web-nic is not Allocated: node node2 can take the pod: the scheduler " +
			"has not come to it yet, or waits for something else"},
		"unknown pool": {func(c *cluster) {
			c.claim.Status.Allocation.Devices.Results[0].Pool = "x"
		}, false,
			`claim web-nic is not Allocated: claim default/web-nic, request "nic": pool "x": want <node>/<PF>/<DevicePool>`},
		"port refused": {func(c *cluster) {
			bound(c)
			c.port.Status.Conditions[0] = metav1.Condition{
				Type: "Ready", Status: metav1.ConditionFalse, Reason: "Failed",
				Message: "the OPI agent said no",
			}
		}, false, "request nic of claim web-nic is not Provisioned: XPUPort " +
			"default/node1-0000-3b-01-0 at XPU xpu-1: Failed: the OPI agent said no"},
		"xPU away": {func(c *cluster) {
			bound(c)
			c.port.Status.Conditions[0] = metav1.Condition{
				Type: "Ready", Status: metav1.ConditionFalse, Reason: "XPUUnavailable",
				Message: "cannot be reached",
			}
		}, false, "request nic of claim web-nic is not Provisioned: XPUPort " +
			"default/node1-0000-3b-01-0 at XPU xpu-1: XPUUnavailable: cannot be reached"},
		"controller away": {func(c *cluster) {
			bound(c)
			c.port = nil
		}, false, "request nic of claim web-nic is not Provisioned: xpu-controller has not made " +
			"the XPUPort in network blue yet: is it running?"},
		"no network": {func(c *cluster) {
			bound(c)
			c.port, c.network = nil, nil
		}, false, "request nic of claim web-nic is not Provisioned: XPUNetwork blue does not " +
			"exist: create it, or name another one"},
		"forbidden": {func(c *cluster) {
			bound(c)
			c.port = nil
			c.claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
				Driver: v1alpha1.GroupName, Pool: "node1/0000-3b-00-0/fast", Device: "0000-3b-01-0",
				Conditions: []metav1.Condition{
					{Type: v1alpha1.ConditionProvisioned, Status: metav1.ConditionFalse,
						Reason: "Forbidden", Message: "not this namespace"},
				},
			}}
		}, false, "request nic of claim web-nic is not Provisioned: Forbidden: not this namespace"},
		"Prepare failed": {func(c *cluster) {
			bound(c)
			c.warn("FailedPrepareDynamicResources", "VF is busy")
		}, false, "request nic of claim web-nic is not Prepared: VF is busy"},
		"not attached": {func(c *cluster) {
			c.attachment().State, c.attachment().AttachedAt = "Reserved", time.Time{}
			c.pod.Status.Conditions = c.pod.Status.Conditions[:1]
			c.warn("FailedCreatePodSandBox", "no such device")
		}, false, title + " is not Attached: no such device"},
		"lost": {func(c *cluster) {
			c.attachment().State = "Lost"
		}, false, title + " is not Attached: the device went while the pod had it"},
		"lost by a program": {func(c *cluster) {
			c.attachment().State, c.attachment().Interface.Userspace = "Lost", true
		}, false, title + " is not Attached: the device went while the pod had it, and its program " +
			"cannot get it back: delete the pod"},
		"crash": {func(c *cluster) {
			c.pod.Status.Conditions = c.pod.Status.Conditions[:1]
			c.pod.Status.ContainerStatuses = []corev1.ContainerStatus{
				{
					Name: "main",
					State: corev1.ContainerState{
						Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"},
					},
				},
			}
		}, false, title + " is not Running: the pod runs, and is not ready: container main: " +
			"CrashLoopBackOff"},
		"another MAC": {func(c *cluster) {
			c.attachment().Interface.MAC = "02:00:00:00:00:99"
		}, false, title + ": the interface has MAC 02:00:00:00:00:99 in the pod, but the xPU " +
			"knows 02:00:00:00:00:01: it drops what the pod sends"},
		"a larger MTU": {func(c *cluster) {
			c.attachment().Interface.MTU = 9000
		}, false, title + ": the interface has MTU 9000 in the pod, but the network carries " +
			"1400: large packets are lost"},
		"a tag": {func(c *cluster) {
			c.attachment().Interface.VLAN = 7
		}, false, title + ": the PF tags what the pod sends with VLAN 7, but the xPU's port " +
			"takes untagged frames"},
		"address taken off": {func(c *cluster) {
			c.attachment().Interface.Addresses = nil
		}, false, title +
			": the network gave the interface 10.1.0.2/24, but the pod does not have it"},
		"agent away": {func(c *cluster) {
			c.state, c.agent = nil, errors.New("forbidden")
		}, false, "it is not known whether request nic of claim web-nic is Prepared: what the " +
			"agent knows: forbidden"},
		"agent away, the claim says it": {func(c *cluster) {
			c.state, c.agent = nil, errors.New("forbidden")
			reported(c)
		}, true, "nothing wrong is known, but the agent of the node could not be asked"},
		"no agent": {func(c *cluster) {
			c.state, c.agent = nil, fmt.Errorf("node1: %w", inspect.ErrNoAgent)
			reported(c)
			c.away = "no pod is ready"
		}, false, "xpu-agent does not run on node node1: no pod is ready"},
		"no agent, and nobody says that there should be one": {func(c *cluster) {
			c.state, c.agent = nil, fmt.Errorf("node1: %w", inspect.ErrNoAgent)
			reported(c)
		}, true, "nothing wrong is known, but the agent of the node could not be asked"},
		"resource by a claim of the scheduler": {func(c *cluster) {
			c.pod.Spec.ResourceClaims, c.pod.Status.ResourceClaimStatuses = nil, nil
			c.pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
				"xpu.opiproject.org/fast": resource.MustParse("1"),
			}
			c.pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
				ResourceClaimName: "web-nic",
				RequestMappings: []corev1.ContainerExtendedResourceRequest{{
					ContainerName: "main", ResourceName: "xpu.opiproject.org/fast", RequestName: "nic",
				}},
			}
		}, true, "nothing is wrong"},
		"resource of a class, no claim yet": {func(c *cluster) {
			byResource(c)
			pending(c)
			c.target = "node2"
			c.class = "xpu.opiproject.org/plain"
			c.pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
				"xpu.opiproject.org/plain": resource.MustParse("1"),
			}
		}, false, "xpu.opiproject.org/plain is not Allocated: node node2 can take the pod: the " +
			"scheduler has not come to it yet, or waits for something else"},
		"resource of somebody else": {func(c *cluster) {
			byResource(c)
			c.pool.Spec.DevicePlugin = &v1alpha1.DevicePluginSpec{ResourcePrefix: "intel.com"}
			c.pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
				"intel.com/qat": resource.MustParse("1"),
			}
			c.state.Functions[0].Attachment = nil
		}, true, "the pod asks for no Function: it has no ResourceClaim for one, and no extended " +
			"resource of a DevicePool"},
		"resource of an unknown pool": {func(c *cluster) {
			byResource(c)
			pending(c)
			c.listing = &meta.NoKindMatchError{}
			c.pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
				"intel.com/x": resource.MustParse("1"),
			}
		}, false, "it is not known whether the pod asks for a Function by intel.com/x: DevicePools, " +
			"XPUNetworks and XPUPorts: this cluster has no such kinds. In direct mode xpu-agent has " +
			"them in its files; otherwise xpu-device-plugin is not installed"},
		"parameters of an alternative": {func(c *cluster) {
			c.configure("nic.example.com", `{"mtu": 1400}`)
			c.claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{
				Name: "nic", FirstAvailable: []resourceapi.DeviceSubRequest{{Name: "ours"}},
			}}
		}, true, "nothing is wrong"},
		"pod has ended": {func(c *cluster) {
			c.pod.Status.Phase = corev1.PodSucceeded
			c.state.Functions[0].Attachment = nil
		}, true, "the pod has ended or is ending, and nothing is wrong"},
		"a smaller MTU than asked for": {func(c *cluster) {
			c.configure(v1alpha1.GroupName, `{"mtu": 9000}`)
		}, false, title + ": its configuration asks for mtu 9000, and it has 1400, because network " +
			"blue carries no more"},
		"parameters of another driver": {func(c *cluster) {
			c.configure("xpu.opiproject.com", `{"mtu": 1400}`)
		}, false, title + ": config[0] of the claim is ignored: it is for driver xpu.opiproject.com, " +
			"and no device of the claim is of that driver; ours is xpu.opiproject.org"},
		"claim of two pods": {func(c *cluster) {
			c.attachment().Pod = nodestate.Pod{Namespace: "default", Name: "web-0", UID: "another"}
		}, false, "request nic of claim web-nic is not Prepared: pod default/web-0 has the interface " +
			"of this claim, and an interface can be in one pod only; give each pod its own claim, by " +
			"a ResourceClaimTemplate"},
		"no network is named": {func(c *cluster) {
			c.pool.Spec.Network, c.port = "", nil
		}, true, "nothing is wrong; " + title + " joins no network: if it should, name one in the InterfaceConfig, or have " +
			"one named by the DeviceClass or DevicePool"},
		"may read nothing": {func(c *cluster) {
			c.listing = apierrors.NewForbidden(schema.GroupResource{}, "", nil)
			reported(c)
		}, false, "it is not known whether " + title + " is Provisioned: the DevicePool may name a " +
			"network"},
		"direct mode": {func(c *cluster) {
			byResource(c)
			c.listing = &meta.NoKindMatchError{}
			c.attachment().Network = "blue"
		}, true, "nothing is wrong"},
		"resource of no pool": {func(c *cluster) {
			byResource(c)
			pending(c)
			c.pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
				"xpu.opiproject.org/fsat": resource.MustParse("1"),
			}
		}, false, "xpu.opiproject.org/fsat is not Requested: no DevicePool and no DeviceClass offers " +
			"this resource: correct its name, or make a DevicePool with publish: DevicePlugin"},
		"hook fails": {func(c *cluster) {
			c.pod.DeletionTimestamp, c.pod.Finalizers = &metav1.Time{Time: at}, []string{
				"example.com/x",
			}
			c.attachment().State, c.attachment().Hook = "Releasing", &nodestate.Hook{
				Name: "10-note", Attempts: 3, Error: "exit status 75",
			}
		}, false, title +
			" is not Released: post-delete hook 10-note failed 3 times: exit status 75"},
		"resource": {byResource, true, "nothing is wrong"},
		"resource, Port by Allocate": {func(c *cluster) {
			byResource(c)
			c.port.Spec.Pod = nil
		}, true, "nothing is wrong"},
		"resource, not given": {func(c *cluster) {
			byResource(c)
			c.state.Functions[0].Attachment = nil
			c.warn("UnexpectedAdmissionError", "Allocate failed")
		}, false, "xpu.opiproject.org/fast is not Allocated: Allocate failed"},
		"resource, in no network": {func(c *cluster) {
			byResource(c)
			c.state.Functions[0].Attachment = nil
			c.warn("FailedCreatePodSandBox", "earlier")
		}, false, "xpu.opiproject.org/fast is not Allocated: the pod runs, and no network of its " +
			"annotation k8s.v1.cni.cncf.io/networks has taken the Function: name a network of the resource " +
			"for each Function, unless a program uses it without a network"},
		"resource, no node": {func(c *cluster) {
			byResource(c)
			c.pod.Spec.NodeName, c.why = "", []string{"Insufficient xpu.opiproject.org/fast"}
		}, false, "xpu.opiproject.org/fast is not Allocated: Insufficient xpu.opiproject.org/fast"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster()
			test.change(c)
			p := c.explain(t)
			if p.OK != test.ok || p.Verdict != test.want {
				t.Errorf("%t, %q\nwant %t, %q", p.OK, p.Verdict, test.ok, test.want)
			}

			var out bytes.Buffer
			if err := p.Text(&out); err != nil ||
				!strings.HasPrefix(out.String(), "pod default/web: "+test.want) {
				t.Errorf("%v: text is\n%s", err, &out)
			}
		})
	}
}

// TestOrder checks that Provisioned precedes Bound for a pool that provisions BeforeBind.
func TestOrder(t *testing.T) {
	for _, test := range []struct {
		conditions []string
		want       string
	}{
		{nil, "Requested Allocated Bound Provisioned Prepared Attached Running"},
		{[]string{v1alpha1.ConditionProvisioned},
			"Requested Allocated Provisioned Bound Prepared Attached Running"},
	} {
		c := newCluster()
		c.claim.Status.Allocation.Devices.Results[0].BindingConditions = test.conditions
		var names []string
		for _, s := range c.explain(t).Interfaces[0].Stages {
			names = append(names, s.Name)
			if s.Status != Done || s.Time.IsZero() {
				t.Errorf("stage %+v is not done, or without its time", s)
			}
		}

		if got := strings.Join(names, " "); got != test.want {
			t.Errorf("stages %s, want %s", got, test.want)
		}
	}
}

func TestText(t *testing.T) {
	c := newCluster()
	c.warn("FailedPrepareDynamicResources", "for a while\x1b[2J\nonly")
	c.attachment().Interface.MTU = 9000
	var out bytes.Buffer
	if err := c.explain(t).Text(&out); err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{
		"interface net1, request nic of claim web-nic: Function 0000:3b:01.0, pool fast, network " +
			"blue, XPU xpu-1\n",
		"  ✓ Allocated    12:00:01  Function 0000:3b:01.0 of pool fast on node node1\n",
		"    in the pod  02:00:00:00:00:01  -     9000  10.1.0.2/24  -     Attached\n",
		"    at the xPU  02:00:00:00:00:01  10    1400  10.1.0.2/24  vf-1  Up\n",
		"  the interface has MTU 9000",
		"  12:00:00  Pod/web  FailedPrepareDynamicResources  for a while" + `\x1b[2J\n` + "only\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, &out)
		}
	}
}

// TestTrunk checks that tagged networks are shown with their tags, and that the pod's interface
// need not have their addresses.
func TestTrunk(t *testing.T) {
	c := newCluster()
	c.port.Spec.Network, c.port.Spec.Networks = "", []v1alpha1.XPUPortNetwork{
		{Name: "blue"}, {Name: "red"},
	}
	c.port.Status.Addresses = nil
	c.port.Status.Networks = []v1alpha1.XPUPortNetworkStatus{
		{Name: "blue", VLAN: 10, Addresses: []string{"10.1.0.2/24"}}, {Name: "red", VLAN: 20},
	}
	var out bytes.Buffer
	if err := c.explain(t).Text(&out); err != nil {
		t.Fatal(err)
	}

	const want = "network blue (VLAN 10, 10.1.0.2/24), red (VLAN 20), XPU xpu-1\n"
	if !strings.Contains(out.String(), want) || strings.Contains(out.String(), "does not have it") {
		t.Errorf("the text lacks %q, or complains:\n%s", want, &out)
	}
}

// TestTextOfOthers checks that foreign texts are escaped and cannot forge a line or column.
func TestTextOfOthers(t *testing.T) {
	const (
		hostile = "\x1b[2J\r\nFORGED\t\u202e\x9b31m"
		shown   = `\x1b[2J\r\nFORGED\t\u202e\x9b31m`
	)

	p := &Pod{
		Namespace: "default" + hostile, Name: "web" + hostile, Verdict: "verdict" + hostile,
		Interfaces: []Interface{{
			Name: "net1" + hostile, Claim: "claim" + hostile, Request: "request" + hostile,
			Pool: "pool" + hostile, Function: "function" + hostile,
			Network: "network" + hostile, XPU: "xpu" + hostile,
			Stages: []Stage{{Name: "stage" + hostile, Status: Failed, Text: "text" + hostile}},
			Host: &Side{
				MAC: "mac" + hostile, Addresses: []string{"address" + hostile},
				Port: "port" + hostile, State: "state" + hostile,
			},
			Differences: []string{"difference" + hostile},
		}},
		Why: []string{"", "why" + hostile},
		Events: []Event{{
			Object: "object" + hostile, Reason: "reason" + hostile, Message: "message" +
				hostile, Count: 2,
		}},
		Unknown: []string{"unknown" + hostile},
	}

	var out bytes.Buffer
	if err := p.Text(&out); err != nil {
		t.Fatal(err)
	}

	for line := range strings.SplitSeq(out.String(), "\n") {
		for _, r := range line {
			if !strconv.IsPrint(r) {
				t.Errorf("line %q has %q", line, r)
			}
		}
		if strings.HasPrefix(strings.TrimSpace(line), "FORGED") {
			t.Errorf("line %q is forged", line)
		}
	}

	for _, want := range []string{
		"default", "web", "verdict", "net1", "claim", "request", "pool", "function",
		"network", "xpu",
		"stage", "text", "mac", "address", "port", "state", "difference", "why",
		"object", "reason", "message", "unknown",
	} {
		if want += shown; !strings.Contains(out.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, &out)
		}
	}
}

// TestShare checks a share of a PF before the agent has chosen its Function.
func TestShare(t *testing.T) {
	c := newCluster()
	bound(c)
	result := &c.claim.Status.Allocation.Devices.Results[0]
	result.Device, result.ShareID = "0000-3b-00-0", new(types.UID("s1"))
	c.port = nil
	i := c.explain(t).Interfaces[0]
	if i.Function != "" ||
		i.Stages[1].Text != "a port of PF 0000:3b:00.0 of pool fast on node node1" {
		t.Errorf("Function %q, %+v", i.Function, i.Stages[1])
	}
}

// TestOnlySeen checks that a pod with admin access has no problem, whoever uses the Function.
func TestOnlySeen(t *testing.T) {
	c := newCluster()
	c.claim.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	c.attachment().Claim.UID = "another"
	if p := c.explain(t); !p.OK ||
		!strings.Contains(p.Interfaces[0].Stages[1].Text, "takes nothing") {
		t.Errorf("%t: %s: %+v", p.OK, p.Verdict, p.Interfaces)
	}
}

// TestAskScheduler checks for which pods the scheduler's answer is wanted, and that a failure is
// said.
func TestAskScheduler(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*corev1.Pod)
		err    error
		asks   bool
		want   string // the text about what is not known
	}{
		"pending": {func(*corev1.Pod) {}, nil, true, ""},
		"pending, without an answer": {
			func(*corev1.Pod) {}, errors.New("forbidden"), true, "where the pod could go: forbidden",
		},
		"on a node": {func(p *corev1.Pod) { p.Spec.NodeName = "node1" }, nil, false, ""},
		"being deleted": {
			func(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.NewTime(at)) }, nil, false, "",
		},
	} {
		f := &facts{pod: &corev1.Pod{}}
		test.change(f.pod)
		asked := false
		err := f.askScheduler(t.Context(), Sources{
			Schedule: func(context.Context, *corev1.Pod) ([]string, string, error) {
				asked = true
				return []string{"none"}, "node2", test.err
			},
		})
		if err != nil || asked != test.asks {
			t.Errorf("%s: asked %t, error %v, want asked %t", name, asked, err, test.asks)
		}
		if unknown := strings.Join(f.unknown, "; "); unknown != test.want {
			t.Errorf("%s: not known is %q, want %q", name, unknown, test.want)
		}
		if (f.target == "node2") != test.asks || (len(f.why) == 1) != test.asks {
			t.Errorf("%s: the answer is %q, %q", name, f.target, f.why)
		}
	}
}
