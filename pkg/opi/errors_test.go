// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// late is a context whose deadline has passed, but whose timer has not fired.
type late struct{ context.Context }

func (late) Deadline() (time.Time, bool) { return time.Now().Add(-time.Millisecond), true }

// TestTimeoutBeforeTheTimer checks that the caller's timeout is not reported as an unavailable
// agent.
func TestTimeoutBeforeTheTimer(t *testing.T) {
	ctx := late{t.Context()}
	client := &Client{}
	cut := status.Error(codes.DeadlineExceeded, "context deadline exceeded")
	err := client.failure(ctx, "get port", "vf-0000-3b-02-0", cut)
	if !errors.Is(err, ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("failure = %v, want a timeout", err)
	}

	err = await(ctx, "get port", "vf-0000-3b-02-0", func(context.Context) (bool, string, error) {
		return false, "pending", client.failure(ctx, "get port", "vf-0000-3b-02-0", cut)
	})
	if e, ok := errors.AsType[*Error](err); !ok || e.Kind != ErrTimeout || e.Detail != "pending" {
		t.Errorf("await = %v; want a timeout with what the agent said last", err)
	}
}
