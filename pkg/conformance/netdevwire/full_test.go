// SPDX-License-Identifier: Apache-2.0

package netdevwire

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestWhileFull: a full queue is waited for, until the limit, and no other error.
func TestWhileFull(t *testing.T) {
	for name, test := range map[string]struct {
		limit   time.Duration
		answers []error // the last one is repeated
		want    error
		sent    int
	}{
		"sent":             {time.Minute, []error{nil}, nil, 1},
		"sent after a try": {time.Minute, []error{unix.ENOBUFS, nil}, nil, 2},
		"no netdev":        {time.Minute, []error{unix.ENXIO}, unix.ENXIO, 1},
		"full for good":    {0, []error{unix.ENOBUFS}, unix.ENOBUFS, 1},
	} {
		sent := 0
		err := whileFull(test.limit, func() error {
			sent++
			return test.answers[min(sent, len(test.answers))-1]
		})
		if !errors.Is(err, test.want) || sent != test.sent {
			t.Errorf("%s: %v after %d, want %v after %d", name, err, sent, test.want, test.sent)
		}
	}
}
