// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestEnding(t *testing.T) {
	pod := []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "1", Controller: ptr.To(true)},
	}

	reserved := resourceapi.ResourceClaimStatus{
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: "p", UID: "1"},
		},
	}

	allocated := resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}}
	now := metav1.Now()
	for name, test := range map[string]struct {
		claim resourceapi.ResourceClaim
		want  bool
	}{
		"deleted": {
			resourceapi.ResourceClaim{
				ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}, Status: allocated,
			}, true,
		},
		"generated, given back": {
			resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{OwnerReferences: pod}}, true,
		},
		"generated, still reserved": {
			resourceapi.ResourceClaim{
				ObjectMeta: metav1.ObjectMeta{OwnerReferences: pod}, Status: reserved,
			}, false,
		},
		"generated, allocated anew": {
			resourceapi.ResourceClaim{
				ObjectMeta: metav1.ObjectMeta{OwnerReferences: pod}, Status: allocated,
			}, false,
		},
		"made by a person, given back": {resourceapi.ResourceClaim{}, false},
	} {
		if got := ending(&test.claim); got != test.want {
			t.Errorf("%s: ending is %t, want %t", name, got, test.want)
		}
	}
}
