// SPDX-License-Identifier: Apache-2.0

package agent

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
	f := &draPlugin{registered: make(chan struct{})}
	handle := func(context.Context, any) (any, error) { return nil, nil }
	begin := make(chan struct{})
	var calls sync.WaitGroup
	for range 50 {
		calls.Go(func() {
			<-begin
			if _, err := f.intercept(t.Context(),
				&registerapi.RegistrationStatus{PluginRegistered: true}, nil, handle); err != nil {
				t.Error(err)
			}
		})
	}

	close(begin)
	calls.Wait()
	f.awaitRegistered(t.Context(), time.Minute)
}
