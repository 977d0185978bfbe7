package opi

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// late is a context whose deadline is past, but whose timer did not fire yet.
type late struct{ context.Context }

func (late) Deadline() (time.Time, bool) { return time.Now().Add(-time.Millisecond), true }

// TestTimeoutBeforeTheTimer: that the caller's time is over is not taken for an agent that does not answer.
func TestTimeoutBeforeTheTimer(t *testing.T) {
	ctx := late{t.Context()}
	client := &Client{}
	cut := status.Error(codes.DeadlineExceeded, "context deadline exceeded")
	err := client.failure(ctx, "get port", "vf-0000-3b-02-0", cut)
	if !errors.Is(err, ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("failure = %v, want a timeout", err)
	}
	done, err := poll(ctx, func(context.Context) (bool, error) {
		return false, client.failure(ctx, "get port", "vf-0000-3b-02-0", cut)
	})
	if done || err != nil {
		t.Errorf("poll = %t, %v; want false and no error, for the caller to say what it saw last", done, err)
	}
}
