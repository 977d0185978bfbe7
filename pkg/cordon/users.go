// SPDX-License-Identifier: Apache-2.0

package cordon

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// User is a pod that has a Function of a PF.
type User struct {
	Target   Target
	Function string // the device of a claim, or the Function of an XPUPort
	// Namespace and Pod name the pod. Pod is "" if only the claim is known.
	Namespace, Pod string
	// Resource is the kind of what has the claim if that is no pod, such as "podgroups". Pod is its
	// name then.
	Resource string
	Claim    string // "" for an extended resource
}

func (u User) String() string {
	text := u.Function + ": "
	switch {
	case u.Pod == "":
		return text + fmt.Sprintf("claim %s/%s, which no pod uses yet", u.Namespace, u.Claim)
	case u.Resource != "":
		return text + fmt.Sprintf("%s %s/%s, by claim %s", u.Resource, u.Namespace, u.Pod, u.Claim)
	case u.Claim == "":
		return text + fmt.Sprintf("pod %s/%s, by an extended resource", u.Namespace, u.Pod)
	}
	return text + fmt.Sprintf("pod %s/%s, by claim %s", u.Namespace, u.Pod, u.Claim)
}

// Users returns the pods that have Functions of the PFs, by claims or by XPUPorts. Pods that have
// an extended resource without a network are not among them, because only their agents know them.
func Users(ctx context.Context, reader client.Reader, targets []Target) ([]User, error) {
	var claims resourceapi.ResourceClaimList
	if err := reader.List(ctx, &claims); err != nil {
		return nil, fmt.Errorf("list ResourceClaims: %w", err)
	}
	var ports v1alpha1.XPUPortList
	if err := reader.List(ctx, &ports); err != nil {
		return nil, fmt.Errorf("list XPUPorts: %w", err)
	}

	var users []User
	for _, c := range claims.Items {
		users = append(users, usersOf(&c, targets)...)
	}
	for _, port := range ports.Items {
		pod := ptr.Deref(port.Spec.Pod, v1alpha1.PodRef{})
		i := slices.IndexFunc(targets, func(t Target) bool {
			return t.Node == port.Spec.NodeName && t.has(pci.Address(port.Spec.Function.PCIAddress))
		})
		if i >= 0 && pod.Name != "" {
			users = append(users, User{
				Target: targets[i], Function: claim.FunctionOf(port.Spec.Function).String(),
				Namespace: pod.Namespace, Pod: pod.Name,
			})
		}
	}

	slices.SortFunc(users, func(a, b User) int {
		return cmp.Or(cmp.Compare(a.Target.String(), b.Target.String()),
			cmp.Compare(a.String(), b.String()))
	})
	return users, nil
}

// usersOf returns the pods of a claim that has Functions of the PFs.
func usersOf(c *resourceapi.ResourceClaim, targets []Target) (users []User) {
	if c.Status.Allocation == nil {
		return nil
	}

	for _, result := range c.Status.Allocation.Devices.Results {
		pool, err := claim.ParsePoolID(result.Pool)
		if err != nil || result.Driver != v1alpha1.GroupName || ptr.Deref(result.AdminAccess, false) {
			continue
		}
		i := slices.IndexFunc(targets, func(t Target) bool {
			return t.Node == pool.Node && t.PF == pool.PF
		})
		if i < 0 {
			continue
		}

		user := User{
			Target: targets[i], Function: result.Device, Namespace: c.Namespace, Claim: c.Name,
		}
		if len(c.Status.ReservedFor) == 0 {
			users = append(users, user)
		}
		for _, consumer := range c.Status.ReservedFor {
			user.Pod, user.Resource = consumer.Name, ""
			if consumer.APIGroup != "" || consumer.Resource != "pods" {
				user.Resource = consumer.Resource
			}
			users = append(users, user)
		}
	}

	return users
}
