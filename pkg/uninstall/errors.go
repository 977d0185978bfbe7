// SPDX-License-Identifier: Apache-2.0

package uninstall

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// InUseError is returned if pods use Functions. These pods need the agents of their nodes to
// terminate.
type InUseError struct {
	// Pods are "namespace/name", sorted.
	Pods []string
}

func (e *InUseError) Error() string {
	return "pods that have Functions: " + strings.Join(e.Pods, ", ")
}

// RemainsError is returned if objects of a kind have not gone in time. Objects of later kinds were
// not deleted.
type RemainsError struct {
	Kind    string
	Objects []Remains
}

// Remains is an object that has not gone.
type Remains struct {
	Name   string // with the namespace, if the object has one
	Reason string // such as "reason: message" of its condition Ready, or ""
}

// String returns "name" or "name: reason".
func (r Remains) String() string {
	if r.Reason == "" {
		return r.Name
	}
	return r.Name + ": " + r.Reason
}

func (e *RemainsError) Error() string {
	objects := make([]string, 0, len(e.Objects))
	for _, o := range e.Objects {
		objects = append(objects, o.String())
	}
	return fmt.Sprintf("%ss that have not gone: %s", e.Kind, strings.Join(objects, "; "))
}

func remains(kind string, objects []unstructured.Unstructured) *RemainsError {
	e := &RemainsError{Kind: kind}
	for i := range objects {
		e.Objects = append(e.Objects,
			Remains{Name: key(&objects[i]), Reason: reasonOf(&objects[i])})
	}
	return e
}

// reasonOf returns the message of the object's condition Ready, or says that it is not deleted
// here.
func reasonOf(o *unstructured.Unstructured) string {
	if isManagedByBroker(o) {
		return "a broker keeps it until the XPUTenant is deleted in the infra cluster"
	}

	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		condition, isMap := c.(map[string]any)
		if !isMap || condition["type"] != v1alpha1.ConditionReady {
			continue
		}
		return fmt.Sprintf("%v: %v", condition["reason"], condition["message"])
	}

	return ""
}
