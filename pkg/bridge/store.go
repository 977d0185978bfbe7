package bridge

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// openState opens the file that keeps what clients asked for across restarts. Each write is on the disk before it returns.
// The values are messages of the API; only their spec counts, and a status that is TO_BE_DELETED.
func openState(path string) (*bbolt.DB, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: 2 * time.Second})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("state %s: in use, does another opi-bridge run?", path)
	}
	if err != nil {
		return nil, fmt.Errorf("state %s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, noNetworks := tx.CreateBucketIfNotExists([]byte(networkKind.bucket))
		_, noPorts := tx.CreateBucketIfNotExists([]byte(portKind.bucket))
		return errors.Join(noNetworks, noPorts)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("state %s: %w", path, err), db.Close())
	}
	return db, nil
}
