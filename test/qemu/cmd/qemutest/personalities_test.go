// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"
)

func TestPlayed(t *testing.T) {
	day := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	third, err := played("", false, day)
	if err != nil {
		t.Fatal(err)
	}

	next, _ := played("third", false, day.AddDate(0, 0, 1))
	all, _ := played("", true, day)

	if third == next || strings.Count(all, ",") != 13 || strings.Count(third, ",") > 4 {
		t.Errorf("played one day %q, the next %q, all %q", third, next, all)
	}
	if got, err := played("i40e,ice", true, day); got != "i40e,ice" || err != nil {
		t.Errorf("by name: %q, %v", got, err)
	}
	if _, err := played("i40e,e1000", false, day); err == nil ||
		!strings.Contains(err.Error(), `"e1000"`) {
		t.Errorf("unknown name: %v", err)
	}
}
