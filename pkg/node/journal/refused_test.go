package journal

import (
	"errors"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// TestRefusedWrites: what bbolt does not write is not taken for written.
func TestRefusedWrites(t *testing.T) {
	db, err := bolt.Open(filepath.Join(t.TempDir(), "db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucket([]byte("letters"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	err = db.View(func(tx *bolt.Tx) error {
		if err := initialize(tx); !errors.Is(err, bolterrors.ErrTxNotWritable) {
			t.Errorf("a file that cannot be written is initialized: %v", err)
		}
		if err := appendLetter(tx.Bucket([]byte("letters")), []byte("{}")); !errors.Is(err, bolterrors.ErrTxNotWritable) {
			t.Errorf("a dead letter is kept in a file that cannot be written: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
