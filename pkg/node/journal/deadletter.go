// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
)

// maxLetters is how many dead letters are kept.
const maxLetters = 100

// DeadLetter is a post-delete hook that was given up. It has the name of the hook, the attachment
// for which the hook should have run, without Hooks, the number of attempts, the last error, and
// the time when the hook was given up.
type DeadLetter struct {
	Hook       string     `json:"hook"`
	Attachment Attachment `json:"attachment"`
	Attempts   int        `json:"attempts"`
	Error      string     `json:"error"`
	At         time.Time  `json:"at"`
}

// DeadLetters returns the hooks that were given up, the oldest first. The last 100 are kept.
func (j *Journal) DeadLetters() []DeadLetter {
	j.mutex.RLock()
	defer j.mutex.RUnlock()
	return slices.Clone(j.letters)
}

// GiveUp adds a dead letter, and in the same write replaces the Function's attachment by next.
func (j *Journal) GiveUp(letter DeadLetter, next Attachment) error {
	letter.Attachment.Hooks = nil
	return j.write(next.Function, func(tx *boltfile.Tx) error {
		record, err := json.Marshal(letter)
		if err != nil {
			return err
		}
		if err := appendLetter(tx, record); err != nil {
			return err
		}
		return putAttachment(tx, next)
	}, func() {
		j.attachments[next.Function] = next
		j.letters = append(j.letters, letter)
		j.letters = slices.Delete(j.letters, 0, max(0, len(j.letters)-maxLetters))
	})
}

// appendLetter adds a dead letter, and deletes the oldest one if there are too many. The keys are
// numbers that grow by one.
func appendLetter(tx *boltfile.Tx, record []byte) error {
	number, err := tx.NextSequence(lettersBucket)
	if err != nil {
		return err
	}
	if err := tx.Put(lettersBucket, binary.BigEndian.AppendUint64(nil, number),
		record); err != nil || number <= maxLetters {
		return err
	}
	return tx.Delete(lettersBucket, binary.BigEndian.AppendUint64(nil, number-maxLetters))
}

func decodeLetter(key, value []byte) (DeadLetter, error) {
	var letter DeadLetter
	if len(key) != 8 {
		return DeadLetter{}, fmt.Errorf("key has %d bytes, want 8", len(key))
	}
	if err := json.Unmarshal(value, &letter); err != nil {
		return DeadLetter{}, err
	}
	if err := letter.Attachment.check(); err != nil {
		return DeadLetter{}, fmt.Errorf("attachment: %w", err)
	}

	return letter, nil
}
