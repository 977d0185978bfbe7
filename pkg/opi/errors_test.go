// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
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

// mute is an agent that is not called.
type mute struct{ Agent }

func (mute) Kind(err error) error { return KindOf(err) }

func (mute) Reconnected() {}

// TestTextsOfConnectionsStayTheSame checks that an agent whose connections end during the handshake
// causes the same error each time, although each connection has another port at this side. Errors
// are in the status of XPUs, which would be written at each attempt.
func TestTextsOfConnectionsStayTheSame(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	var ended atomic.Int64
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 1)) // what is left unread has the kernel send a reset
			_ = conn.Close()
			ended.Add(1)
		}
	}()

	client, err := Dial(Config{
		Endpoint: listener.Addr().String(), TLS: &tls.Config{}, Installation: "n1",
		Dialect: Dialect{
			New:    func(grpc.ClientConnInterface) Agent { return mute{} },
			Traits: Traits{Timing: Timing{InFlight: 1, Read: time.Second}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })

	var texts []string
	for connections := int64(1); connections <= 4; connections++ {
		for ended.Load() < connections && t.Context().Err() == nil {
			call := client.conn.Invoke(t.Context(), "/a/Get", &emptypb.Empty{}, &emptypb.Empty{})
			texts = append(texts, client.failure(t.Context(), "check agent", "a", call).Error())
		}
	}
	slices.Sort(texts)
	if texts = slices.Compact(texts); len(texts) != 1 {
		t.Errorf("errors differ: %q", texts)
	}
}

// TestDoubtsStayTheSame checks the same for calls whose answers were lost.
func TestDoubtsStayTheSame(t *testing.T) {
	port := object{noun: "port", id: "vf-0000-3b-02-0"}
	doubtAfter := func(age time.Duration) string {
		c := changes{timing: Timing{Late: time.Hour}}
		c.lost = map[object]*change{port: {verb: creation, since: time.Now().Add(-age)}}
		return c.doubt(port, creation)
	}
	if one, other := doubtAfter(time.Second), doubtAfter(time.Minute); one == "" || one != other {
		t.Errorf("doubts differ: %q, %q", one, other)
	}
}
