// SPDX-License-Identifier: Apache-2.0

// Package snapshot holds the objects that decide where pods and their devices go, as they are at
// one moment. They are read from files ([Reader]) or listed from an API server ([List]). They can
// be changed to answer what-if questions ([Snapshot.Put], [Snapshot.Remove], [Snapshot.Taint]).
package snapshot

import (
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// ErrKind is the error for an object that does not influence where pods and devices go, such as a
// ConfigMap.
var ErrKind = errors.New("the kind decides nothing about where pods and their devices go")

// Snapshot is a set of objects with the defaults that an API server sets. Objects of a kind have
// different names. The zero value is empty. A Snapshot must not be used concurrently with a change.
type Snapshot struct {
	Nodes      []*corev1.Node
	Namespaces []*corev1.Namespace
	Pods       []*corev1.Pod // in the order in which they are scheduled

	Classes    []*resourceapi.DeviceClass
	Slices     []*resourceapi.ResourceSlice
	Claims     []*resourceapi.ResourceClaim
	Templates  []*resourceapi.ResourceClaimTemplate
	TaintRules []*resourceapi.DeviceTaintRule

	names map[name]struct{} // of all objects
}

// name identifies an object, for example Pod default/web.
type name struct{ kind, namespace, name string }

func (n name) String() string {
	if n.namespace == "" {
		return n.kind + " " + n.name
	}
	return n.kind + " " + n.namespace + "/" + n.name
}

// Put adds an object, or replaces the object with the same name. It sets defaults like an API
// server. It drops pods that have ended. The caller must not use the object afterwards. An error
// names the object and the field that an API server would reject. The error wraps [ErrKind] if a
// Snapshot does not hold the kind.
func (s *Snapshot) Put(object runtime.Object) error {
	_, err := s.put(object)
	return err
}

// put is like Put, and also returns the object's name.
func (s *Snapshot) put(object runtime.Object) (name, error) {
	switch o := object.(type) {
	case *corev1.Node:
		return put(s, &s.Nodes, o, name{"Node", "", o.Name}, nil)
	case *corev1.Namespace:
		return put(s, &s.Namespaces, o, name{"Namespace", "", o.Name}, nil)
	case *corev1.Pod:
		return put(s, &s.Pods, o, name{"Pod", inNamespace(o), o.Name}, completePod)
	case *resourceapi.DeviceClass:
		return put(s, &s.Classes, o, name{"DeviceClass", "", o.Name}, completeClass)
	case *resourceapi.ResourceSlice:
		return put(s, &s.Slices, o, name{"ResourceSlice", "", o.Name}, completeSlice)
	case *resourceapi.ResourceClaim:
		return put(s, &s.Claims, o, name{"ResourceClaim", inNamespace(o), o.Name}, completeClaim)
	case *resourceapi.ResourceClaimTemplate:
		return put(s, &s.Templates, o, name{"ResourceClaimTemplate", inNamespace(o), o.Name},
			completeTemplate)
	case *resourceapi.DeviceTaintRule:
		return put(s, &s.TaintRules, o, name{"DeviceTaintRule", "", o.Name}, completeTaintRule)
	}
	return name{}, fmt.Errorf("%s: %w", object.GetObjectKind().GroupVersionKind().Kind, ErrKind)
}

// inNamespace returns the object's namespace, which it sets to default if empty.
func inNamespace(object metav1.Object) string {
	if object.GetNamespace() == "" {
		object.SetNamespace(metav1.NamespaceDefault)
	}
	return object.GetNamespace()
}

func put[T metav1.Object](
	s *Snapshot, objects *[]T, object T, n name, complete func(T) error,
) (name, error) {
	if n.name == "" {
		return n, fmt.Errorf("a %s has no metadata.name", n.kind)
	}

	if complete != nil {
		if err := complete(object); err != nil {
			return n, fmt.Errorf("%s: %w", n, err)
		}
	}

	if s.has(n) {
		*objects = slices.DeleteFunc(*objects, isNamed[T](n))
	}

	if s.names == nil {
		s.names = map[name]struct{}{}
	}

	s.names[n] = struct{}{}
	if pod, isPod := any(object).(*corev1.Pod); isPod && ended(pod) {
		return n, nil
	}

	*objects = append(*objects, object)
	return n, nil
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

func (s *Snapshot) has(n name) bool {
	_, has := s.names[n]
	return has
}

func isNamed[T metav1.Object](n name) func(T) bool {
	return func(o T) bool { return o.GetNamespace() == n.namespace && o.GetName() == n.name }
}
