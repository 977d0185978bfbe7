// SPDX-License-Identifier: Apache-2.0

package connectivity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// device is a device that a pod's claim has, as ResourceSlices name it.
type device struct{ pool, name string }

// given is what a pod was given, as the API server says.
type given struct {
	mac       string
	addresses []string
	port      *v1alpha1.XPUPort
}

// facts are what the API server says about the pods.
type facts struct {
	pods   map[string]corev1.Pod                // by name
	claims map[string]resourceapi.ResourceClaim // by name
	ports  []v1alpha1.XPUPort
}

// checkInterfaces compares the interfaces in the pods with what networks, claims and XPUPorts say.
func (t *Test) checkInterfaces(ctx context.Context) ([]Check, error) {
	begin := time.Now()
	known, err := t.gather(ctx)
	if err != nil {
		return nil, err
	}
	silent := t.listen(ctx)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}

	var checks []Check
	for _, n := range t.networks {
		c := Check{OK: true}
		good, all := 0, 0
		for _, p := range t.pods {
			if p.network != n.Name || p.ready == 0 {
				continue
			}

			wrong := t.look(p, n, known, silent[p])
			if all++; len(wrong) == 0 {
				good++
			}
			for _, w := range wrong {
				t.fails(&c, p, "%s", w)
			}
		}

		c.Name = fmt.Sprintf("%s: %d of %d interfaces are as asked (%s)", n.Name, good, all,
			asked(n))
		c.Took = time.Since(begin)
		if all > 0 {
			checks = append(checks, c)
		}
	}

	return checks, nil
}

// lookInterval is the time between two looks at the API server. It is not watched, because two kinds
// of objects are read for some seconds only.
const lookInterval = 200 * time.Millisecond

// statusPatience is how long agents may take to write into claims what pods were given, once the
// pods are Ready.
const statusPatience = 10 * time.Second

// gather reads the pods, their claims and their XPUPorts. It waits until the claims say what Ready
// pods were given, or until statusPatience ends.
func (t *Test) gather(ctx context.Context) (known facts, err error) {
	waiting, cancel := context.WithTimeout(ctx, statusPatience)
	defer cancel()

	for complete := false; !complete; {
		if known.pods, err = t.listPods(ctx); err != nil {
			return facts{}, err
		}
		claims, err := t.claims(ctx)
		if err != nil {
			return facts{}, err
		}
		known.claims = map[string]resourceapi.ResourceClaim{}
		for _, c := range claims {
			known.claims[c.Name] = c
		}

		complete = t.Resource != "" || !slices.ContainsFunc(t.pods, func(p *pod) bool {
			return p.ready > 0 && networkData(claimOf(known.pods[p.name], known)) == nil
		})
		if !complete && !loop.Sleep(waiting, lookInterval) {
			break
		}
	}

	t.note(known.pods, slices.Collect(maps.Values(known.claims)))
	known.ports, err = t.ports(ctx)
	return known, err
}

// listPods returns the pods of the test by name.
func (t *Test) listPods(ctx context.Context) (map[string]corev1.Pod, error) {
	var list corev1.PodList
	if err := t.API.List(ctx, &list, client.InNamespace(t.namespace),
		client.MatchingLabels(t.labels())); err != nil {
		return nil, fmt.Errorf("list the pods of the test: %w", err)
	}
	pods := map[string]corev1.Pod{}
	for _, p := range list.Items {
		pods[p.Name] = p
	}
	return pods, nil
}

// claims returns the claims that were made for the pods.
func (t *Test) claims(ctx context.Context) ([]resourceapi.ResourceClaim, error) {
	if t.Resource != "" {
		return nil, nil
	}
	var list resourceapi.ResourceClaimList
	if err := t.API.List(ctx, &list, client.InNamespace(t.namespace),
		client.MatchingLabels(t.labels())); err != nil {
		return nil, fmt.Errorf("list the claims of the test: %w", err)
	}
	return list.Items, nil
}

// ports returns the XPUPorts in the namespace in which the pods' XPUPorts are.
func (t *Test) ports(ctx context.Context) ([]v1alpha1.XPUPort, error) {
	var list v1alpha1.XPUPortList
	if err := t.API.List(ctx, &list, client.InNamespace(t.portNamespace())); err != nil {
		return nil, fmt.Errorf("list XPUPorts of namespace %s: %w", t.portNamespace(), err)
	}
	return list.Items, nil
}

// networkData returns what a claim's pod was given, or nil.
func networkData(c resourceapi.ResourceClaim) *resourceapi.NetworkDeviceData {
	for _, s := range c.Status.Devices {
		if s.Driver == v1alpha1.GroupName && s.NetworkData != nil {
			return s.NetworkData
		}
	}
	return nil
}

// portNamespace returns the namespace of the XPUPorts of the pods.
func (t *Test) portNamespace() string {
	if t.Resource != "" {
		return t.Agents
	}
	return t.namespace
}

// asked says what an interface of a network must have.
func asked(n v1alpha1.XPUNetwork) string {
	text := "an address of " + strings.Join(n.Spec.Subnets, " and ")
	if n.Spec.MTU != nil {
		text += fmt.Sprintf(", MTU %d", *n.Spec.MTU)
	}
	return text
}

// listen opens the logs of the pods that are Ready, and reads what they say about their interfaces.
// It returns why pods have not said it. One pod does not keep it from others, because a kubelet may
// be away.
func (t *Test) listen(ctx context.Context) (silent map[*pod]error) {
	problems := make([]error, len(t.pods))
	var all sync.WaitGroup
	for i, p := range t.pods {
		if p.ready > 0 {
			all.Go(func() { problems[i] = t.listenTo(ctx, p) })
		}
	}
	all.Wait()

	silent = map[*pod]error{}
	for i, p := range t.pods {
		silent[p] = problems[i]
	}
	return silent
}

func (t *Test) listenTo(ctx context.Context, p *pod) error {
	waiting, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	if err := t.readLog(ctx, waiting, p); err != nil {
		return err
	}
	first, err := p.report(waiting, 0)
	if err == nil {
		p.found = &first.Interface
	}
	return err
}

// look returns what is wrong with the interface of a pod, or why the pod has not said how it is.
func (t *Test) look(p *pod, n v1alpha1.XPUNetwork, known facts, silent error) (wrong []string) {
	if silent != nil {
		return []string{silent.Error()}
	}
	want, err := t.givenTo(p, known)
	if err != nil {
		return []string{err.Error()}
	}
	return append(compare(p, want), fits(p, n, want.port)...)
}

// compare compares the interface in a pod with what the pod was given.
func compare(p *pod, want given) (wrong []string) {
	has := p.found
	if !has.Up {
		wrong = append(wrong, "the interface is down")
	}
	if !strings.EqualFold(has.MAC, want.mac) {
		wrong = append(wrong, fmt.Sprintf("MAC address %s, but the API server says %s", has.MAC,
			want.mac))
	}

	for _, text := range want.addresses {
		prefix, err := netip.ParsePrefix(text)
		if err != nil { // Multus writes addresses without a length
			prefix = netip.Prefix{}
		}
		if !slices.ContainsFunc(has.Addresses, func(a netip.Prefix) bool {
			return a == prefix || a.Addr().String() == text
		}) {
			wrong = append(wrong, fmt.Sprintf("it lacks address %s, which the API server says it has",
				text))
		}
	}

	switch port := want.port; {
	case port == nil:
		wrong = append(wrong, "it has no XPUPort, so that no xPU serves it")
	case !strings.EqualFold(port.Spec.MAC, has.MAC):
		wrong = append(wrong, fmt.Sprintf("MAC address %s, but the xPU expects %s", has.MAC,
			port.Spec.MAC))
	case !meta.IsStatusConditionTrue(port.Status.Conditions, v1alpha1.ConditionReady):
		ready := v1alpha1.ReadyOf(port.Status.Conditions)
		wrong = append(wrong, fmt.Sprintf("XPUPort %s is not Ready: %s: %s", port.Name, ready.Reason,
			ready.Message))
	}

	return wrong
}

// fits compares the interface in a pod with its network.
func fits(p *pod, n v1alpha1.XPUNetwork, port *v1alpha1.XPUPort) (wrong []string) {
	for _, subnet := range subnets(n) {
		in := 0
		for _, a := range p.found.Addresses {
			if subnet.Contains(a.Addr()) {
				in++
			}
		}
		if in != 1 {
			wrong = append(wrong, fmt.Sprintf("%d addresses of subnet %s, want 1", in, subnet))
		}
	}

	want := 0 // unknown
	if n.Spec.MTU != nil {
		want = int(*n.Spec.MTU)
	} else if port != nil {
		want = int(port.Status.MTU)
	}
	if want > 0 && p.found.MTU != want {
		wrong = append(wrong, fmt.Sprintf("MTU %d, want %d", p.found.MTU, want))
	}
	return wrong
}

// givenTo reads what a pod was given.
func (t *Test) givenTo(p *pod, known facts) (given, error) {
	object := known.pods[p.name]
	want, err := byMultus(object)
	matches := func(s v1alpha1.XPUPortSpec) bool { return s.Pod != nil && s.Pod.UID == object.UID }
	if t.Resource == "" {
		c := claimOf(object, known)
		want, err = byClaim(c)
		matches = func(s v1alpha1.XPUPortSpec) bool { return s.Claim.UID == c.UID }
	}

	if i := slices.IndexFunc(known.ports, func(port v1alpha1.XPUPort) bool {
		return matches(port.Spec)
	}); i >= 0 {
		want.port = &known.ports[i]
	}
	return want, err
}

// claimOf returns the claim of a pod, or an empty one.
func claimOf(object corev1.Pod, known facts) (c resourceapi.ResourceClaim) {
	for _, s := range object.Status.ResourceClaimStatuses {
		if s.Name == requestName && s.ResourceClaimName != nil {
			c = known.claims[*s.ResourceClaimName]
		}
	}
	return c
}

// byClaim reads what the claim of a pod has.
func byClaim(c resourceapi.ResourceClaim) (given, error) {
	if _, err := claim.Devices(&c); err != nil {
		return given{}, err
	}

	data := networkData(c)
	if data == nil {
		return given{}, errors.New("its claim does not say what it was given")
	}
	return given{mac: data.HardwareAddress, addresses: data.IPs}, nil
}

// byMultus reads what Multus says of a pod.
func byMultus(object corev1.Pod) (given, error) {
	var all []struct {
		Interface string   `json:"interface"`
		IPs       []string `json:"ips"`
		MAC       string   `json:"mac"`
	}
	if err := json.Unmarshal([]byte(object.Annotations[annotationStatus]), &all); err != nil {
		return given{}, fmt.Errorf("its annotation %s: %w", annotationStatus, err)
	}

	for _, s := range all {
		if s.Interface == interfaceName {
			return given{mac: s.MAC, addresses: s.IPs}, nil
		}
	}
	return given{}, fmt.Errorf("its annotation %s has no interface %s", annotationStatus,
		interfaceName)
}
