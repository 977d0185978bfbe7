// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

func TestTakesPrecedence(t *testing.T) {
	at := func(name, bridgePort string, second int64) *v1alpha1.XPUPort {
		return &v1alpha1.XPUPort{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "ns", Name: name,
				CreationTimestamp: metav1.NewTime(time.Unix(second, 0)),
			},
			Status: v1alpha1.XPUPortStatus{BridgePort: bridgePort},
		}
	}

	ordered := []*v1alpha1.XPUPort{at("z", "vf", 9), at("y", "", 1), at("a", "", 2), at("b", "", 2)}
	for i, a := range ordered {
		for j, b := range ordered {
			if got := takesPrecedence(a, b); got != (i < j) {
				t.Errorf("takesPrecedence(%s, %s) = %t", a.Name, b.Name, got)
			}
		}
	}
}
