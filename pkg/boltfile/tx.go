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

// Tx is a transaction. Records are in named buckets. Slices that a Tx returns are valid until the
// transaction ends, and must not be changed. A Tx is not safe for concurrent use.
type Tx struct {
	tx  *bolt.Tx
	sum uint64 // of the records, including the transaction's changes
}

// Has reports whether the bucket exists.
func (t *Tx) Has(bucket string) bool { return t.tx.Bucket([]byte(bucket)) != nil }

// CreateBucket creates the bucket if it does not exist.
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

// Get returns the value of a key, or nil if there is none.
func (t *Tx) Get(bucket string, key []byte) []byte {
	if b := t.tx.Bucket([]byte(bucket)); b != nil {
		return b.Get(key)
	}
	return nil
}

// ForEach calls f for each record of a bucket in the order of keys, until f returns an error. A
// missing bucket has no records.
func (t *Tx) ForEach(bucket string, f func(key, value []byte) error) error {
	if b := t.tx.Bucket([]byte(bucket)); b != nil {
		return b.ForEach(f)
	}
	return nil
}

// Put writes a record, and replaces an existing one with the key.
func (t *Tx) Put(bucket string, key, value []byte) error {
	b := t.tx.Bucket([]byte(bucket))
	if b == nil {
		return fmt.Errorf("bucket %s: %w", bucket, bolterrors.ErrBucketNotFound)
	}

	if value == nil {
		value = []byte{} // Get distinguishes it from a missing key
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

// Delete deletes a record. A missing record is no error.
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

// NextSequence returns the next number of the bucket's sequence, which starts at 1.
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

// sumOf returns what a record adds to the checksum of all records, modulo 2^64. The checksum does
// not depend on the order of records, so a transaction can update it from its changes. The hash is
// cryptographic, because the differences of several records must not cancel each other, as they
// could with a CRC.
func sumOf(bucket string, key, value []byte) uint64 {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(bucket), key, value} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write(part)
	}
	return binary.BigEndian.Uint64(h.Sum(nil))
}

// sumOfBucket returns what a bucket adds to the checksum, apart from its records. It uses the empty
// bucket name, which bbolt does not allow.
func sumOfBucket(bucket string, sequence uint64) uint64 {
	return sumOf("", []byte(bucket), binary.BigEndian.AppendUint64(nil, sequence))
}

// seal is the checksum of all records, with the transaction that wrote them. A program without
// seals leaves the seal unchanged and raises the file's transaction number, which shows that the
// seal is outdated.
type seal struct{ transaction, sum uint64 }

// The seal is the only record of its bucket, and is not part of the checksum.
const (
	sealBucket = "seal"
	sealKey    = "sum"
)

// errNoSeal is returned for a file without a seal: a new file, or one from before seals existed.
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
