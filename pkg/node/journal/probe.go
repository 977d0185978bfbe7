package journal

import (
	"fmt"

	bolt "go.etcd.io/bbolt"
)

// Writable is an error where nothing could be written down now: the disk is full or gone. It writes to find out.
func (j *Journal) Writable() error {
	if err := j.db.Update(func(*bolt.Tx) error { return nil }); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}
