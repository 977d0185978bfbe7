// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"path/filepath"
	"testing"

	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestRefusedWrites: a write that bbolt refuses is an error.
func TestRefusedWrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	refuse := func(tx *boltfile.Tx) error { // in a transaction that cannot write
		if err := initialize(tx); !errors.Is(err, bolterrors.ErrTxNotWritable) {
			t.Errorf("a file that cannot be written is initialized: %v", err)
		}
		return nil
	}

	file, err := boltfile.Open(path, refuse)
	must.Succeed(t, err)
	must.Succeed(t, file.Update(func(tx *boltfile.Tx) error {
		return tx.CreateBucket(lettersBucket)
	}))
	must.Succeed(t, file.Close())

	file, err = boltfile.Open(path, func(tx *boltfile.Tx) error {
		if err := appendLetter(tx, []byte("{}")); !errors.Is(err, bolterrors.ErrTxNotWritable) {
			t.Errorf("a dead letter is kept in a file that cannot be written: %v", err)
		}
		return nil
	})

	must.Succeed(t, err)
	must.Succeed(t, file.Close())
}
