// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/keep"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestLeftovers: the library's files stay while their claim is prepared, and are removed after
// that. Other files are left alone.
func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	write := func(names ...string) {
		for _, name := range names {
			if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}

	const cdi, metadata, copies = "cdi/", "driver/dra-device-metadata/", "driver/cdi/"
	stays := []string{
		cdi + "xpu.opiproject.org_metadata_uid-1_nic.json", metadata +
			"default_net/nic/metadata.json",
		cdi + "gpu.example.com_metadata_uid-2_gpu.json", cdi + "xpu.opiproject.org-uid-2.yaml",
		"driver/dra.sock",
		// this file is being written
		cdi + ".xpu.opiproject.org_metadata_uid-1_nic.json.4711.tmp",
		// this file belongs to a claim that was created after a claim of the same name
		metadata + "default_again/nic/metadata.json",
		cdi + "xpu.opiproject.org_metadata_uid-5_all.json",
		metadata + "default_monitor/all/metadata.json",
		copies + "xpu.opiproject.org_metadata_uid-1_nic.json",
	}

	goes := []string{
		cdi + "xpu.opiproject.org_metadata_uid-2_nic.json", cdi +
			"xpu.opiproject.org_metadata_uid-2_other.json",
		// this file belongs to an agent that was killed
		cdi + ".xpu.opiproject.org_metadata_uid-3_nic.json.4711.tmp",
		cdi + "xpu.opiproject.org_metadata_uid-3_nic.json", metadata +
			"default_gone/nic/metadata.json",
		// this is the copy of a file that somebody removed
		copies + "xpu.opiproject.org_metadata_uid-3_lost.json",
		copies + ".xpu.opiproject.org_metadata_uid-3_nic.json.4711.tmp",
	}

	write(stays...)
	write(goes...)

	// A claim with adminAccess has files, but no Function.
	records, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, records.Close()) })
	must.Succeed(t, records.PutAdminAccess("uid-5",
		journal.AdminAccess{Namespace: "default", Name: "monitor"}))
	for i, claim := range []journal.Claim{
		{Namespace: "default", Name: "net", UID: "uid-1"},
		{Namespace: "default", Name: "again", UID: "uid-4"},
		{}, // of the device plugin
	} {
		must.Succeed(t, records.Put(journal.Attachment{
			Function: function.ID{Address: pci.Address(fmt.Sprintf("0000:3b:00.%d", i))},
			State:    journal.Reserved, Claim: claim,
		}))
	}

	kept := keep.NewCopies(filepath.Join(dir, "cdi"), filepath.Join(dir, copies))
	must.Succeed(t, kept.Adopt(MetadataFiles))
	stays = append(stays, copies+"xpu.opiproject.org_metadata_uid-5_all.json") // made at the start

	for range 2 { // the second call has nothing to remove
		if err := removeLeftovers(filepath.Join(dir, "driver"), filepath.Join(dir, "cdi"), kept,
			records.Claims); err != nil {
			t.Fatal(err)
		}

		var left []string
		err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
			if err == nil && !entry.IsDir() {
				name, _ := filepath.Rel(dir, path)
				left = append(left, name)
			}
			return err
		})

		if err != nil {
			t.Fatal(err)
		}

		slices.Sort(left)
		if want := slices.Sorted(slices.Values(stays)); !slices.Equal(left, want) {
			t.Errorf("left %q, want %q", left, want)
		}
	}

	none := keep.NewCopies(filepath.Join(dir, "nowhere"), filepath.Join(dir, "nowhere else"))
	if err := removeLeftovers(filepath.Join(dir, "nowhere"), filepath.Join(dir, "nowhere"), none,
		records.Claims); err != nil {
		t.Errorf("without directories: %v", err)
	}
}
