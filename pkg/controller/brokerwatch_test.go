// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestBrokerWatch covers when the broker is away, whatever its clock says.
func TestBrokerWatch(t *testing.T) {
	for name, skew := range map[string]time.Duration{
		"same clock": 0, "a minute ahead": time.Minute, "a minute behind": -time.Minute,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				watch := &brokerWatch{grace: 40 * time.Second, seen: time.Now()}
				var lease coordinationv1.Lease
				is := func(when string, away, changed bool) {
					t.Helper()
					_, news := watch.observe(&lease)
					if message := watch.awayMessage(); (message != "") != away || news != changed {
						t.Errorf("%s: message %q, news %t", when, message, news)
					}
				}

				renew := func() {
					lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now().Add(skew)}
				}

				is("the controller has just started, and there is no Lease", false, false)
				time.Sleep(41 * time.Second)
				is("there has never been one", true, true)
				renew()
				is("it comes", false, true)

				for range 12 {
					time.Sleep(10 * time.Second)
					renew()
					is("it is renewed", false, false)
				}

				time.Sleep(39 * time.Second)
				is("three renewals were missed", false, false)
				time.Sleep(2 * time.Second)
				is("four were", true, true)
				time.Sleep(time.Hour)
				is("an hour later", true, false)
				renew()
				is("it is back", false, true)
			})
		})
	}
}
