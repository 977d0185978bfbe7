// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// mostLike bounds how many Nodes are added at once.
const mostLike = 1000

// AddLike adds Nodes like one that exists, as an autoscaler that would add a node does. The
// argument is NODE or NODE=NUMBER. The new Nodes are named NODE-like-1 and so on. They have the
// labels, taints and allocatable resources of the Node, copies of its own ResourceSlices, and
// copies of the pods of DaemonSets on it. A pool of the copies has the suffix of the Node in its
// name, too. Devices that the pods of DaemonSets have on the Node are left out of the copies.
func (s *Snapshot) AddLike(argument string) error {
	of, number, err := parseLike(argument)
	if err != nil {
		return err
	}

	i := slices.IndexFunc(s.Nodes, isNamed[*corev1.Node](name{"Node", "", of}))
	if i < 0 {
		return fmt.Errorf("template node %s: there is no Node %s", argument, of)
	}

	for n := range number {
		if err := s.addLike(s.Nodes[i], "-like-"+strconv.Itoa(n+1)); err != nil {
			return fmt.Errorf("template node %s: %w", argument, err)
		}
	}

	return nil
}

func parseLike(argument string) (node string, number int, err error) {
	node, text, given := strings.Cut(argument, "=")
	if !given {
		return node, 1, nil
	}
	if number, err = strconv.Atoi(text); err != nil || number < 1 || number > mostLike {
		return "", 0, fmt.Errorf("template node %s: the number must be 1-%d", argument, mostLike)
	}
	return node, number, nil
}

func (s *Snapshot) addLike(template *corev1.Node, suffix string) error {
	node := template.DeepCopy()
	node.Name += suffix
	node.UID = ""
	if _, labelled := node.Labels[corev1.LabelHostname]; labelled {
		node.Labels[corev1.LabelHostname] = node.Name
	}
	node.Spec.ProviderID, node.Spec.Unschedulable = "", false
	if s.has(name{"Node", "", node.Name}) {
		return fmt.Errorf("there is a Node %s already", node.Name)
	}

	pods, taken := s.daemons(template.Name)
	for _, slice := range slices.Clone(s.Slices) {
		if ptr.Deref(slice.Spec.NodeName, "") != template.Name {
			continue
		}

		own := slice.DeepCopy()
		own.Name += suffix
		own.UID, own.OwnerReferences = "", nil
		own.Spec.NodeName = &node.Name
		own.Spec.Pool.Name += suffix
		own.Spec.Devices = slices.DeleteFunc(own.Spec.Devices, func(d resourceapi.Device) bool {
			return taken[deviceName{slice.Spec.Driver, slice.Spec.Pool.Name, d.Name}]
		})
		if err := s.Put(own); err != nil {
			return err
		}
	}

	for _, pod := range pods {
		own := pod.DeepCopy()
		own.Name += suffix
		own.UID = ""
		own.Spec.NodeName = node.Name
		own.Spec.ResourceClaims, own.Status.ResourceClaimStatuses = nil, nil
		for c := range own.Spec.Containers {
			own.Spec.Containers[c].Resources.Claims = nil
		}
		for c := range own.Spec.InitContainers {
			own.Spec.InitContainers[c].Resources.Claims = nil
		}
		if err := s.Put(own); err != nil {
			return err
		}
	}

	return s.Put(node)
}

// deviceName identifies a device.
type deviceName struct{ driver, pool, device string }

// daemons returns the pods of DaemonSets on a Node, and the devices that they have.
func (s *Snapshot) daemons(node string) (pods []*corev1.Pod, taken map[deviceName]bool) {
	taken = map[deviceName]bool{}
	for _, pod := range s.Pods {
		if pod.Spec.NodeName != node || !ofDaemonSet(pod) {
			continue
		}

		pods = append(pods, pod)
		for _, claim := range s.Claims {
			if claim.Namespace != pod.Namespace || claim.Status.Allocation == nil ||
				!reservedFor(claim, pod) {
				continue
			}
			for _, result := range claim.Status.Allocation.Devices.Results {
				if !ptr.Deref(result.AdminAccess, false) {
					taken[deviceName{result.Driver, result.Pool, result.Device}] = true
				}
			}
		}
	}
	return pods, taken
}

func reservedFor(claim *resourceapi.ResourceClaim, pod *corev1.Pod) bool {
	return slices.ContainsFunc(claim.Status.ReservedFor,
		func(consumer resourceapi.ResourceClaimConsumerReference) bool {
			return consumer.Resource == "pods" && consumer.Name == pod.Name
		})
}
