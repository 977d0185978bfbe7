// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"sync"
	"testing"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// TestTwoRegistrationsAtOnce: when a kubelet replaces another one, both may register the driver at
// once.
func TestTwoRegistrationsAtOnce(t *testing.T) {
	r := &Registration{registered: make(chan struct{})}
	handle := func(context.Context, any) (any, error) { return nil, nil }
	begin := make(chan struct{})
	var calls sync.WaitGroup
	for range 50 {
		calls.Go(func() {
			<-begin
			if _, err := r.intercept(t.Context(),
				&registerapi.RegistrationStatus{PluginRegistered: true}, nil, handle); err != nil {
				t.Error(err)
			}
		})
	}

	close(begin)
	calls.Wait()
	r.Await(t.Context(), time.Minute)
}
