// SPDX-License-Identifier: Apache-2.0

package boltfile_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// records are the content of a file by bucket and key. The value of key "" is the bucket's
// sequence.
type records map[string]map[string]string

// pageSize is small so that small files have deep trees. bbolt keeps the page size of an existing
// file.
const pageSize = 1024

// newFile returns an empty file with small pages.
func newFile(t testing.TB) (path string) {
	t.Helper()
	path = filepath.Join(must.MemoryDir(t), "db")
	raw, err := bolt.Open(path, 0o600, &bolt.Options{PageSize: pageSize})
	must.Succeed(t, err)
	must.Succeed(t, raw.Close())
	return path
}

// open opens a file and reads its content, with a time limit.
func open(t testing.TB, path string) (*boltfile.File, records, error) {
	t.Helper()
	type result struct {
		file *boltfile.File
		read records
		err  error
	}

	done := make(chan result, 1)
	go func() {
		read := records{}
		file, err := boltfile.Open(path, func(tx *boltfile.Tx) error { return read.load(tx) })
		done <- result{file, read, err}
	}()

	select {
	case r := <-done:
		return r.file, r.read, r.err
	case <-time.After(20 * time.Second):
		t.Fatalf("%s: does not open within 20 s", path)
		return nil, nil, nil
	}
}

var buckets = []string{"a", "b", "long"}

func (r records) load(tx *boltfile.Tx) error {
	for _, bucket := range buckets {
		if !tx.Has(bucket) {
			continue
		}

		r[bucket] = map[string]string{}
		err := tx.ForEach(bucket, func(key, value []byte) error {
			r[bucket][string(key)] = string(value)
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// change makes a random change to a file and to the expected records.
func (r records) change(tx *boltfile.Tx, random *rand.Rand) error {
	bucket := buckets[random.IntN(len(buckets))]
	if r[bucket] == nil {
		r[bucket] = map[string]string{}
	}

	if err := tx.CreateBucket(bucket); err != nil {
		return err
	}

	key := fmt.Sprintf("%0*d", 1+random.IntN(20), random.IntN(100))
	if random.IntN(3) == 0 {
		delete(r[bucket], key)
		return tx.Delete(bucket, []byte(key))
	}
	if _, err := tx.NextSequence(bucket); err != nil {
		return err
	}

	size := random.IntN(60)
	if bucket == "long" {
		size = random.IntN(3 * pageSize)
	}

	r[bucket][key] = strings.Repeat("x", size) + key
	return tx.Put(bucket, []byte(key), []byte(r[bucket][key]))
}

// newGrownFile returns a file with several branches in each bucket.
func newGrownFile(t testing.TB) (path string, content []byte, want records) {
	t.Helper()
	path, want = newFile(t), records{}
	file, _, err := open(t, path)
	must.Succeed(t, err)
	random := rand.New(rand.NewPCG(3, 4))
	for range 60 {
		must.Succeed(t, file.Update(func(tx *boltfile.Tx) error {
			for range 5 {
				must.Succeed(t, want.change(tx, random))
			}
			return nil
		}))
	}

	must.Succeed(t, file.Close())
	content, err = os.ReadFile(path)
	must.Succeed(t, err)

	return path, content, want
}

// wantRefusedOrSame opens a file with this content. The file must be rejected or have the wanted
// records. It reports whether the file was rejected.
func wantRefusedOrSame(
	t *testing.T, path string, content []byte, want records, what string,
) (refused bool) {
	t.Helper()
	must.Succeed(t, os.WriteFile(path, content, 0o600))
	file, got, err := open(t, path)
	if err != nil {
		if !errors.Is(err, boltfile.ErrCorrupt) {
			t.Fatalf("%s: error %v, want %v", what, err, boltfile.ErrCorrupt)
		}
		return true
	}

	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s: opens with other content: -want +got\n%s", what, diff)
	}

	must.Succeed(t, file.Update(func(tx *boltfile.Tx) error {
		return tx.Put("a", []byte("new"),
			[]byte("value"))
	}))

	must.Succeed(t, file.Close())
	file, got, err = open(t, path)
	if err != nil || got["a"]["new"] != "value" || len(got["a"]) != len(want["a"])+1 {
		t.Fatalf("%s: after a write: %v", what, err)
	}

	must.Succeed(t, file.Close())
	return false
}

// TestFlippedBits checks that a file with a flipped bit is rejected, or has the same records. It
// neither ends the process nor keeps it busy.
func TestFlippedBits(t *testing.T) {
	t.Parallel()
	path, intact, want := newGrownFile(t)
	bits := make([]int, 0, len(intact)*8)
	for bit := range cap(bits) {
		bits = append(bits, bit)
	}

	if !*boltfile.Full {
		rand.New(rand.NewPCG(1, 2)).Shuffle(len(bits), func(i, j int) {
			bits[i], bits[j] = bits[j], bits[i]
		})
		bits = bits[:1500]
	}

	refused := 0
	for _, bit := range bits {
		content := bytes.Clone(intact)
		content[bit/8] ^= 1 << (bit % 8)
		if wantRefusedOrSame(t, path, content, want,
			fmt.Sprintf("page %d, byte %d, bit %d", bit/8/pageSize, bit/8%pageSize, bit%8)) {
			refused++
		}
	}

	if refused < len(bits)/10 {
		t.Errorf("%d of %d were refused", refused, len(bits))
	}

	t.Logf("%d of %d refused", refused, len(bits))
}

// TestLostWrites checks that a page whose last write was lost is detected, although the page is
// intact. If the write of the meta page is lost, the file is valid and has the content before the
// transaction.
func TestLostWrites(t *testing.T) {
	t.Parallel()
	path, before, want := newGrownFile(t)
	file, _, err := open(t, path)
	must.Succeed(t, err)

	must.Succeed(t, file.Update(func(tx *boltfile.Tx) error {
		for key := range want["a"] {
			want["a"][key] = strings.ToUpper(want["a"][key])
			must.Succeed(t, tx.Put("a", []byte(key), []byte(want["a"][key])))
		}
		return nil
	}))

	must.Succeed(t, file.Close())
	after, err := os.ReadFile(path)
	must.Succeed(t, err)

	lost := 0
	for at := 2 * pageSize; at < len(before); at += pageSize {
		old := before[at:][:pageSize]
		if bytes.Equal(old, after[at:][:pageSize]) {
			continue
		}

		lost++
		content := slices.Concat(after[:at], old, after[at+pageSize:])
		if !wantRefusedOrSame(t, path, content, want, fmt.Sprintf("page %d", at/pageSize)) {
			t.Errorf("page %d: its write was lost, and the file is not refused", at/pageSize)
		}
	}

	if lost < 5 {
		t.Errorf("%d pages were written", lost)
	}
}

// TestCutOff checks that a transaction has no effect if only some of its pages reached the disk and
// not the meta page, which is written last.
func TestCutOff(t *testing.T) {
	t.Parallel()
	path, before, want := newGrownFile(t)
	file, _, err := open(t, path)
	must.Succeed(t, err)
	random := rand.New(rand.NewPCG(7, 8))
	must.Succeed(t, file.Update(func(tx *boltfile.Tx) error {
		other := records{}
		for range 20 {
			must.Succeed(t, other.change(tx, random))
		}
		return nil
	}))

	must.Succeed(t, file.Close())
	after, err := os.ReadFile(path)
	must.Succeed(t, err)

	for range 50 {
		content := bytes.Clone(after)
		copy(content, before[:2*pageSize])

		for at := 2 * pageSize; at < len(before); at += pageSize {
			if random.IntN(2) == 0 {
				copy(content[at:][:pageSize], before[at:])
			}
		}

		if wantRefusedOrSame(t, path, content, want, "cut off") {
			t.Error("a transaction that was cut off makes the file corrupt")
		}
	}
}

// TestTruncated checks that a truncated file is rejected.
func TestTruncated(t *testing.T) {
	t.Parallel()
	path, intact, want := newGrownFile(t)
	for size := 1; size < len(intact); size += pageSize / 3 {
		refused := wantRefusedOrSame(t, path, intact[:size], want, fmt.Sprintf("%d bytes", size))
		if !refused && size < 20*pageSize {
			t.Errorf("%d bytes are not refused", size)
		}
	}
}

// TestWhatBboltWrites checks that the file can be opened again after any changes, with the right
// content.
func TestWhatBboltWrites(t *testing.T) {
	t.Parallel()
	path, want := newFile(t), records{}
	random := rand.New(rand.NewPCG(5, 6))
	rounds := 150
	if *boltfile.Full {
		rounds = 10000
	}

	for range rounds {
		file, got, err := open(t, path)
		must.Succeed(t, err)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("-want +got\n%s", diff)
		}

		for range random.IntN(6) {
			must.Succeed(t, file.Update(func(tx *boltfile.Tx) error {
				for range random.IntN(40) {
					must.Succeed(t, want.change(tx, random))
				}
				return nil
			}))
		}

		must.Succeed(t, file.Close())
	}
}

// TestOlderProgram checks that a program without seals can use the file, that its changes are
// accepted, and that damage is still detected.
func TestOlderProgram(t *testing.T) {
	t.Parallel()
	path, _, want := newGrownFile(t)
	for round := range 3 {
		raw, err := bolt.Open(path, 0o600, nil)
		must.Succeed(t, err)
		must.Succeed(t, raw.Update(func(tx *bolt.Tx) error {
			return tx.Bucket([]byte("b")).Put([]byte("older"), fmt.Append(nil, round))
		}))
		must.Succeed(t, raw.Close())
		want["b"]["older"] = fmt.Sprint(round)

		for range 2 { // the first one seals the file
			file, got, err := open(t, path)
			must.Succeed(t, err)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			must.Succeed(t, file.Update(func(*boltfile.Tx) error { return nil }))
			must.Succeed(t, file.Close())
		}
	}

	content, err := os.ReadFile(path)
	must.Succeed(t, err)
	content = bytes.ReplaceAll(content, []byte("older2"), []byte("older3"))
	if !wantRefusedOrSame(t, path, content, want, "a value") {
		t.Error("a file that was sealed again is not checked")
	}
}

// TestFailedUpdate checks that a failed change has no effect.
func TestFailedUpdate(t *testing.T) {
	t.Parallel()
	path, _, want := newGrownFile(t)
	file, _, err := open(t, path)
	must.Succeed(t, err)
	failure := errors.New("no")
	err = file.Update(func(tx *boltfile.Tx) error {
		must.Succeed(t, tx.Put("a", []byte("k"), []byte("v")))
		return failure
	})
	if !errors.Is(err, failure) {
		t.Errorf("error %v", err)
	}

	must.Succeed(t, file.Update(func(tx *boltfile.Tx) error {
		want["a"]["twice"] = "2"
		must.Succeed(t, tx.Put("a", []byte("twice"), []byte("1")))
		must.Succeed(t, tx.Put("a", []byte("empty"), nil))
		must.Succeed(t, tx.Delete("a", []byte("empty")))
		must.Succeed(t, tx.Delete("none", []byte("k")))
		if err := tx.Put("none", []byte("k"), nil); err == nil {
			t.Error("a bucket that is missing takes a record")
		}
		if _, err := tx.NextSequence("none"); err == nil {
			t.Error("a bucket that is missing has a sequence")
		}

		return tx.Put("a", []byte("twice"), []byte("2"))
	}))

	must.Succeed(t, file.Close())

	file, got, err := open(t, path)
	must.Succeed(t, err)
	defer file.Close()

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestLocked(t *testing.T) {
	t.Parallel()
	path := newFile(t)
	file, _, err := open(t, path)
	must.Succeed(t, err)
	if _, _, err := open(t, path); !errors.Is(err, boltfile.ErrLocked) {
		t.Errorf("error %v, want %v", err, boltfile.ErrLocked)
	}

	must.Succeed(t, file.Close())
	file, _, err = open(t, path)
	must.Succeed(t, err)
	must.Succeed(t, file.Close())
}

// TestLoadFails checks that a file which load rejects is closed unchanged.
func TestLoadFails(t *testing.T) {
	t.Parallel()
	path, before, _ := newGrownFile(t)
	failure := errors.New("no")
	if _, err := boltfile.Open(path, func(*boltfile.Tx) error {
		return failure
	}); !errors.Is(err, failure) {
		t.Errorf("error %v, want %v", err, failure)
	}

	after, err := os.ReadFile(path)
	must.Succeed(t, err)
	if !bytes.Equal(before, after) {
		t.Error("the file was changed")
	}

	file, _, err := open(t, path)
	must.Succeed(t, err)
	must.Succeed(t, file.Close())
}
