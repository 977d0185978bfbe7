// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

func TestWritable(t *testing.T) {
	j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Writable(); err != nil {
		t.Error(err)
	}

	j.Close()
	if err := j.Writable(); err == nil {
		t.Error("a closed journal is writable")
	}
}
