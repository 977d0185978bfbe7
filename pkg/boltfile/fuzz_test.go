package boltfile

import (
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// FuzzCheck: whatever a file has, check ends; and what it accepts, bbolt can use.
func FuzzCheck(f *testing.F) {
	path := filepath.Join(f.TempDir(), "db")
	raw, err := bolt.Open(path, 0o600, &bolt.Options{PageSize: minPage})
	must.Succeed(f, err)
	must.Succeed(f, raw.Close())
	file, err := Open(path, func(*Tx) error { return nil })
	must.Succeed(f, err)
	for n := range 40 {
		must.Succeed(f, file.Update(func(tx *Tx) error {
			must.Succeed(f, tx.CreateBucket("bucket"))
			return tx.Put("bucket", fmt.Append(nil, "key", n), make([]byte, 40))
		}))
	}
	must.Succeed(f, file.Close())
	content, err := os.ReadFile(path)
	must.Succeed(f, err)
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

// makeMetasValid writes the checksums of the meta pages, so that damage gets past them.
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
