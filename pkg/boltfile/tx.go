// SPDX-License-Identifier: Apache-2.0

package boltfile

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// Tx is one transaction. The records are in buckets, which have names. Slices that Tx returns hold
// until the transaction ends, and must not be changed. A Tx is for one goroutine.
type Tx struct {
	tx  *bolt.Tx
	sum uint64 // of the records, as far as the transaction has changed them
}

// Has says whether there is a bucket.
func (t *Tx) Has(bucket string) bool { return t.tx.Bucket([]byte(bucket)) != nil }

// CreateBucket makes a bucket that is missing.
func (t *Tx) CreateBucket(bucket string) error {
	if t.Has(bucket) {
		return nil
	}
	if _, err := t.tx.CreateBucket([]byte(bucket)); err != nil {
		return fmt.Errorf("bucket %s: %w", bucket, err)
	}
	t.sum += sumOfBucket(bucket, 0)
	return nil
}

// Get is the value of a key, nil if there is none.
func (t *Tx) Get(bucket string, key []byte) []byte {
	if b := t.tx.Bucket([]byte(bucket)); b != nil {
		return b.Get(key)
	}
	return nil
}

// ForEach calls f for each record of a bucket, ordered by key, until f returns an error. A bucket
// that is missing has none.
func (t *Tx) ForEach(bucket string, f func(key, value []byte) error) error {
	if b := t.tx.Bucket([]byte(bucket)); b != nil {
		return b.ForEach(f)
	}
	return nil
}

// Put writes a record in place of the one that the key has, if any.
func (t *Tx) Put(bucket string, key, value []byte) error {
	b := t.tx.Bucket([]byte(bucket))
	if b == nil {
		return fmt.Errorf("bucket %s: %w", bucket, bolterrors.ErrBucketNotFound)
	}

	if value == nil {
		value = []byte{} // which Get tells from a key that is missing
	}

	sum := t.sum + sumOf(bucket, key, value)
	if before := b.Get(key); before != nil {
		sum -= sumOf(bucket, key, before)
	}

	if err := b.Put(key, value); err != nil {
		return fmt.Errorf("bucket %s: %w", bucket, err)
	}

	t.sum = sum
	return nil
}

// Delete deletes a record. It is no error if there is none.
func (t *Tx) Delete(bucket string, key []byte) error {
	before := t.Get(bucket, key)
	if before == nil {
		return nil
	}

	sum := t.sum - sumOf(bucket, key, before)
	if err := t.tx.Bucket([]byte(bucket)).Delete(key); err != nil {
		return fmt.Errorf("bucket %s: %w", bucket, err)
	}

	t.sum = sum
	return nil
}

// NextSequence returns a number that the bucket has not returned before, which is the last one and
// 1.
func (t *Tx) NextSequence(bucket string) (uint64, error) {
	b := t.tx.Bucket([]byte(bucket))
	if b == nil {
		return 0, fmt.Errorf("bucket %s: %w", bucket, bolterrors.ErrBucketNotFound)
	}

	before := b.Sequence()
	number, err := b.NextSequence()
	if err != nil {
		return 0, fmt.Errorf("bucket %s: %w", bucket, err)
	}

	t.sum += sumOfBucket(bucket, number) - sumOfBucket(bucket, before)
	return number, nil
}

// sumOf is what a record adds to the sum of all records, modulo 2^64. The sum does not depend on
// their order, so that a transaction computes it from what it changes. The hash is a cryptographic
// one because the differences of several records must not cancel each other, as they would with a
// CRC.
func sumOf(bucket string, key, value []byte) uint64 {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(bucket), key, value} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write(part)
	}
	return binary.BigEndian.Uint64(h.Sum(nil))
}

// sumOfBucket is what a bucket adds to the sum, without its records. A bucket with an empty name
// does not exist in bbolt.
func sumOfBucket(bucket string, sequence uint64) uint64 {
	return sumOf("", []byte(bucket), binary.BigEndian.AppendUint64(nil, sequence))
}

// seal is the sum of all records, with the transaction that wrote them. A program without seals
// leaves it as it is and raises the file's number of transactions, so that the seal is seen not to
// be about its records.
type seal struct{ transaction, sum uint64 }

// The seal is the one record of its bucket, and not in the sum.
const (
	sealBucket = "seal"
	sealKey    = "sum"
)

// errNoSeal is returned for a file that has none: it is new, or older than seals.
var errNoSeal = errors.New("has no seal")

func (s seal) bytes() []byte {
	b := binary.BigEndian.AppendUint64(nil, s.transaction)
	b = binary.BigEndian.AppendUint64(b, s.sum)
	return binary.BigEndian.AppendUint64(b, sumOf(sealBucket, []byte(sealKey), b))
}

func parseSeal(b []byte) (seal, error) {
	if b == nil {
		return seal{}, errNoSeal
	}
	if len(b) != 24 {
		return seal{}, fmt.Errorf("the seal has %d bytes, want 24", len(b))
	}

	s := seal{transaction: binary.BigEndian.Uint64(b), sum: binary.BigEndian.Uint64(b[8:])}
	if !bytes.Equal(b, s.bytes()) {
		return seal{}, errors.New("the seal is broken")
	}

	return s, nil
}

func readSeal(tx *bolt.Tx) (seal, error) {
	b := tx.Bucket([]byte(sealBucket))
	if b == nil {
		return seal{}, errNoSeal
	}
	return parseSeal(b.Get([]byte(sealKey)))
}

func (s seal) write(tx *bolt.Tx) error {
	b, err := tx.CreateBucketIfNotExists([]byte(sealBucket))
	if err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	if err := b.Put([]byte(sealKey), s.bytes()); err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	return nil
}
