// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestLease checks who holds the Lease, whatever the difference between two infra clusters' clocks.
func TestLease(t *testing.T) {
	for name, skew := range map[string]time.Duration{
		"same clock": 0, "a minute ahead": time.Minute, "a minute behind": -time.Minute,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { testTakeOver(t, skew) })
		})
	}
}

func testTakeOver(t *testing.T, skew time.Duration) {
	scheme := runtime.NewScheme()
	if err := coordinationv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}

	key := client.ObjectKey{Namespace: systemNamespace, Name: v1alpha1.BrokerLease}
	api := fake.NewClientBuilder().WithScheme(scheme).Build()
	held := func(identity string) *lease {
		return &lease{client: api, key: key, identity: identity, duration: 40 * time.Second,
			timeout: time.Second}
	}

	first, second := held("infra-1"), held("infra-2")
	if err := first.renew(t.Context()); err != nil {
		t.Fatal(err)
	}

	renewSkewed := func() {
		if err := first.renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		first.lastSeen.Spec.RenewTime = &metav1.MicroTime{Time: time.Now().Add(skew)}
		if err := api.Update(t.Context(), first.lastSeen); err != nil {
			t.Fatal(err)
		}
	}

	refused := func(when string) {
		t.Helper()
		var taken *heldError
		if err := second.renew(t.Context()); !errors.As(err, &taken) || taken.holder != "infra-1" {
			t.Errorf("%s: error %v, want that infra-1 has it", when, err)
		}
	}

	for range 12 { // two minutes
		renewSkewed()
		refused("while it is renewed")
		time.Sleep(10 * time.Second)
	}

	for range 3 {
		refused("a moment after")
		time.Sleep(10 * time.Second)
	}

	time.Sleep(time.Hour) // the first infra cluster is gone
	if err := second.renew(t.Context()); err != nil {
		t.Errorf("an hour later: %v", err)
	}

	var taken *heldError
	if err := first.renew(t.Context()); !errors.As(err, &taken) || taken.holder != "infra-2" {
		t.Errorf("back again the first gets %v, want that infra-2 has it", err)
	}
}
