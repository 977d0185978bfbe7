// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"context"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// server has a claim of pod "a", which is in PodGroup "train", and answers lists of PodGroups with an
// error.
type server struct {
	client.Client
	claim  *resourceapi.ResourceClaim
	groups error
}

func (s server) Get(
	_ context.Context, _ client.ObjectKey, object client.Object, _ ...client.GetOption,
) error {
	switch o := object.(type) {
	case *corev1.Pod:
		o.Name, o.UID = "a", "a-uid"
		o.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To("train")}
	case *resourceapi.ResourceClaim:
		s.claim.DeepCopyInto(o)
	}
	return nil
}

func (s server) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	switch l := list.(type) {
	case *schedulingapi.PodGroupList:
		return s.groups
	case *corev1.PodList:
		l.Items = []corev1.Pod{{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a", UID: "a-uid"},
			Spec: corev1.PodSpec{
				SchedulingGroup: &corev1.PodSchedulingGroup{PodGroupName: ptr.To("train")},
				ResourceClaims: []corev1.PodResourceClaim{
					{Name: "nic", ResourceClaimName: ptr.To("c")},
				},
			},
		}}
	}
	return nil
}

// TestPodGroupsNotRead: nothing is held if the API server does not serve PodGroups, or the controller
// may not read them. If it does not answer, nothing is decided.
func TestPodGroupsNotRead(t *testing.T) {
	groups := schema.GroupResource{Group: schedulingapi.GroupName, Resource: "podgroups"}
	kind := schedulingapi.SchemeGroupVersion.WithKind("PodGroup")
	for name, test := range map[string]struct {
		err  error
		want Answer
	}{
		"not served":     {&meta.NoKindMatchError{GroupKind: kind.GroupKind()}, Alone},
		"served no more": {apierrors.NewNotFound(groups, ""), Alone},
		"may not":        {apierrors.NewForbidden(groups, "", errors.New("role")), Alone},
		"away":           {errors.New("the API server is away"), Wait},
	} {
		c := claimtest.Allocated("c", claimtest.Result("nic", "node1/0000-3b-00-0/fast",
			"0000-3b-00-2"), claimtest.ReservedFor("a"))
		c.Status.Allocation.Devices.Results[0].BindingConditions = []string{
			v1alpha1.ConditionProvisioned,
		}
		s := server{claim: c, groups: test.err}
		g := &Gangs{Cluster: reconciling.Cluster{Client: s, Live: s},
			held: map[types.NamespacedName]*question{}}
		if v, err := g.Ask(t.Context(), c, Up, ""); err != nil || v.Answer != Wait {
			t.Errorf("%s: first %+v, %v", name, v, err)
		}

		_, err := g.evaluate(t.Context(), namespaceRequest("default"))
		if (err == nil) != (test.want == Alone) {
			t.Errorf("%s: error %v", name, err)
		}
		if v, err := g.Ask(t.Context(), c, Up, ""); err != nil || v.Answer != test.want {
			t.Errorf("%s: then %+v, %v", name, v, err)
		}
	}
}
