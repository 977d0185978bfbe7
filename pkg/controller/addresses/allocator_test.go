// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
)

// What was given to a Port is free for the one that has its name next, and only once the first is
// gone: also if the watch left out that it was deleted.
func TestNamesAreUsedAgain(t *testing.T) {
	network := &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: "blue"},
		Spec:       v1alpha1.XPUNetworkSpec{Subnets: []string{"10.1.0.0/29"}},
	}
	named := func(uid types.UID) *v1alpha1.XPUPort {
		return &v1alpha1.XPUPort{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "port", UID: uid},
			Spec: v1alpha1.XPUPortSpec{
				AssignAddresses: true, MAC: "02:00:00:00:00:51", Network: network.Name,
			},
		}
	}

	ports := model.NewPorts(named("first"))
	l := NewAllocator(ports)
	want := func(uid types.UID, addresses ...string) {
		t.Helper()
		got, known, err := l.Adopt(t.Context(), named(uid), network, nil)
		if !slices.Equal(got, addresses) || known != (len(addresses) > 0) || err != nil {
			t.Errorf("the %s has %q, known %t, %v; want %q", uid, got, known, err, addresses)
		}
	}

	want("first", "10.1.0.2/29")
	want("second") // it does not exist yet
	ports.Set(named("second"))
	want("second", "10.1.0.2/29")
	want("first")
}

// TestBooksAreForgotten: Ports name networks, which need not exist. Nothing is kept of a network
// without Ports.
func TestBooksAreForgotten(t *testing.T) {
	ports := model.NewPorts()
	l := NewAllocator(ports)
	for n := range 100 {
		port := claimed(1, 0)
		port.Spec.Network = fmt.Sprint("network-", n)
		ports.Set(port)
		ports.Remove(client.ObjectKeyFromObject(port))
	}
	if n := len(l.books); n > 0 {
		t.Errorf("%d networks are kept", n)
	}
}
