// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// facts are what the sources report about a pod.
type facts struct {
	pod      *corev1.Pod
	claims   []podClaim
	pools    map[string]*v1alpha1.DevicePool
	networks map[string]*v1alpha1.XPUNetwork
	ports    []v1alpha1.XPUPort // for the pod or its claims
	state    *nodestate.State   // of the pod's node; nil if the agent could not be asked
	why      []string           // why no node takes the pod
	target   string             // node that would take a pod without a node
	events   []Event
	unknown  []string
	unseen   sets.Set[kind] // kinds of objects that could not be read
	absent   sets.Set[kind] // unseen kinds that the cluster does not have
	// classResources are the extended resources of DeviceClasses, for which the scheduler makes
	// claims.
	classResources sets.Set[string]
	// classPools are the DevicePools that selectors of DeviceClasses name.
	classPools map[string]string
	// ourClasses are the DeviceClasses that select devices of this driver.
	ourClasses sets.Set[string]
	// gang is what the pod's PodGroup waits for, nil if the pod is in none, is bound, or it could not
	// be read.
	gang *gang
	// away says why the node's agent does not run, in the words of its XPUNode; "" if it runs, or if
	// this is not known.
	away string
}

// kind is the plural of a kind of objects, for messages.
type kind string

const (
	poolKind     kind = "DevicePools"
	networkKind  kind = "XPUNetworks"
	portKind     kind = "XPUPorts"
	claimKind    kind = "ResourceClaims"
	templateKind kind = "ResourceClaimTemplates"
	classKind    kind = "DeviceClasses"
	nodeKind     kind = "XPUNodes"
	eventKind    kind = "events"
)

// podClaim is a claim of the pod.
type podClaim struct {
	// name in the pod's spec; "" for the scheduler's claim for extended resources
	inPod  string
	claim  *resourceapi.ResourceClaim // nil if it does not exist, or could not be read
	reason string                     // why it does not exist
	unread bool                       // whether it could not be read
}

func gather(ctx context.Context, s Sources, key types.NamespacedName) (*facts, error) {
	f := &facts{pod: &corev1.Pod{}, pools: map[string]*v1alpha1.DevicePool{},
		networks: map[string]*v1alpha1.XPUNetwork{}, unseen: sets.New[kind](), absent: sets.New[kind]()}
	if err := s.Reader.Get(ctx, key, f.pod); err != nil {
		return nil, fmt.Errorf("pod %s: %w", key, err)
	}

	f.askAgent(ctx, s)
	for _, collect := range []func(context.Context, Sources) error{
		f.readDeclarations, f.readClasses, f.readNode, f.readClaims, f.readPorts, f.readGang,
		f.readEvents, f.askScheduler,
	} {
		if err := collect(ctx, s); err != nil {
			return nil, fmt.Errorf("pod %s: %w", key, err)
		}
	}

	if f.absent.Has(poolKind) {
		f.unknown = append(f.unknown, "DevicePools, XPUNetworks and XPUPorts: this cluster has no such "+
			"kinds. In direct mode xpu-agent has them in its files; otherwise xpu-device-plugin is not "+
			"installed")
	}
	return f, nil
}

// unread notes that objects could not be read because the cluster does not have their kind or
// because the user may not. The explanation then has fewer details. All other errors are returned.
func (f *facts) unread(what kind, err error) error {
	switch {
	case meta.IsNoMatchError(err):
		f.unseen.Insert(what)
		f.absent.Insert(what)
		return nil
	case apierrors.IsForbidden(err) && f.unseen.Has(what):
		return nil
	case apierrors.IsForbidden(err):
		f.unseen.Insert(what)
		note := fmt.Sprintf("%s: you may not read them", what)
		if slices.Contains([]kind{poolKind, networkKind, portKind, nodeKind}, what) {
			note += "; an administrator can bind ClusterRole xpu-view to you"
		}
		f.unknown = append(f.unknown, note)
		return nil
	}
	return err
}

func (f *facts) readDeclarations(ctx context.Context, s Sources) error {
	var pools v1alpha1.DevicePoolList
	var networks v1alpha1.XPUNetworkList
	if err := f.unread(poolKind, s.Reader.List(ctx, &pools)); err != nil {
		return err
	}
	if err := f.unread(networkKind, s.Reader.List(ctx, &networks)); err != nil {
		return err
	}

	for i := range pools.Items {
		f.pools[pools.Items[i].Name] = &pools.Items[i]
	}

	for i := range networks.Items {
		f.networks[networks.Items[i].Name] = &networks.Items[i]
	}

	return nil
}

// readClasses reads which DeviceClasses select devices of this driver, and which extended resources
// are DeviceClasses'.
func (f *facts) readClasses(ctx context.Context, s Sources) error {
	f.classResources, f.ourClasses = sets.New[string](), sets.New[string]()
	f.classPools = map[string]string{}
	var classes resourceapi.DeviceClassList
	if err := f.unread(classKind, s.Reader.List(ctx, &classes)); err != nil {
		return err
	}
	for _, class := range classes.Items {
		if name := ptr.Deref(class.Spec.ExtendedResourceName, ""); name != "" {
			f.classResources.Insert(name)
		}
		if slices.ContainsFunc(class.Spec.Selectors, isOurs) {
			f.ourClasses.Insert(class.Name)
		}
		if pool := poolOf(class); pool != "" {
			f.classPools[class.Name] = pool
		}
	}
	return nil
}

// selectedPool finds a DevicePool in an expression that selects its devices, as in the samples.
var selectedPool = regexp.MustCompile(
	`device\.attributes\["xpu\.opiproject\.org"\]\.pool == "([a-z0-9.-]+)"`)

// poolOf returns the DevicePool whose devices a class selects; "" if its selectors name none in the
// usual way.
func poolOf(class resourceapi.DeviceClass) string {
	for _, selector := range class.Spec.Selectors {
		if selector.CEL == nil {
			continue
		}
		if found := selectedPool.FindStringSubmatch(selector.CEL.Expression); found != nil {
			return found[1]
		}
	}
	return ""
}

// readNode reads whether the agent of the pod's node runs.
func (f *facts) readNode(ctx context.Context, s Sources) error {
	if f.pod.Spec.NodeName == "" {
		return nil
	}

	var node v1alpha1.XPUNode
	err := s.Reader.Get(ctx, types.NamespacedName{Name: f.pod.Spec.NodeName}, &node)
	if err := f.unread(nodeKind, client.IgnoreNotFound(err)); err != nil {
		return err
	}
	ready := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionAgentReady)
	if ready != nil && ready.Status == metav1.ConditionFalse {
		f.away = ready.Message
	}
	return nil
}

// readClaims reads the claims that the pod names, and the claims made for it.
func (f *facts) readClaims(ctx context.Context, s Sources) error {
	for i := range f.pod.Spec.ResourceClaims {
		wanted := &f.pod.Spec.ResourceClaims[i]
		name, _, err := resourceclaim.Name(f.pod, wanted)
		switch {
		case err != nil:
			reason, err := f.notMade(ctx, s, ptr.Deref(wanted.ResourceClaimTemplateName, ""))
			if err != nil {
				return err
			}
			f.claims = append(f.claims, podClaim{inPod: wanted.Name, reason: reason})
			continue
		case name == nil: // no claim is needed
			continue
		}

		if err := f.readClaim(ctx, s, wanted.Name, *name); err != nil {
			return err
		}
	}

	if made := f.pod.Status.ExtendedResourceClaimStatus; made != nil {
		return f.readClaim(ctx, s, "", made.ResourceClaimName)
	}

	return nil
}

// notMade says why a claim of a template has not been made.
func (f *facts) notMade(ctx context.Context, s Sources, template string) (string, error) {
	key := types.NamespacedName{Namespace: f.pod.Namespace, Name: template}
	err := s.Reader.Get(ctx, key, &resourceapi.ResourceClaimTemplate{})
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Sprintf("there is no ResourceClaimTemplate %s in namespace %s: make it there, "+
			"because a pod cannot use those of other namespaces, or name another one", template,
			f.pod.Namespace), nil
	case err != nil:
		return fmt.Sprintf("the ResourceClaim of template %s has not been made yet, and "+
			"ResourceClaimTemplates cannot be read: see that the template is in namespace %s, and that "+
			"kube-controller-manager runs", template, f.pod.Namespace), f.unread(templateKind, err)
	default:
		return fmt.Sprintf("the ResourceClaim of template %s has not been made yet: see that "+
			"kube-controller-manager runs", template), nil
	}
}

func (f *facts) readClaim(ctx context.Context, s Sources, inPod, name string) error {
	found := &resourceapi.ResourceClaim{}
	err := s.Reader.Get(ctx, types.NamespacedName{Namespace: f.pod.Namespace, Name: name}, found)
	if apierrors.IsNotFound(err) {
		f.claims = append(f.claims,
			podClaim{
				inPod: inPod, reason: fmt.Sprintf("ResourceClaim %s does not exist: create it",
					name),
			})
		return nil
	}

	if err := f.unread(claimKind, err); err != nil {
		return err
	}

	if f.unseen.Has(claimKind) {
		f.claims = append(f.claims, podClaim{inPod: inPod, unread: true})
		return nil
	}

	f.claims = append(f.claims, podClaim{inPod: inPod, claim: found})
	return nil
}

// readPorts reads the XPUPorts of the pod's claims, and those that the agent made for the pod. A
// Port that the agent made when the kubelet allocated the Function names no pod.
func (f *facts) readPorts(ctx context.Context, s Sources) error {
	var ports v1alpha1.XPUPortList
	err := s.Reader.List(ctx, &ports)
	if apierrors.IsForbidden(err) { // the Ports of claims are in the pod's namespace
		err = s.Reader.List(ctx, &ports, client.InNamespace(f.pod.Namespace))
	}
	if err := f.unread(portKind, err); err != nil {
		return err
	}

	ours := sets.New[types.UID]()
	for _, c := range f.claims {
		if c.claim != nil {
			ours.Insert(c.claim.UID)
		}
	}

	has := func(a *nodestate.Attachment) bool {
		return a.Resource != "" && a.Pod.UID == string(f.pod.UID)
	}
	f.ports = slices.DeleteFunc(ports.Items, func(p v1alpha1.XPUPort) bool {
		switch {
		case p.Spec.Claim.UID != "":
			return !ours.Has(p.Spec.Claim.UID)
		case p.Spec.Pod != nil:
			return p.Spec.Pod.UID != f.pod.UID
		}
		return p.Spec.NodeName != f.pod.Spec.NodeName || p.Spec.Ahead ||
			f.attachment(claim.FunctionOf(p.Spec.Function).String(), has) == nil
	})

	return nil
}

// readEvents reads the events about the pod, its claims and its XPUPorts.
func (f *facts) readEvents(ctx context.Context, s Sources) error {
	about := sets.New(f.pod.UID)
	namespaces := sets.New(f.pod.Namespace)

	for _, c := range f.claims {
		if c.claim != nil {
			about.Insert(c.claim.UID)
		}
	}

	for _, p := range f.ports {
		about.Insert(p.UID)
		namespaces.Insert(p.Namespace)
	}

	for _, namespace := range sets.List(namespaces) {
		var found corev1.EventList
		err := s.Reader.List(ctx, &found, client.InNamespace(namespace))
		if err := f.unread(eventKind, err); err != nil {
			return err
		}
		for _, e := range found.Items {
			if about.Has(e.InvolvedObject.UID) {
				f.events = append(f.events, newEvent(e))
			}
		}
	}

	slices.SortStableFunc(f.events, func(a, b Event) int { return a.Time.Compare(b.Time) })
	return nil
}

func newEvent(e corev1.Event) Event {
	out := Event{
		Time: e.FirstTimestamp.Time, Type: e.Type, Reason: e.Reason, Object: e.InvolvedObject.Kind +
			"/" + e.InvolvedObject.Name,
		From: cmp.Or(e.ReportingController, e.Source.Component), Message: e.Message, Count: e.Count,
	}

	last := []time.Time{e.EventTime.Time, e.LastTimestamp.Time}
	if e.Series != nil {
		last = append(last, e.Series.LastObservedTime.Time)
		out.Count = e.Series.Count
	}

	for _, t := range last {
		if t.After(out.Time) {
			out.Time = t
		}
	}

	return out
}

// askScheduler finds out where a pod without a node would go.
func (f *facts) askScheduler(ctx context.Context, s Sources) error {
	if f.pod.Spec.NodeName != "" || f.pod.DeletionTimestamp != nil {
		return nil
	}
	var err error
	if f.why, f.target, err = s.Schedule(ctx, f.pod); err != nil {
		f.unknown = append(f.unknown, fmt.Sprintf("where the pod could go: %v", err))
	}
	return nil
}

// askAgent asks the agent of the pod's node. It is no error if the user may not, or the agent does
// not run; the explanation just has fewer details.
func (f *facts) askAgent(ctx context.Context, s Sources) {
	if f.pod.Spec.NodeName == "" {
		return
	}
	var err error
	if f.state, err = s.State(ctx, f.pod.Spec.NodeName); err != nil {
		f.unknown = append(f.unknown, fmt.Sprintf("what the agent knows: %v", err))
	}
}

// hasEnded reports whether the pod ends or has ended.
func (f *facts) hasEnded() bool {
	return f.pod.DeletionTimestamp != nil || f.pod.Status.Phase == corev1.PodSucceeded ||
		f.pod.Status.Phase == corev1.PodFailed
}

// attachment returns the agent's attachment for the Function with this ID, or nil if there is none
// or owns rejects it.
func (f *facts) attachment(
	function string, owns func(*nodestate.Attachment) bool,
) *nodestate.Attachment {
	if f.state == nil {
		return nil
	}

	for _, known := range f.state.Functions {
		if known.ID.String() == function && known.Attachment != nil && owns(known.Attachment) {
			return known.Attachment
		}
	}

	return nil
}

// warning returns the newest warning with one of the reasons, or nil.
func (f *facts) warning(reasons ...string) *Event {
	for i := range slices.Backward(f.events) {
		if e := &f.events[i]; e.Type == corev1.EventTypeWarning &&
			slices.Contains(reasons, e.Reason) {
			return e
		}
	}
	return nil
}
