// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
)

// TestPortsByHand: a deleted XPUPort of a running pod is made again, and an XPUPort without an
// owner is deleted.
func TestPortsByHand(t *testing.T) {
	s := newCRDSite(t)
	vf, other := s.vfs[0], s.vfs[1]
	p := newPod(t, "pod0")
	s.start()
	s.wantHealthy(vf, other)
	if _, err := s.give(p.name, vf); err != nil {
		t.Fatal(err)
	}

	s.mustAdd(p, vf)
	ports := func() map[string]v1alpha1.XPUPort {
		t.Helper()
		var list v1alpha1.XPUPortList
		if err := s.admin.List(t.Context(),
			&list, client.InNamespace(s.config.Namespace)); err != nil {
			t.Fatal(err)
		}

		byName := map[string]v1alpha1.XPUPort{}
		for _, port := range list.Items {
			byName[port.Name] = port
		}

		return byName
	}

	name, otherName := claim.PortName(nodeName, vf), claim.PortName(nodeName, other)
	first := ports()[name]
	if err := s.admin.Delete(t.Context(), &first); err != nil {
		t.Fatal(err)
	}

	s.eventually("the pod has another Port", func() bool {
		port, exists := ports()[name]
		return exists && port.UID != first.UID && len(s.opi.Ports()) == 1
	})

	again := ports()[name]
	if again.Labels[v1alpha1.LabelPool] != first.Labels[v1alpha1.LabelPool] ||
		again.Spec.MAC != first.Spec.MAC {
		t.Errorf("it is %+v %+v, want what it was: %+v %+v", again.Labels, again.Spec, first.Labels,
			first.Spec)
	}

	stray := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.config.Namespace, Name: otherName,
			Finalizers: []string{v1alpha1.FinalizerPort},
		},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: nodeName, Function: claim.FunctionRef(other), XPU: first.Spec.XPU,
			Network: first.Spec.Network,
			MAC:     string(provisioning.MAC(nodeName, other)),
		},
	}

	if err := s.admin.Create(t.Context(), stray); err != nil {
		t.Fatal(err)
	}

	s.eventually("the Port of nobody is gone", func() bool {
		_, exists := ports()[otherName]
		return !exists
	})

	s.wantInPod(p, vf)
	s.del(p, vf)
	s.pods.Set()
	s.awaitHooks()
	s.eventually("there are no Ports", func() bool { return len(ports()) == 0 })
	s.endClean()
}

// TestMaybe: a pod may have a Function as long as the kubelet says so, or does not answer.
func TestMaybe(t *testing.T) {
	c, _, played, _ := newConflicts(t, openJournal(t), v1alpha1.PublishDevicePlugin)
	want := func(when string, want bool) {
		t.Helper()
		c.kubelet.refresh(t.Context())
		if got := c.kubelet.mayBeInUse(vf); got != want {
			t.Errorf("%s: %t, want %t", when, got, want)
		}
	}

	want("no pod has it", false)
	played.Set(kubelettest.Pod("web", "xpu.opiproject.org/fast", vf.String()))
	want("a pod has it", true)
	played.Set()
	want("the pod is gone", false)
	played.Stop()
	want("the kubelet is away", true)
}
