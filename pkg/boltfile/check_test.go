// SPDX-License-Identifier: Apache-2.0

package boltfile

import (
	"flag"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// Full is exported for package boltfile_test.
var Full = flag.Bool("full", false, "flip each bit, and not only some of them")

// smallFile returns the content of a file with branches, and with buckets inside a page.
func smallFile(t testing.TB) []byte {
	t.Helper()
	path := filepath.Join(must.MemoryDir(t), "db")
	raw, err := bolt.Open(path, 0o600, &bolt.Options{PageSize: minPage})
	must.Succeed(t, err)
	must.Succeed(t, raw.Close())
	file, err := Open(path, func(*Tx) error { return nil })
	must.Succeed(t, err)

	for n := range 60 {
		must.Succeed(t, file.Update(func(tx *Tx) error {
			must.Succeed(t, tx.CreateBucket("bucket"))
			must.Succeed(t, tx.CreateBucket("small"))
			must.Succeed(t, tx.Put("small", []byte{byte(n % 3)}, []byte{1}))
			_, err := tx.NextSequence("small")
			must.Succeed(t, err)
			return tx.Put("bucket", fmt.Append(nil, "key", n), make([]byte, 40))
		}))
	}

	must.Succeed(t, file.Close())
	content, err := os.ReadFile(path)
	must.Succeed(t, err)

	return content
}

// TestEveryBit flips each bit of a file, and checks that the file is rejected or the bit is in none
// of its records.
func TestEveryBit(t *testing.T) {
	t.Parallel()
	content := smallFile(t)
	_, last, err := checkMetas(content)
	must.Succeed(t, err)
	content = content[:last.pages*minPage]
	want, err := check(content)
	must.Succeed(t, err)
	if !want.sealed {
		t.Error("the file has no seal")
	}

	step := 7 // an odd step, which meets each bit of a byte
	if *Full {
		step = 1
	}

	refused, tried := 0, 0
	for bit := 0; bit < len(content)*8; bit += step {
		tried++
		content[bit/8] ^= 1 << (bit % 8)
		got, err := check(content)
		content[bit/8] ^= 1 << (bit % 8)

		if err != nil {
			refused++
		} else if got.sum != want.sum {
			t.Fatalf("page %d, byte %d, bit %d: accepted with other records", bit/8/minPage,
				bit/8%minPage, bit%8)
		}
	}

	t.Logf("%d of %d refused", refused, tried)
	if refused < tried/10 {
		t.Error("that are too few")
	}
}

// FuzzCheck checks that check ends for any content, and that bbolt can use what it accepts.
func FuzzCheck(f *testing.F) {
	content := smallFile(f)
	f.Add(content, false)
	f.Add(content, true)
	f.Add([]byte{}, true)

	f.Fuzz(func(t *testing.T, data []byte, valid bool) {
		if valid {
			makeMetasValid(data)
		}

		if _, err := check(data); err != nil {
			return
		}

		path := filepath.Join(must.MemoryDir(t), "db")
		must.Succeed(t, os.WriteFile(path, data, 0o600))

		read := func(tx *Tx) error {
			return tx.tx.ForEach(func(name []byte, b *bolt.Bucket) error {
				return b.ForEach(func(_, _ []byte) error { return nil })
			})
		}

		for range 2 {
			file, err := Open(path, read)
			must.Succeed(t, err)
			must.Succeed(t, file.Update(func(tx *Tx) error {
				must.Succeed(t, tx.CreateBucket("another"))
				return tx.Put("another", []byte("key"), make([]byte, 2000))
			}))
			must.Succeed(t, file.Close())
		}
	})
}

// makeMetasValid updates the checksums of the meta pages, so that other damage is reached.
func makeMetasValid(data []byte) {
	for _, at := range []int{headerSize, minPage + headerSize} {
		if len(data) < at+metaSize {
			return
		}
		b := data[at:][:metaSize]
		sum := fnv.New64a()
		sum.Write(b[:metaSize-8])
		order.PutUint64(b[metaSize-8:], sum.Sum64())
	}
}
