// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/conformance/faults"
)

// Program returns the program of opi-bridge that has a fault.
type Program func(context.Context, faults.Fault) (path string, err error)

// All tries faults and writes what finds each. It returns how many were found. The error says why
// the trials ended before the last.
func All(ctx context.Context, out io.Writer, program Program, all []faults.Fault) (
	found int, err error,
) {
	for _, f := range all {
		begin := time.Now()
		var names []string
		path, err := program(ctx, f)
		if err == nil {
			names, err = Run(ctx, path, f)
		}
		if ctx.Err() != nil {
			return found, ctx.Err()
		}

		switch {
		case len(names) > 0:
			found++
			fmt.Fprintf(out, "%s: found by %s in %s\n", f.Name, strings.Join(names, ", "),
				time.Since(begin).Round(100*time.Millisecond))
		case err != nil:
			fmt.Fprintf(out, "%s: not found: %v\n", f.Name, err)
		default:
			fmt.Fprintf(out, "%s: not found by %s\n", f.Name, f.Cases)
		}
	}
	return found, nil
}

// Check returns an error if less than a share of the faults was found, in percent.
func Check(found, tried int, least float64) error {
	if tried == 0 || 100*float64(found)/float64(tried) < least {
		return fmt.Errorf("%d of %d faults are found, want %.0f %%", found, tried, least)
	}
	return nil
}
