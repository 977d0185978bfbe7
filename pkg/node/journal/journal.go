// Package journal is the node's durable record of every Function that is not free. It is written before anything is
// touched, so that whatever happens to the process or the machine, what was done to a Function can be undone.
package journal

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

const (
	schema      = 1           // the version of what is in the file; fields may be added to the values without a new one
	lockTimeout = time.Second // for another process to give the file up
)

var (
	metaBucket        = []byte("meta")
	attachmentsBucket = []byte("attachments")
	lettersBucket     = []byte("deadLetters")
	sightsBucket      = []byte("sights")
	schemaKey         = []byte("schema")
)

var (
	// ErrLocked is returned if another process has the file open.
	ErrLocked = errors.New("is in use by another process; is another agent running?")
	// ErrCorrupt is returned for a file that cannot be understood. What it knew is lost when it is moved away.
	ErrCorrupt = errors.New("is corrupt; move it away to start with an empty journal")
)

// Journal is one file, open in one process at a time. Its methods may be called by several goroutines at once. Reads come
// from memory. A write returns when it is on the disk, or an error if nothing was written.
type Journal struct {
	db     *bolt.DB
	writes sync.Mutex // for one writer at a time, until its change is in memory too

	mutex       sync.RWMutex
	attachments map[function.ID]Attachment
	letters     []DeadLetter
	sights      map[types.UID]Sight
	changes     notify.Signal

	locks keylock.Locks[function.ID]
}

// Records are the methods of a [Journal] by which Functions change hands. A test may stand in between.
type Records interface {
	Get(function.ID) (a Attachment, ok bool)
	All() []Attachment
	ByPod(types.UID) []Attachment
	Put(Attachment) error
	Delete(function.ID) error
	GiveUp(letter DeadLetter, next Attachment) error
	Lock(context.Context, function.ID) (unlock func(), err error)
	Subscribe(context.Context) <-chan struct{}
}

// Open opens the file, and makes it with its directory if it is missing. The error may be [ErrLocked] or [ErrCorrupt].
func Open(path string) (*Journal, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	j := &Journal{attachments: map[function.ID]Attachment{}, sights: map[types.UID]Sight{}}
	if err := j.open(path); err != nil {
		if j.db != nil {
			j.db.Close()
		}
		return nil, fmt.Errorf("journal %s: %w", path, err)
	}
	return j, nil
}

// open turns a panic into an error, as bbolt trusts the pages of its file, and reads a truncated one beyond its end.
func (j *Journal) open(path string) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	var file *os.File
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w (%v)", ErrCorrupt, r)
			if j.db == nil && file != nil {
				// bbolt leaves its mapping behind, and that keeps the lock although the file is closed.
				_ = unix.Flock(int(file.Fd()), unix.LOCK_UN)
				file.Close()
			}
		}
	}()
	// The list of free pages stays in the file: bbolt would look for them in a goroutine of its own, where a damaged page
	// cannot be recovered from.
	j.db, err = bolt.Open(path, 0o600, &bolt.Options{
		Timeout: lockTimeout,
		OpenFile: func(name string, flag int, mode os.FileMode) (_ *os.File, err error) {
			file, err = os.OpenFile(name, flag, mode)
			return file, err
		},
	})
	switch {
	case errors.Is(err, bolterrors.ErrTimeout):
		return ErrLocked
	case errors.Is(err, bolterrors.ErrInvalid), errors.Is(err, bolterrors.ErrChecksum), errors.Is(err, bolterrors.ErrVersionMismatch):
		return fmt.Errorf("%w (%w)", ErrCorrupt, err)
	case err != nil:
		return err
	}
	if err := j.load(); err != nil {
		return err
	}
	return syncDirectory(filepath.Dir(path)) // the file may be new
}

// syncDirectory makes the name of a new file durable, which syncing the file does not.
func syncDirectory(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

func (j *Journal) load() error {
	complete := false
	err := j.db.View(func(tx *bolt.Tx) error {
		meta, attachments, letters := tx.Bucket(metaBucket), tx.Bucket(attachmentsBucket), tx.Bucket(lettersBucket)
		if meta == nil && attachments == nil {
			return nil // the file is new
		}
		if meta == nil || attachments == nil {
			return fmt.Errorf("%w (a bucket is missing)", ErrCorrupt)
		}
		if err := checkSchema(meta.Get(schemaKey)); err != nil {
			return err
		}
		err := attachments.ForEach(func(key, value []byte) error {
			a, err := decode(key, value)
			if err != nil {
				return fmt.Errorf("%w (record %q: %w)", ErrCorrupt, key, err)
			}
			j.attachments[a.Function] = a
			return nil
		})
		sights := tx.Bucket(sightsBucket)
		complete = letters != nil && sights != nil // the first versions of the agent had none
		if err == nil && letters != nil {
			err = letters.ForEach(func(key, value []byte) error {
				letter, err := decodeLetter(key, value)
				if err != nil {
					return fmt.Errorf("%w (dead letter %x: %w)", ErrCorrupt, key, err)
				}
				j.letters = append(j.letters, letter)
				return nil
			})
		}
		if err == nil && sights != nil {
			err = sights.ForEach(func(key, value []byte) error {
				var s Sight
				if err := json.Unmarshal(value, &s); err != nil {
					return fmt.Errorf("%w (sight %q: %w)", ErrCorrupt, key, err)
				}
				j.sights[types.UID(key)] = s
				return nil
			})
		}
		if err != nil {
			return err
		}
		// This comes after all pages were seen here, as the library looks at them in a goroutine of its own. That one goes on
		// reading until the channel is empty, even in a file that is closed.
		for damage := range tx.Check() {
			err = cmp.Or(err, fmt.Errorf("%w (%w)", ErrCorrupt, damage))
		}
		return err
	})
	if err != nil || complete {
		return err
	}
	return j.db.Update(initialize)
}

func checkSchema(value []byte) error {
	version, err := strconv.Atoi(string(value))
	switch {
	case err != nil:
		return fmt.Errorf("%w (schema version %q)", ErrCorrupt, value)
	case version != schema:
		return fmt.Errorf("has schema version %d, this program knows %d: another version of the agent wrote it", version, schema)
	}
	return nil
}

// initialize makes what the file lacks.
func initialize(tx *bolt.Tx) error {
	for _, bucket := range [][]byte{metaBucket, attachmentsBucket, lettersBucket, sightsBucket} {
		if _, err := tx.CreateBucketIfNotExists(bucket); err != nil {
			return err
		}
	}
	return tx.Bucket(metaBucket).Put(schemaKey, []byte(strconv.Itoa(schema)))
}

// decode reads a record and refuses one that could not be acted on.
func decode(key, value []byte) (Attachment, error) {
	var a Attachment
	if err := json.Unmarshal(value, &a); err != nil {
		return Attachment{}, err
	}
	if !bytes.Equal(key, []byte(a.Function.String())) {
		return Attachment{}, fmt.Errorf("is about Function %q", a.Function)
	}
	return a, a.check()
}

func (a Attachment) check() error {
	if a.Function == (function.ID{}) {
		return errors.New("function: is empty")
	}
	if a.State != Releasing && (!a.RestoredAt.IsZero() || a.Hooks != nil) {
		return fmt.Errorf("state %s: restoredAt and hooks must be empty", a.State)
	}
	switch a.State {
	case Reserved, Detaching, Releasing:
	case Attaching:
		if a.Before == nil {
			return fmt.Errorf("state %s: before must be there", a.State)
		}
	case Attached, Lost, Reattaching:
		if a.Before == nil || a.Observed == nil {
			return fmt.Errorf("state %s: before and observed must be there", a.State)
		}
	default:
		return fmt.Errorf("state %q: is unknown", a.State)
	}
	return nil
}

// Close gives the file up.
func (j *Journal) Close() error { return j.db.Close() }

// Writable writes, and returns an error if that fails: the disk is full or gone.
func (j *Journal) Writable() error {
	if err := j.db.Update(func(*bolt.Tx) error { return nil }); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}

// Put writes an attachment in place of the one that the Function has, if any.
func (j *Journal) Put(a Attachment) error {
	return j.write(a.Function, func(tx *bolt.Tx) error { return putAttachment(tx, a) },
		func() { j.attachments[a.Function] = a })
}

func putAttachment(tx *bolt.Tx, a Attachment) error {
	if err := a.check(); err != nil {
		return err
	}
	value, err := json.Marshal(a)
	if err != nil {
		return err
	}
	return tx.Bucket(attachmentsBucket).Put([]byte(a.Function.String()), value)
}

// Delete makes a Function free. It is no error if it is.
func (j *Journal) Delete(id function.ID) error {
	if _, ok := j.Get(id); !ok {
		return nil
	}
	return j.write(id, func(tx *bolt.Tx) error { return tx.Bucket(attachmentsBucket).Delete([]byte(id.String())) },
		func() { delete(j.attachments, id) })
}

// write changes the disk and then memory. It has one writer at a time, so that both change in the same order.
func (j *Journal) write(id function.ID, toDisk func(*bolt.Tx) error, toMemory func()) error {
	j.writes.Lock()
	defer j.writes.Unlock()
	if err := j.db.Update(toDisk); err != nil {
		return fmt.Errorf("journal: Function %s: %w", id, err)
	}
	j.mutex.Lock()
	toMemory()
	j.mutex.Unlock()
	j.changes.Notify()
	return nil
}

// Subscribe returns a channel that receives a value after writes, until ctx ends; see [notify.Signal.Subscribe].
func (j *Journal) Subscribe(ctx context.Context) <-chan struct{} { return j.changes.Subscribe(ctx) }

// Get is the attachment of a Function; ok is false for one that is free.
func (j *Journal) Get(id function.ID) (a Attachment, ok bool) {
	j.mutex.RLock()
	defer j.mutex.RUnlock()
	a, ok = j.attachments[id]
	return a, ok
}

// All are the attachments, ordered by Function.
func (j *Journal) All() []Attachment {
	return j.which(func(Attachment) bool { return true })
}

// ByClaim are the attachments of a claim, ordered by Function.
func (j *Journal) ByClaim(uid types.UID) []Attachment {
	return j.which(func(a Attachment) bool { return a.Claim.UID == uid })
}

// ByPod are the attachments of a pod, ordered by Function.
func (j *Journal) ByPod(uid types.UID) []Attachment {
	return j.which(func(a Attachment) bool { return a.Pod.UID == uid })
}

func (j *Journal) which(match func(Attachment) bool) []Attachment {
	j.mutex.RLock()
	defer j.mutex.RUnlock()
	var list []Attachment
	for _, a := range j.attachments {
		if match(a) {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, func(a, b Attachment) int { return cmp.Compare(a.Function.String(), b.Function.String()) })
	return list
}

// Lock makes the caller the only one to change a Function until it calls unlock, once. It waits for the lock until ctx
// ends. It is not reentrant. Functions are independent of each other.
func (j *Journal) Lock(ctx context.Context, id function.ID) (unlock func(), err error) {
	unlock, err = j.locks.Lock(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("wait for other work on Function %s: %w", id, err)
	}
	return unlock, nil
}
