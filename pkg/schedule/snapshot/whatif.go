// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CheckWhatIf returns what is wrong with arguments of [Snapshot.Remove], [Snapshot.Taint] and
// [Snapshot.AddLike], whatever objects there are.
func CheckWhatIf(remove, taint, like []string) error {
	for _, reference := range remove {
		if _, err := new(Snapshot).remover(reference); err != nil {
			return err
		}
	}
	for _, text := range taint {
		if _, err := parseTaint(text); err != nil {
			return fmt.Errorf("taint %s: %w", text, err)
		}
	}
	for _, argument := range like {
		if _, _, err := parseLike(argument); err != nil {
			return err
		}
	}
	return nil
}

// Remove removes an object. The reference is KIND/NAME or KIND/NAMESPACE/NAME, for example
// node/worker-1. The kind is one of node, pod, deviceclass, resourceslice, resourceclaim,
// resourceclaimtemplate and devicetaintrule.
//
// Removing a node also removes its ResourceSlices and the pods of DaemonSets on it. Its other pods,
// and pods of claims with devices there, become pending again.
func (s *Snapshot) Remove(reference string) error {
	remove, err := s.remover(reference)
	if err != nil {
		return err
	}

	kind, object, _ := strings.Cut(reference, "/")
	namespace, object := splitName(kind, object)
	if !remove(namespace, object) {
		return fmt.Errorf("remove %s: there is none of that name", reference)
	}

	return nil
}

// remover returns what removes an object of the kind of a reference.
func (s *Snapshot) remover(reference string) (func(namespace, name string) bool, error) {
	kind, _, _ := strings.Cut(reference, "/")
	remove, known := map[string]func(namespace, name string) bool{
		"node":                  s.removeNode,
		"pod":                   s.removePod,
		"deviceclass":           removeFrom(s, &s.Classes, "DeviceClass"),
		"resourceslice":         removeFrom(s, &s.Slices, "ResourceSlice"),
		"resourceclaim":         removeFrom(s, &s.Claims, "ResourceClaim"),
		"resourceclaimtemplate": removeFrom(s, &s.Templates, "ResourceClaimTemplate"),
		"devicetaintrule":       removeFrom(s, &s.TaintRules, "DeviceTaintRule"),
	}[strings.ToLower(kind)]

	if !known {
		return nil, fmt.Errorf("remove %s: the kind must be one of node, pod, deviceclass, "+
			"resourceslice, resourceclaim, "+
			"resourceclaimtemplate and devicetaintrule, as in node/worker-1", reference)
	}

	return remove, nil
}

func splitName(kind, object string) (namespace, name string) {
	switch strings.ToLower(kind) {
	case "pod", "resourceclaim", "resourceclaimtemplate":
	default:
		return "", object
	}

	if namespace, name, both := strings.Cut(object, "/"); both {
		return namespace, name
	}
	return metav1.NamespaceDefault, object
}

func removeFrom[T metav1.Object](
	s *Snapshot, objects *[]T, kind string,
) func(namespace, object string) bool {
	return func(namespace, object string) bool {
		n := name{kind, namespace, object}
		if !s.has(n) {
			return false
		}
		delete(s.names, n)
		*objects = slices.DeleteFunc(*objects, isNamed[T](n))
		return true
	}
}

func (s *Snapshot) removeNode(_, node string) bool {
	if !removeFrom(s, &s.Nodes, "Node")("", node) {
		return false
	}

	for _, slice := range slices.Clone(s.Slices) {
		if slice.Spec.NodeName != nil && *slice.Spec.NodeName == node {
			removeFrom(s, &s.Slices, "ResourceSlice")("", slice.Name)
		}
	}

	for _, pod := range slices.Clone(s.Pods) {
		switch {
		case pod.Spec.NodeName != node:
		case ofDaemonSet(pod):
			s.removePod(pod.Namespace, pod.Name)
		default:
			pod.Spec.NodeName = ""
			s.unreserve(pod)
		}
	}

	return true
}

func ofDaemonSet(pod *corev1.Pod) bool {
	controller := metav1.GetControllerOf(pod)
	return controller != nil && controller.Kind == "DaemonSet"
}

func (s *Snapshot) removePod(namespace, object string) bool {
	i := slices.IndexFunc(s.Pods, isNamed[*corev1.Pod](name{"Pod", namespace, object}))
	if i < 0 {
		return false
	}
	s.unreserve(s.Pods[i])
	return removeFrom(s, &s.Pods, "Pod")(namespace, object)
}

// unreserve removes the pod from its claims. A claim without pods is deallocated, like the
// controller of ResourceClaims does.
func (s *Snapshot) unreserve(pod *corev1.Pod) {
	for _, claim := range s.Claims {
		if claim.Namespace != pod.Namespace {
			continue
		}

		before := len(claim.Status.ReservedFor)
		claim.Status.ReservedFor = slices.DeleteFunc(claim.Status.ReservedFor,
			func(consumer resourceapi.ResourceClaimConsumerReference) bool {
				return consumer.Resource == "pods" && consumer.Name == pod.Name
			})

		if before > 0 && len(claim.Status.ReservedFor) == 0 {
			claim.Status.Allocation, claim.Status.Devices = nil, nil
		}
	}
}

// Taint adds a taint, written PLACE:KEY[=VALUE]:EFFECT. The place is node=NAME, or a
// comma-separated list of driver=, pool= and device=, which matches all devices with these values,
// such as driver=nic.example.com,pool=node-1:maintenance:NoSchedule. A place without devices is an
// error.
func (s *Snapshot) Taint(taint string) error {
	if err := s.taint(taint); err != nil {
		return fmt.Errorf("taint %s: %w", taint, err)
	}
	return nil
}

func (s *Snapshot) taint(text string) error {
	taint, err := parseTaint(text)
	switch {
	case err != nil:
		return err
	case taint.devices == nil:
		return s.taintNode(taint.node, corev1.Taint{
			Key: taint.key, Value: taint.value, Effect: corev1.TaintEffect(taint.effect),
		})
	case !s.hasDevice(taint.devices):
		return errors.New("no ResourceSlice has such a device")
	}

	rule := &resourceapi.DeviceTaintRule{}
	rule.Name = fmt.Sprintf("what-if-%d", len(s.TaintRules))
	rule.Spec.DeviceSelector = taint.devices
	rule.Spec.Taint = resourceapi.DeviceTaint{
		Key: taint.key, Value: taint.value, Effect: resourceapi.DeviceTaintEffect(taint.effect),
	}
	return s.Put(rule)
}

// whatIfTaint is a taint of a node, or of devices.
type whatIfTaint struct {
	node               string
	devices            *resourceapi.DeviceTaintSelector // nil for a node
	key, value, effect string
}

func parseTaint(text string) (taint whatIfTaint, err error) {
	parts := strings.Split(text, ":")
	if len(parts) != 3 {
		return taint, errors.New("must be PLACE:KEY[=VALUE]:EFFECT, as in " +
			"node=worker-1:maintenance:NoSchedule")
	}

	taint.key, taint.value, _ = strings.Cut(parts[1], "=")
	taint.effect = parts[2]
	if taint.key == "" {
		return taint, errors.New("has no key")
	}
	if node, isNode := strings.CutPrefix(parts[0], "node="); isNode {
		taint.node = node
		return taint, knownNodeEffect(corev1.TaintEffect(taint.effect))
	}

	if taint.devices, err = parseDevices(parts[0]); err != nil {
		return taint, err
	}
	return taint, knownEffect("effect", resourceapi.DeviceTaintEffect(taint.effect))
}

func knownNodeEffect(effect corev1.TaintEffect) error {
	switch effect {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute,
		corev1.TaintEffectPreferNoSchedule:
		return nil
	}
	return fmt.Errorf("effect: is %q, must be NoSchedule, PreferNoSchedule or NoExecute", effect)
}

// hasDevice reports whether a selector matches a device.
func (s *Snapshot) hasDevice(selector *resourceapi.DeviceTaintSelector) bool {
	matches := func(wanted *string, is string) bool { return wanted == nil || *wanted == is }
	return slices.ContainsFunc(s.Slices, func(slice *resourceapi.ResourceSlice) bool {
		return matches(selector.Driver, slice.Spec.Driver) &&
			matches(selector.Pool, slice.Spec.Pool.Name) &&
			slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool {
				return matches(selector.Device, d.Name)
			})
	})
}

func (s *Snapshot) taintNode(node string, taint corev1.Taint) error {
	i := slices.IndexFunc(s.Nodes, isNamed[*corev1.Node](name{"Node", "", node}))
	if i < 0 {
		return fmt.Errorf("there is no Node %s", node)
	}

	s.Nodes[i].Spec.Taints = append(s.Nodes[i].Spec.Taints, taint)
	return nil
}

func parseDevices(place string) (*resourceapi.DeviceTaintSelector, error) {
	selector := &resourceapi.DeviceTaintSelector{}
	for part := range strings.SplitSeq(place, ",") {
		key, value, _ := strings.Cut(part, "=")
		field, known := map[string]**string{
			"driver": &selector.Driver, "pool": &selector.Pool, "device": &selector.Device,
		}[key]
		if !known || value == "" {
			return nil, fmt.Errorf("place %q: must be node=NAME, or have driver=, pool= or "+
				"device= with a value, separated by commas", place)
		}
		*field = &value
	}

	return selector, nil
}
