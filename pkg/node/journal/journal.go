// SPDX-License-Identifier: Apache-2.0

// Package journal is the node's durable record of every Function that is not free. A record is
// written before the Function is touched, so that every change to it can be undone, whatever
// happens to the process or the machine.
package journal

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

// schema is the version of the file's content. Fields may be added to the values without a new
// version. A program with a higher schema must migrate files of the last one in [initialize]. If
// programs of the last schema can still use the migrated file, the value says so, "2/1" for
// example, so that an upgrade can be undone.
const schema = 1

const (
	metaBucket        = "meta"
	attachmentsBucket = "attachments"
	lettersBucket     = "deadLetters"
	adminAccessBucket = "sights"
	vfsBucket         = "vfs"
	schemaKey         = "schema"
)

// Journal is one file, which is open in one process at a time. Its methods may be called from
// several goroutines at once. Reads come from memory. A write returns when the data is on the disk,
// or returns an error and has written nothing.
type Journal struct {
	file *boltfile.File
	// writes lets one writer at a time change the file and then memory.
	writes sync.Mutex

	mutex       sync.RWMutex
	attachments map[function.ID]Attachment
	letters     []DeadLetter
	adminAccess map[types.UID]AdminAccess
	vfs         map[pci.Address]int // see [Journal.VFs]
	changes     notify.Signal

	locks keylock.Locks[function.ID]
}

// Records has the methods of a [Journal] that change the owners of Functions. Tests can replace it.
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

// Open opens the file. It creates the file and its directory if they are missing. The error may be
// [boltfile.ErrLocked] or [boltfile.ErrCorrupt].
func Open(path string) (*Journal, error) {
	j := &Journal{
		attachments: map[function.ID]Attachment{}, adminAccess: map[types.UID]AdminAccess{},
		vfs: map[pci.Address]int{},
	}
	complete := false
	file, err := boltfile.Open(path, func(tx *boltfile.Tx) (err error) {
		complete, err = j.load(tx)
		return err
	})
	if errors.Is(err, boltfile.ErrCorrupt) {
		return nil, fmt.Errorf("journal %s: %w; move it away to start with an empty journal",
			path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("journal %s: %w", path, err)
	}

	j.file = file
	if complete {
		return j, nil
	}
	if err := file.Update(initialize); err != nil {
		return nil, fmt.Errorf("journal %s: %w", path, errors.Join(err, file.Close()))
	}

	return j, nil
}

// load reads all records. complete is false if buckets are missing, because the file is new or from
// one of the first versions of the agent.
func (j *Journal) load(tx *boltfile.Tx) (complete bool, err error) {
	if !tx.Has(metaBucket) && !tx.Has(attachmentsBucket) {
		return false, nil
	}
	if !tx.Has(metaBucket) || !tx.Has(attachmentsBucket) {
		return false, fmt.Errorf("%w (a bucket is missing)", boltfile.ErrCorrupt)
	}
	if err := checkSchema(tx.Get(metaBucket, []byte(schemaKey))); err != nil {
		return false, err
	}

	err = cmp.Or(
		tx.ForEach(attachmentsBucket, j.loadAttachment),
		tx.ForEach(lettersBucket, j.loadLetter),
		tx.ForEach(adminAccessBucket, j.loadAdminAccess),
		tx.ForEach(vfsBucket, j.loadVFs),
	)

	return tx.Has(lettersBucket) && tx.Has(adminAccessBucket) && tx.Has(vfsBucket), err
}

func (j *Journal) loadAttachment(key, value []byte) error {
	a, err := decode(key, value)
	if errors.Is(err, errUnknownState) {
		return fmt.Errorf("record %q: %w", key, err)
	}
	if err != nil {
		return fmt.Errorf("%w (record %q: %w)", boltfile.ErrCorrupt, key, err)
	}

	j.attachments[a.Function] = a
	return nil
}

func (j *Journal) loadLetter(key, value []byte) error {
	letter, err := decodeLetter(key, value)
	if err != nil {
		return fmt.Errorf("%w (dead letter %x: %w)", boltfile.ErrCorrupt, key, err)
	}
	j.letters = append(j.letters, letter)
	return nil
}

func (j *Journal) loadAdminAccess(key, value []byte) error {
	var s AdminAccess
	if err := json.Unmarshal(value, &s); err != nil {
		return fmt.Errorf("%w (adminAccess of claim %q: %w)", boltfile.ErrCorrupt, key, err)
	}
	j.adminAccess[types.UID(key)] = s
	return nil
}

// checkSchema accepts the schema of an older program, and the schema of a newer program whose file
// this program can use.
func checkSchema(value []byte) error {
	written, readable, older := strings.Cut(string(value), "/")
	if !older {
		readable = written
	}

	version, err := strconv.Atoi(written)
	oldest, oldestErr := strconv.Atoi(readable)
	switch {
	case err != nil || oldestErr != nil:
		return fmt.Errorf("%w (schema version %q)", boltfile.ErrCorrupt, value)
	case version > schema && oldest > schema:
		return fmt.Errorf("has schema version %d, this program knows %d: a newer agent wrote it; "+
			"go back to that one, end all pods that "+
			"have Functions of this node, and change to this one then", version, schema)
	}

	return nil
}

// initialize creates the missing buckets and the schema.
func initialize(tx *boltfile.Tx) error {
	for _, bucket := range []string{
		metaBucket, attachmentsBucket, lettersBucket, adminAccessBucket, vfsBucket,
	} {
		if err := tx.CreateBucket(bucket); err != nil {
			return err
		}
	}

	if tx.Get(metaBucket, []byte(schemaKey)) != nil {
		return nil // written by this program, or by a newer one
	}
	return tx.Put(metaBucket, []byte(schemaKey), []byte(strconv.Itoa(schema)))
}

// decode decodes a record, and refuses a record that cannot be used.
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

	if a.Quarantine != nil &&
		(a.State != Releasing && a.State != Detaching || !a.RestoredAt.IsZero()) {
		return fmt.Errorf("state %s: quarantine must be empty, also once restoredAt is set",
			a.State)
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
		return fmt.Errorf("state %q: %w", a.State, errUnknownState)
	}

	return nil
}

// errUnknownState is returned for a record of a newer agent. The file is not damaged.
var errUnknownState = errors.New("is unknown to this version of the agent: go back to the " +
	"version that wrote it")

// Close closes the file.
func (j *Journal) Close() error { return j.file.Close() }

// Writable makes a write, and returns an error if it fails, for example because the disk is full or
// gone.
func (j *Journal) Writable() error {
	if err := j.file.Update(func(*boltfile.Tx) error { return nil }); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}

// Put writes an attachment. It replaces the Function's current attachment, if there is one.
func (j *Journal) Put(a Attachment) error {
	return j.write(a.Function, func(tx *boltfile.Tx) error { return putAttachment(tx, a) },
		func() { j.attachments[a.Function] = a })
}

func putAttachment(tx *boltfile.Tx, a Attachment) error {
	if err := a.check(); err != nil {
		return err
	}
	value, err := json.Marshal(a)
	if err != nil {
		return err
	}
	return tx.Put(attachmentsBucket, []byte(a.Function.String()), value)
}

// Delete makes a Function free. Deleting a free Function is no error.
func (j *Journal) Delete(id function.ID) error {
	if _, ok := j.Get(id); !ok {
		return nil
	}
	return j.write(id, func(tx *boltfile.Tx) error {
		return tx.Delete(attachmentsBucket, []byte(id.String()))
	},
		func() { delete(j.attachments, id) })
}

// write changes the file and then memory. There is one writer at a time, so that both change in the
// same order.
func (j *Journal) write(id function.ID, toDisk func(*boltfile.Tx) error, toMemory func()) error {
	j.writes.Lock()
	defer j.writes.Unlock()

	if err := j.file.Update(toDisk); err != nil {
		return fmt.Errorf("journal: Function %s: %w", id, err)
	}

	j.mutex.Lock()
	toMemory()
	j.mutex.Unlock()
	j.changes.Notify()

	return nil
}

// Subscribe returns a channel that receives a value after writes, until ctx ends; see
// [notify.Signal.Subscribe].
func (j *Journal) Subscribe(ctx context.Context) <-chan struct{} { return j.changes.Subscribe(ctx) }

// Get returns the attachment of a Function. ok is false if the Function is free.
func (j *Journal) Get(id function.ID) (a Attachment, ok bool) {
	j.mutex.RLock()
	defer j.mutex.RUnlock()
	a, ok = j.attachments[id]
	return a, ok
}

// All returns all attachments, ordered by Function.
func (j *Journal) All() []Attachment {
	return j.which(func(Attachment) bool { return true })
}

// ByClaim returns the attachments of a claim, ordered by Function. It returns none for the UID "",
// which stands for no claim.
func (j *Journal) ByClaim(uid types.UID) []Attachment {
	return j.which(func(a Attachment) bool { return a.Claim.UID == uid && uid != "" })
}

// ByPod returns the attachments of a pod, ordered by Function. It returns none for the UID "", which
// stands for a pod that is not known.
func (j *Journal) ByPod(uid types.UID) []Attachment {
	return j.which(func(a Attachment) bool { return a.Pod.UID == uid && uid != "" })
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

	slices.SortFunc(list, func(a, b Attachment) int {
		return cmp.Compare(a.Function.String(), b.Function.String())
	})

	return list
}

// Lock gives the caller the exclusive right to change a Function, until it calls unlock, which it
// must do once. It waits for the lock until ctx ends. The lock is not reentrant. Functions have
// independent locks.
func (j *Journal) Lock(ctx context.Context, id function.ID) (unlock func(), err error) {
	unlock, err = j.locks.Lock(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("wait for other work on Function %s: %w", id, err)
	}
	return unlock, nil
}
