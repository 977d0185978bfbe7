// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"maps"
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestVFs: the numbers of VFs that PFs had are there again when the journal is opened again.
func TestVFs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	j, err := journal.Open(path)
	must.Succeed(t, err)
	must.Succeed(t, j.PutVFs("0000:3b:00.0", 8))
	must.Succeed(t, j.PutVFs("0000:3b:00.1", 4))
	must.Succeed(t, j.DeleteVFs("0000:3b:00.1"))
	must.Succeed(t, j.DeleteVFs("0000:3b:00.7"))
	must.Succeed(t, j.Close())

	j, err = journal.Open(path)
	must.Succeed(t, err)
	defer j.Close()
	if got, want := j.VFs(), map[pci.Address]int{"0000:3b:00.0": 8}; !maps.Equal(got, want) {
		t.Errorf("VFs %v, want %v", got, want)
	}
}
