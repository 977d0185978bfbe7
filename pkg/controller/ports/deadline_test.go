// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// TestDeadline: a Port that a pod waits for fails after a minute because of its xPU, and because of
// nothing else.
func TestDeadline(t *testing.T) {
	const young, old = 40 * time.Second, 2 * time.Minute
	away := reconciling.Refuse(v1alpha1.ReasonXPUUnavailable, "XPU card is away")
	forbidden := reconciling.Refuse(v1alpha1.ReasonForbidden, "not for this namespace")
	conflict := reconciling.Refuse(v1alpha1.ReasonConflict, "another Port has it")
	quota := reconciling.Refuse(v1alpha1.ReasonQuotaExceeded, "ResourceQuota q is exceeded")
	failed := reconciling.Refuse(v1alpha1.ReasonFailed,
		"not up 1m0s after its creation: XPU card is away")

	for name, test := range map[string]struct {
		age       time.Duration
		change    func(*v1alpha1.XPUPort)
		err, want error
	}{
		"young": {age: young, err: away, want: reconciling.RetryAfter(away, 20*time.Second)},
		"young, with a short pause": {
			age: young, err: reconciling.RetryAfter(away, time.Second),
			want: reconciling.RetryAfter(away, time.Second),
		},
		"old": {age: old, err: away, want: failed},
		"old, with a pause": {
			age: old, err: reconciling.RetryAfter(away, time.Second),
			want: reconciling.RetryAfter(failed, time.Second),
		},
		"old, and no xPU refuses it":          {age: old, err: forbidden, want: forbidden},
		"old, and over the quota":             {age: old, err: quota, want: quota},
		"young, and refused by the conflict":  {age: young, err: conflict, want: conflict},
		"old, and the API server is not here": {age: old, err: errAway, want: errAway},
		"was up": {
			age: old, change: func(p *v1alpha1.XPUPort) { p.Status.BridgePort = "vf" },
			err: away, want: away,
		},
		"ahead of pods": {
			age: old, change: func(p *v1alpha1.XPUPort) { p.Spec.Ahead = true },
			err: away, want: away,
		},
		"standby": {
			age: old, change: func(p *v1alpha1.XPUPort) { p.Status.Predecessor = "ns/a" },
			err: away, want: away,
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			port := &v1alpha1.XPUPort{}
			port.CreationTimestamp = metav1.NewTime(time.Now().Add(-test.age))
			if test.change != nil {
				test.change(port)
			}

			got := deadline(time.Minute).apply(port, test.err)
			is, _ := errors.AsType[*reconciling.Refusal](got)
			want, refused := errors.AsType[*reconciling.Refusal](test.want)
			if refused && (is == nil || *is != *want) || !refused && got != test.want {
				t.Errorf("%s: %#v, want %#v", name, got, test.want)
			}
		})
	}
}

var errAway = errors.New("the API server is away")
