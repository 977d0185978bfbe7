// SPDX-License-Identifier: Apache-2.0

package dashboard

import (
	"cmp"
	"context"
	"errors"
	"net/url"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// sourceState says how well the objects of a kind are known.
type sourceState string

const (
	reading   sourceState = "Reading"   // the first answer has not come yet
	live      sourceState = "Live"      // every change is heard of
	stale     sourceState = "Stale"     // the cluster does not answer
	forbidden sourceState = "Forbidden" // the user may not read the kind
	absent    sourceState = "Absent"    // the cluster does not have the kind
)

// source keeps the objects of one kind as the API server last sent them. Its methods are for
// concurrent use.
type source struct {
	name       string // plural of the kind, for messages
	role       string // what lets people read the kind
	new        func() client.Object
	list       func() client.ObjectList
	namespaced bool
	ofPrograms bool            // whether only those in the namespace of our programs are read
	where      fields.Selector // nil for all
	// keeps decides which objects are kept; nil keeps all. It may remove fields that are not shown.
	keeps func(client.Object) bool

	changed func() // called after each change
	now     func() time.Time

	mu       sync.Mutex
	objects  map[client.ObjectKey]client.Object
	state    sourceState
	listed   bool // whether objects have ever been read
	heard    time.Time
	problem  string
	scope    string // namespace that is read; "" for all
	fallback string // namespace that is tried if the user may not read all
}

// newSources returns the kinds that the page shows. The fallback is the namespace in which objects
// are read if the user may not read those of all namespaces; a namespace restricts the page to it.
func newSources(o Options, changed func()) []*source {
	all := slices.Concat(ownKinds(), kubernetesKinds())
	for _, s := range all {
		s.state, s.changed, s.now = reading, changed, o.Now
		switch {
		case s.ofPrograms:
			s.scope = o.AgentNamespace
		case s.namespaced && o.Namespace == "":
			s.fallback = o.Fallback
		case s.namespaced:
			s.scope = o.Namespace
		}
	}
	return all
}

// ownKinds returns the kinds of the project.
func ownKinds() []*source {
	ours := func(name string, namespaced bool, item func() client.Object,
		list func() client.ObjectList,
	) *source {
		return &source{name: name, namespaced: namespaced, new: item, list: list,
			role: "ClusterRole xpu-view"}
	}

	return []*source{
		ours("XPUNodes", false, func() client.Object { return &v1alpha1.XPUNode{} },
			func() client.ObjectList { return &v1alpha1.XPUNodeList{} }),
		ours("DevicePools", false, func() client.Object { return &v1alpha1.DevicePool{} },
			func() client.ObjectList { return &v1alpha1.DevicePoolList{} }),
		ours("XPUNetworks", false, func() client.Object { return &v1alpha1.XPUNetwork{} },
			func() client.ObjectList { return &v1alpha1.XPUNetworkList{} }),
		ours("XPUs", false, func() client.Object { return &v1alpha1.XPU{} },
			func() client.ObjectList { return &v1alpha1.XPUList{} }),
		ours("XPUPorts", true, func() client.Object { return &v1alpha1.XPUPort{} },
			func() client.ObjectList { return &v1alpha1.XPUPortList{} }),
	}
}

// kubernetesKinds returns the kinds of Kubernetes.
func kubernetesKinds() []*source {
	const view = "ClusterRole view"
	reading := func(kinds string) string { return "a role that lists and watches " + kinds }
	return []*source{
		{name: "ResourceClaims", role: reading("resourceclaims"), namespaced: true, keeps: ofThisDriver,
			new:  func() client.Object { return &resourceapi.ResourceClaim{} },
			list: func() client.ObjectList { return &resourceapi.ResourceClaimList{} }},
		{name: "ResourceSlices", role: reading("resourceslices"),
			where: fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver,
				v1alpha1.GroupName),
			new:  func() client.Object { return &resourceapi.ResourceSlice{} },
			list: func() client.ObjectList { return &resourceapi.ResourceSliceList{} }},
		{name: "pods", role: view, namespaced: true, keeps: mayHaveFunctions,
			new:  func() client.Object { return &corev1.Pod{} },
			list: func() client.ObjectList { return &corev1.PodList{} }},
		{name: agentPods, role: view, ofPrograms: true, keeps: isAgent,
			new:  func() client.Object { return &corev1.Pod{} },
			list: func() client.ObjectList { return &corev1.PodList{} }},
		{name: "DaemonSets", role: view, ofPrograms: true,
			new:  func() client.Object { return &appsv1.DaemonSet{} },
			list: func() client.ObjectList { return &appsv1.DaemonSetList{} }},
		{name: "Deployments", role: view, ofPrograms: true,
			new:  func() client.Object { return &appsv1.Deployment{} },
			list: func() client.ObjectList { return &appsv1.DeploymentList{} }},
		{name: "Leases", role: reading("leases"), ofPrograms: true,
			where: fields.OneTermEqualSelector(metav1.ObjectNameField, controllerLease),
			new:   func() client.Object { return &coordinationv1.Lease{} },
			list:  func() client.ObjectList { return &coordinationv1.LeaseList{} }},
	}
}

const (
	agentPods       = "pods of xpu-agent"
	controllerLease = "xpu-controller"
	agentLabel      = "app.kubernetes.io/name"
	agentName       = "xpu-agent"
)

func isAgent(o client.Object) bool { return o.GetLabels()[agentLabel] == agentName }

// ofThisDriver keeps all claims, and takes away what is not shown of those without a Function. That
// they exist is known then.
func ofThisDriver(o client.Object) bool {
	c := o.(*resourceapi.ResourceClaim)
	c.Labels, c.Annotations = nil, nil
	isOurs := func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == v1alpha1.GroupName
	}
	if c.Status.Allocation != nil &&
		!slices.ContainsFunc(c.Status.Allocation.Devices.Results, isOurs) {
		c.Spec, c.Status.Devices = resourceapi.ResourceClaimSpec{}, nil
		c.Status.Allocation = &resourceapi.AllocationResult{}
	}
	return true
}

// mayHaveFunctions keeps pods with claims or extended resources, without what is not shown of them.
// A cluster has many others.
func mayHaveFunctions(o client.Object) bool {
	pod := o.(*corev1.Pod)
	if len(pod.Spec.ResourceClaims) == 0 && pod.Status.ExtendedResourceClaimStatus == nil &&
		len(extendedResources(pod)) == 0 {
		return false
	}

	spec := corev1.PodSpec{NodeName: pod.Spec.NodeName, ResourceClaims: pod.Spec.ResourceClaims}
	for _, c := range pod.Spec.InitContainers {
		spec.InitContainers = append(spec.InitContainers, corev1.Container{
			Name: c.Name, Resources: c.Resources, RestartPolicy: c.RestartPolicy})
	}
	for _, c := range pod.Spec.Containers {
		spec.Containers = append(spec.Containers,
			corev1.Container{Name: c.Name, Resources: c.Resources})
	}
	pod.Spec, pod.Labels, pod.Annotations = spec, nil, nil
	return true
}

// run follows the kind until ctx ends.
func (s *source) run(ctx context.Context, api client.WithWatch) {
	// The reflector logs what goes wrong, and the page shows it.
	ctx = klog.NewContext(ctx, logr.Discard())
	logger := logr.Discard()
	cache.NewReflectorWithOptions(
		cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				list := s.list()
				if o.Continue == "" {
					s.widen()
				}
				err := s.ask(func(scope string) error { return api.List(ctx, list, s.options(scope, o)) })
				return list, err
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				var events watch.Interface
				if o.SendInitialEvents != nil {
					s.widen()
				}
				before := s.scopeNow()
				err := s.ask(func(scope string) (err error) {
					events, err = api.Watch(ctx, s.list(), s.options(scope, o))
					return err
				})
				if err == nil && o.SendInitialEvents == nil && s.scopeNow() != before {
					// What was read of other namespaces would stay as it is.
					events.Stop()
					return nil, apierrors.NewResourceExpired("the user may not read all namespaces any more")
				}
				if err == nil && o.SendInitialEvents == nil {
					s.follows()
				}
				if err != nil && o.SendInitialEvents != nil {
					// After errors that it takes for short, such as a refused connection, the
					// reflector would wait without regard to ctx.
					err = errors.New(cause(err))
				}
				return events, err
			},
		}, api), s.new(), s, cache.ReflectorOptions{Name: s.name, Logger: &logger,
			Backoff: &wait.Backoff{Duration: 500 * time.Millisecond, Cap: longestBackoff, Steps: 6,
				Factor: 2, Jitter: 1}},
	).RunWithContext(ctx)
}

// longestBackoff is how long the cluster is left in peace while it does not answer or refuses, give
// or take a factor of two. People wait for it.
const longestBackoff = 10 * time.Second

// cause returns an error without the request that it is about, which has other numbers each time.
func cause(err error) string {
	var request *url.Error
	if errors.As(err, &request) {
		return request.Err.Error()
	}
	return err.Error()
}

func (s *source) options(scope string, o metav1.ListOptions) *client.ListOptions {
	return &client.ListOptions{
		Namespace: scope, FieldSelector: s.where, Limit: o.Limit, Continue: o.Continue, Raw: &o,
	}
}

// widen has the next request ask for all namespaces again, if the last one could not, because
// rights may have changed.
func (s *source) widen() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fallback != "" && s.scope == s.fallback {
		s.scope = ""
	}
}

func (s *source) scopeNow() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.scope
}

// ask makes a request, a second time in the fallback namespace if the user may not read all
// namespaces, and notes how it ended.
func (s *source) ask(request func(scope string) error) error {
	s.mu.Lock()
	scope, fallback := s.scope, s.fallback
	s.mu.Unlock()

	err := request(scope)
	if apierrors.IsForbidden(err) && scope == "" && fallback != "" {
		if err = request(fallback); err == nil {
			s.mu.Lock()
			s.scope = fallback
			s.mu.Unlock()
		}
	}

	if err != nil && !errors.Is(err, context.Canceled) {
		s.failed(err)
	}
	return err
}

// failed notes that the kind could not be read. An expired version is no failure: the reflector
// lists anew.
func (s *source) failed(err error) {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) ||
		apierrors.IsInvalid(err) { // an API server that does not stream lists
		return
	}

	s.mu.Lock()
	s.problem = cause(err)
	switch {
	case apierrors.IsForbidden(err):
		s.state = forbidden
	case meta.IsNoMatchError(err), apierrors.IsNotFound(err):
		s.state = absent
	default:
		s.state = stale
	}
	if s.state == forbidden || s.state == absent {
		s.objects, s.listed = nil, false
	}
	s.mu.Unlock()
	s.changed()
}

// follows notes that the API server sends what changes.
func (s *source) follows() {
	s.mu.Lock()
	if s.listed {
		s.state, s.problem, s.heard = live, "", s.now()
	}
	s.mu.Unlock()
	s.changed()
}

// Replace is called with all objects that there are.
func (s *source) Replace(all []any, _ string) error {
	objects := make(map[client.ObjectKey]client.Object, len(all))
	for _, one := range all {
		if o, ok := one.(client.Object); ok && s.takes(o) {
			objects[client.ObjectKeyFromObject(o)] = o
		}
	}

	s.mu.Lock()
	s.objects, s.listed, s.heard = objects, true, s.now()
	s.state, s.problem = live, ""
	s.mu.Unlock()
	s.changed()
	return nil
}

// Add is called with a new object.
func (s *source) Add(one any) error { return s.Update(one) }

// Update is called with an object that has changed. It is dropped if it is not one to keep any
// more.
func (s *source) Update(one any) error {
	o, ok := one.(client.Object)
	if ok && s.takes(o) {
		s.put(client.ObjectKeyFromObject(o), o)
	} else if ok {
		s.put(client.ObjectKeyFromObject(o), nil)
	}
	return nil
}

// Delete is called with an object that is gone.
func (s *source) Delete(one any) error {
	if o, ok := one.(client.Object); ok {
		s.put(client.ObjectKeyFromObject(o), nil)
	}
	return nil
}

// Bookmark is called when the API server says that nothing else has changed.
func (s *source) Bookmark(string) error {
	s.mu.Lock()
	s.heard = s.now()
	s.mu.Unlock()
	return nil
}

// Resync does nothing: what is here is what the API server sent.
func (s *source) Resync() error { return nil }

// takes reports whether an object is kept, and takes away fields that are not shown.
func (s *source) takes(o client.Object) bool {
	o.SetManagedFields(nil)
	return s.keeps == nil || s.keeps(o)
}

func (s *source) put(key client.ObjectKey, o client.Object) {
	s.mu.Lock()
	_, known := s.objects[key]
	switch {
	case o != nil && s.objects == nil:
		s.objects = map[client.ObjectKey]client.Object{key: o}
	case o != nil:
		s.objects[key] = o
	default:
		delete(s.objects, key)
	}
	s.heard = s.now()
	s.mu.Unlock()

	if known || o != nil {
		s.changed()
	}
}

// Source says how well the objects of a kind are known.
type Source struct {
	Kind  string      `json:"kind"`
	State sourceState `json:"state"`
	// Since is when the API server last said something, for a source that is Stale.
	Since time.Time `json:"since,omitzero"`
	// Scope is the namespace that is read; "" for all.
	Scope string `json:"scope,omitempty"`
	// Text says what is missing, and who can mend it.
	Text string `json:"text,omitempty"`
}

// describe returns the state of the source.
func (s *source) describe() Source {
	s.mu.Lock()
	defer s.mu.Unlock()

	out := Source{Kind: s.name, State: s.state, Scope: s.scope}
	switch s.state {
	case stale:
		out.Since = s.heard.UTC().Truncate(time.Second)
		out.Text = "the cluster does not answer: " + s.problem
	case forbidden:
		out.Text = "you may not read them; an administrator can bind " + s.role + " to you"
	case absent:
		out.Text = "this cluster has no such kind. In direct mode xpu-agent has its pools and " +
			"networks in files; otherwise xpu-device-plugin is not installed"
	case live:
		if s.fallback != "" && s.scope == s.fallback {
			out.Text = "you may read only those of namespace " + s.scope
		}
	}
	return out
}

// reader reads the objects of sources as a client reads those of an API server. Objects that it
// returns are shared, and must not be changed.
type reader map[reflect.Type]*source

// errNotRead is returned for a kind of which the API server has not sent any object yet.
var errNotRead = errors.New("not read yet")

// newReader returns a reader. The pods of agents are not among its pods.
func newReader(sources []*source) reader {
	r := reader{}
	for _, s := range sources {
		if s.name != agentPods {
			r[reflect.TypeOf(s.list())] = s
			r[reflect.TypeOf(s.new())] = s
		}
	}
	return r
}

// Get implements [client.Reader].
func (r reader) Get(
	_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption,
) error {
	s := r[reflect.TypeOf(into)]
	if s == nil {
		return errNotRead
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.errLocked(); err != nil {
		return err
	}

	found := s.objects[key]
	if found == nil {
		return apierrors.NewNotFound(v1alpha1.SchemeGroupVersion.WithResource(s.name).GroupResource(), key.Name)
	}
	reflect.ValueOf(into).Elem().Set(reflect.ValueOf(found).Elem())
	return nil
}

// List implements [client.Reader]. Of its options it knows the namespace. The objects are sorted.
func (r reader) List(
	_ context.Context, list client.ObjectList, options ...client.ListOption,
) error {
	s := r[reflect.TypeOf(list)]
	if s == nil {
		return errNotRead
	}

	var o client.ListOptions
	o.ApplyOptions(options)
	found, err := s.sorted(o.Namespace)
	if err != nil {
		return err
	}

	return meta.SetList(list, found)
}

// sorted returns the objects of a namespace, or all for "".
func (s *source) sorted(namespace string) ([]runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.errLocked(); err != nil {
		return nil, err
	}

	found := make([]client.Object, 0, len(s.objects))
	for key, o := range s.objects {
		if namespace == "" || key.Namespace == namespace {
			found = append(found, o)
		}
	}
	slices.SortFunc(found, func(a, b client.Object) int {
		return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()),
			cmp.Compare(a.GetName(), b.GetName()))
	})

	objects := make([]runtime.Object, len(found))
	for i, o := range found {
		objects[i] = o
	}
	return objects, nil
}

// errLocked returns the error of an API server whose objects are not known. What was known when the
// API server went is still known.
func (s *source) errLocked() error {
	resource := v1alpha1.SchemeGroupVersion.WithResource(s.name)
	switch {
	case s.state == forbidden:
		return apierrors.NewForbidden(resource.GroupResource(), "", errors.New(s.problem))
	case s.state == absent:
		return &meta.NoResourceMatchError{PartialResource: resource}
	case !s.listed:
		return errNotRead
	}
	return nil
}
