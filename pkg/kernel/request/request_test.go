// SPDX-License-Identifier: Apache-2.0

package request_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// TestConsistent checks that an interrupted list is repeated a limited number of times, and that
// other failures are not repeated.
func TestConsistent(t *testing.T) {
	for name, test := range map[string]struct {
		failures int
		err      error
		lists    int
	}{
		"at once": {lists: 1},
		"interrupted twice": {
			failures: 2, err: fmt.Errorf("links: %w", nl.ErrDumpInterrupted), lists: 3,
		},
		"interrupted by signals": {failures: 9, err: unix.EINTR, lists: 10},
		"interrupted for ever":   {failures: 1000, err: nl.ErrDumpInterrupted, lists: 10},
		"refused":                {failures: 1000, err: unix.EPERM, lists: 1},
	} {
		t.Run(name, func(t *testing.T) {
			lists := 0
			got, err := request.Consistent(func() ([]int, error) {
				if lists++; lists <= test.failures {
					return nil, test.err
				}
				return []int{1, 2}, nil
			})

			if lists != test.lists {
				t.Errorf("%d lists, want %d", lists, test.lists)
			}

			switch failed := test.failures >= test.lists; {
			case failed && !errors.Is(err, test.err):
				t.Errorf("error %v, want %v", err, test.err)
			case !failed && (err != nil || !slices.Equal(got, []int{1, 2})):
				t.Errorf("list %v, error %v", got, err)
			}
		})
	}
}

// TestGenericHeader checks that the reserved bytes are zero, because the kernel refuses newer
// commands otherwise.
func TestGenericHeader(t *testing.T) {
	h := request.GenericHeader{Command: 7, Version: 1}
	if got, want := h.Serialize(), []byte{7, 1, 0, 0}; !bytes.Equal(got, want) ||
		h.Len() != len(want) {
		t.Errorf("%v of length %d, want %v", got, h.Len(), want)
	}
}
