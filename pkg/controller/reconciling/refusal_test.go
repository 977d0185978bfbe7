// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	"errors"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestRefusalPause covers how long an object waits for its next attempt: as its reason says, unless
// the place of the refusal knows better.
func TestRefusalPause(t *testing.T) {
	busy := Refuse(v1alpha1.ReasonFunctionBusy, "XPUPort %s has it", "a")
	conflict := Refuse(v1alpha1.ReasonConflict, "XPUPort %s has it", "a")
	for want, err := range map[time.Duration]error{
		0:               busy,
		LastRetry:       conflict,
		2 * time.Second: RetryAfter(conflict, 2*time.Second),
	} {
		refusal, ok := errors.AsType[*Refusal](err)
		if !ok || refusal.Pause != want || refusal.Message != "XPUPort a has it" {
			t.Errorf("%#v, want a pause of %s", err, want)
		}
	}

	if again := conflict.(*Refusal); again.Pause != LastRetry {
		t.Errorf("RetryAfter changed its argument to %+v", again)
	}

	for _, other := range []error{nil, errors.New("the API server is away")} {
		if err := RetryAfter(other, time.Second); err != other {
			t.Errorf("RetryAfter made %v of %v", err, other)
		}
	}
}
