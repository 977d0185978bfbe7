// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"errors"
	"strings"
	"testing"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// TestUnusableIsNotReserved: a Function that cannot be attached is refused before anything is
// changed or written.
func TestUnusableIsNotReserved(t *testing.T) {
	t.Parallel()
	_, w := fitting(t)
	var drivers []string
	a := New(w.journal, &engine{}, netdevs{},
		Options{Setup: w, Unusable: func(_ function.ID, driver string) string {
			drivers = append(drivers, driver)
			return "driver is vfio-pci, which makes no netdev"
		}}, logr.Discard())

	err := a.Reserve(t.Context(), withSetup())
	if !errors.As(err, new(UnusableError)) ||
		!strings.Contains(err.Error(), vf.String()+": driver is vfio-pci") {
		t.Errorf("error %v, want why the Function cannot be attached", err)
	}
	if drivers[0] != "vfio-pci" {
		t.Errorf("asked about driver %q, want the one that will be bound", drivers[0])
	}
	if _, reserved := w.journal.Get(vf); reserved || len(w.bound) > 0 {
		t.Error("the Function was reserved or set up")
	}
}

// TestLateNetdevIsAwaited: a driver may make its netdev a moment late.
func TestLateNetdevIsAwaited(t *testing.T) {
	t.Parallel()
	_, w := fitting(t)
	looks := 0
	a := New(w.journal, &engine{}, netdevs{},
		Options{Setup: w, Unusable: func(function.ID, string) string {
			if looks++; looks < 3 {
				return "driver iavf has made no netdev yet"
			}
			return ""
		}}, logr.Discard())

	if err := a.Reserve(t.Context(), withSetup()); err != nil {
		t.Fatal(err)
	}
	if record, _ := w.journal.Get(vf); record.State != journal.Reserved {
		t.Errorf("the Function is %q, want %s", record.State, journal.Reserved)
	}
}
