// SPDX-License-Identifier: Apache-2.0

package boltfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
)

// The file format is version 2 (go.etcd.io/bbolt, internal/common). Numbers have the machine's byte
// order. Pages 0 and 1 are meta pages, which transactions write alternately. The other pages are
// branches and leaves of trees, the list of free pages, or free.
//
//	page:    id u64, kind u16, count u16, further pages that belong to this one u32
//	meta:    magic u32, version u32, page size u32, flags u32, root page u64, sequence u64,
//	         page of the free list u64, number of pages u64, transaction u64,
//	         FNV-1a of all before u64
//	branch:  per element: offset of the key from the element u32, length of the key u32, page u64;
//	         and then the keys
//	leaf:    per element: flags u32, offset of the key from the element u32, length of key u32 and
//	         value u32; and then the keys, each with its value
//	bucket:  root page u64, sequence u64; and if the root page is 0, a leaf within the value
const (
	headerSize  = 16
	elementSize = 16
	metaSize    = 64
	bucketSize  = 16

	kindBranch = 0x01
	kindLeaf   = 0x02
	kindMeta   = 0x04
	kindFree   = 0x10

	minPage = 1 << 10 // bytes
	maxPage = 1 << 24

	magic      = 0xED0CDAED
	version    = 2
	bucketFlag = 1      // of a leaf's element
	manyFree   = 0xFFFF // a count of free pages that does not fit, so that it precedes them

	// The depth of a tree is the logarithm of its size. The limit bounds the recursion.
	maxDepth = 64
)

var order = binary.NativeEndian

// contents describes a file's content apart from the records. sealed is set if sum was compared
// with the seal.
type contents struct {
	sum    uint64
	sealed bool
}

// check reads a whole file without trusting it. It returns an error unless bbolt can use the file,
// now and after further writes: both meta pages are valid, each page is either used once or free,
// keys and values are contiguous in their page, keys are in order, and a branch has the first key
// of each of its pages. If the last transaction wrote a seal, the records must match it.
//
// An invalid meta page counts as damage too. bbolt would use the other one, which is the file
// before the last transaction. An interrupted write does not make a meta page invalid, because its
// significant part is in one sector of the disk.
func check(data []byte) (contents, error) {
	pageSize, m, err := checkMetas(data)
	if err != nil {
		return contents{}, err
	}

	c := checker{data: data, pageSize: pageSize, used: make([]bool, m.pages)}
	if err := c.walk(m); err != nil {
		return contents{}, err
	}

	return c.compare(m.transaction)
}

type meta struct{ root, free, pages, transaction uint64 }

// checkMetas returns the page size in bytes, and the meta page of the last transaction.
func checkMetas(data []byte) (pageSize uint64, last meta, err error) {
	if len(data) < headerSize+metaSize {
		return 0, meta{}, fmt.Errorf("has %d bytes only", len(data))
	}

	pageSize = uint64(order.Uint32(data[headerSize+8:]))
	if pageSize < minPage || pageSize > maxPage || pageSize&(pageSize-1) != 0 {
		return 0, meta{}, fmt.Errorf("meta page 0: page size %d", pageSize)
	}

	for id := range uint64(2) {
		m, err := checkMeta(data, pageSize, id)
		if err != nil {
			return 0, meta{}, fmt.Errorf("meta page %d: %w", id, err)
		}
		if id == 0 || m.transaction > last.transaction {
			last = m
		}
	}

	if last.pages < 2 || last.pages > uint64(len(data))/pageSize {
		return 0, meta{}, fmt.Errorf("has %d bytes, want %d pages of %d", len(data),
			last.pages, pageSize)
	}

	return pageSize, last, nil
}

func checkMeta(data []byte, pageSize, id uint64) (meta, error) {
	if uint64(len(data)) < (id+1)*pageSize {
		return meta{}, errors.New("is missing")
	}

	page := data[id*pageSize:]
	b := page[headerSize:][:metaSize]
	sum := fnv.New64a()
	sum.Write(b[:metaSize-8])

	switch {
	case order.Uint64(page) != id || order.Uint16(page[8:]) != kindMeta:
		return meta{}, errors.New("is not a meta page")
	case order.Uint32(b) != magic:
		return meta{}, errors.New("is not of bbolt")
	case order.Uint32(b[4:]) != version:
		return meta{}, fmt.Errorf("format %d, want %d", order.Uint32(b[4:]), version)
	case order.Uint64(b[56:]) != sum.Sum64():
		return meta{}, errors.New("checksum is wrong")
	case uint64(order.Uint32(b[8:])) != pageSize:
		return meta{}, errors.New("page size differs from the other one")
	}

	return meta{
		root: order.Uint64(b[16:]), free: order.Uint64(b[32:]),
		pages: order.Uint64(b[40:]), transaction: order.Uint64(b[48:]),
	}, nil
}

// checker reads the pages of a file.
type checker struct {
	data     []byte
	pageSize uint64
	used     []bool // by page: part of a tree, or free

	sum  uint64 // of the records so far
	seal []byte // nil if none was found so far
}

func (c *checker) walk(m meta) error {
	c.used[0], c.used[1] = true, true
	free, err := c.claimPage(m.free)
	if err != nil {
		return fmt.Errorf("list of free pages: %w", err)
	}
	if err := c.markFree(free); err != nil {
		return fmt.Errorf("list of free pages: %w", err)
	}
	if _, err := c.tree("", m.root, nil, 0); err != nil {
		return err
	}

	for id, used := range c.used {
		if !used {
			return fmt.Errorf("page %d: is neither used nor free", id)
		}
	}

	return nil
}

func (c *checker) compare(transaction uint64) (contents, error) {
	s, err := parseSeal(c.seal)
	switch {
	case errors.Is(err, errNoSeal):
		return contents{sum: c.sum}, nil
	case err != nil:
		return contents{}, err
	case s.transaction > transaction:
		return contents{}, fmt.Errorf("transaction %d is missing", s.transaction)
	case s.transaction < transaction: // a program without seals wrote later
		return contents{sum: c.sum}, nil
	case s.sum != c.sum:
		return contents{}, errors.New("the records are not those that were written")
	}

	return contents{sum: c.sum, sealed: true}, nil
}

// claimPage returns a page together with the further pages that belong to it, and marks them as
// used.
func (c *checker) claimPage(id uint64) ([]byte, error) {
	pages := uint64(len(c.used))
	if id >= pages {
		return nil, fmt.Errorf("page %d: there are %d", id, pages)
	}

	page := c.data[id*c.pageSize:]
	further := uint64(order.Uint32(page[12:]))
	switch {
	case order.Uint64(page) != id:
		return nil, fmt.Errorf("page %d: says that it is page %d", id, order.Uint64(page))
	case further >= pages-id:
		return nil, fmt.Errorf("page %d: has %d further pages, there are %d in all",
			id, further, pages)
	}

	for ; id <= order.Uint64(page)+further; id++ {
		if err := c.markUsed(id); err != nil {
			return nil, err
		}
	}

	return page[:(further+1)*c.pageSize], nil
}

func (c *checker) markUsed(id uint64) error {
	if id >= uint64(len(c.used)) || c.used[id] {
		return fmt.Errorf("page %d: is used or free already, or does not exist", id)
	}
	c.used[id] = true
	return nil
}

// markFree marks the pages in the list as used.
func (c *checker) markFree(page []byte) error {
	if order.Uint16(page[8:]) != kindFree {
		return errors.New("is another page")
	}

	count, list := uint64(order.Uint16(page[10:])), page[headerSize:]
	if count == manyFree {
		count, list = order.Uint64(list), list[8:]
	}
	if count > uint64(len(list))/8 {
		return fmt.Errorf("%d pages do not fit", count)
	}

	for n := range count {
		if err := c.markUsed(order.Uint64(list[8*n:])); err != nil {
			return err
		}
	}

	return nil
}

// tree reads the tree of a bucket below a page. All keys must be larger than after, unless that is
// nil. It returns the first and the last key, both nil for an empty bucket.
func (c *checker) tree(
	bucket string, id uint64, after []byte, depth int,
) (keys [2][]byte, err error) {
	if depth > maxDepth {
		return keys, fmt.Errorf("page %d: is too deep", id)
	}

	page, err := c.claimPage(id)
	if err != nil {
		return keys, err
	}

	switch kind := order.Uint16(page[8:]); kind {
	case kindBranch:
		keys, err = c.branch(bucket, page, after, depth)
	case kindLeaf:
		keys, _, err = c.leaf(bucket, page, after)
		if err == nil && keys[0] == nil && depth > 0 {
			err = errors.New("is empty")
		}
	default:
		err = fmt.Errorf("kind %#x is unknown here", kind)
	}

	if err != nil {
		return keys, fmt.Errorf("page %d: %w", id, err)
	}

	return keys, nil
}

func (c *checker) branch(bucket string, page, after []byte, depth int) (keys [2][]byte, err error) {
	items, err := newItems(page)
	if err != nil {
		return keys, err
	}
	if items.count == 0 {
		return keys, errors.New("is empty")
	}

	for n := range items.count {
		element := items.element(n)
		key, err := items.next(n, order.Uint32(element), order.Uint32(element[4:]))
		if err != nil {
			return keys, err
		}

		below, err := c.tree(bucket, order.Uint64(element[8:]), after, depth+1)
		if err != nil {
			return keys, err
		}
		if !bytes.Equal(key, below[0]) {
			return keys, fmt.Errorf("element %d: page %d has another first key", n,
				order.Uint64(element[8:]))
		}

		if n == 0 {
			keys[0] = key
		}

		keys[1], after = below[1], below[1]
	}

	return keys, nil
}

// leaf reads a leaf and adds its records to the sum. size is how many bytes are used.
func (c *checker) leaf(bucket string, page, after []byte) (keys [2][]byte, size uint64, err error) {
	items, err := newItems(page)
	if err != nil {
		return keys, 0, err
	}

	for n := range items.count {
		element := items.element(n)
		key, err := items.next(n, order.Uint32(element[4:]), order.Uint32(element[8:]))
		if err != nil {
			return keys, 0, err
		}

		value, err := items.takeBytes(order.Uint32(element[12:]))
		if err != nil {
			return keys, 0, fmt.Errorf("element %d: %w", n, err)
		}
		if after != nil && bytes.Compare(after, key) >= 0 {
			return keys, 0, fmt.Errorf("element %d: key is out of order", n)
		}
		if err := c.record(bucket, order.Uint32(element), key, value); err != nil {
			return keys, 0, err
		}

		if n == 0 {
			keys[0] = key
		}

		keys[1], after = key, key
	}

	return keys, items.at, nil
}

// record adds a record to the sum. Records of the root, whose bucket name is "", are buckets. Other
// records are not.
func (c *checker) record(bucket string, flags uint32, key, value []byte) error {
	switch {
	case flags == bucketFlag && bucket == "":
		if err := c.bucket(string(key), value); err != nil {
			return fmt.Errorf("bucket %q: %w", key, err)
		}
	case flags != 0 || bucket == "":
		return fmt.Errorf("key %q: flags %#x are unknown here", key, flags)
	case bucket == sealBucket && string(key) == sealKey:
		c.seal = value
	default:
		// Without this check, a seal with a damaged name would count as a missing seal.
		if _, err := parseSeal(value); err == nil {
			return fmt.Errorf("key %q: is a seal, which has another name", key)
		}
		c.sum += sumOf(bucket, key, value)
	}
	return nil
}

func (c *checker) bucket(name string, value []byte) error {
	if len(value) < bucketSize {
		return fmt.Errorf("has %d bytes only", len(value))
	}

	root, sequence, inline := order.Uint64(value), order.Uint64(value[8:]), value[bucketSize:]
	if name != sealBucket {
		c.sum += sumOfBucket(name, sequence)
	}

	if root != 0 {
		if len(inline) > 0 {
			return errors.New("has two roots")
		}
		_, err := c.tree(name, root, nil, 0)
		return err
	}

	if len(inline) < headerSize {
		return errors.New("has no root")
	}
	if order.Uint64(inline) != 0 || order.Uint16(inline[8:]) != kindLeaf ||
		order.Uint32(inline[12:]) != 0 {
		return errors.New("has no leaf in it")
	}

	_, size, err := c.leaf(name, inline, nil)
	if err == nil && size != uint64(len(inline)) {
		err = fmt.Errorf("has %d bytes, want %d", len(inline), size)
	}

	return err
}

// items reads the elements of a page, and the keys and values that follow them contiguously.
type items struct {
	page  []byte
	count uint64
	at    uint64 // offset of the next key or value
}

func newItems(page []byte) (items, error) {
	count := uint64(order.Uint16(page[10:]))
	at := headerSize + elementSize*count
	if at > uint64(len(page)) {
		return items{}, fmt.Errorf("%d elements do not fit", count)
	}
	return items{page: page, count: count, at: at}, nil
}

func (i *items) element(n uint64) []byte { return i.page[headerSize+elementSize*n:][:elementSize] }

// next returns the key of an element. The key must be at the offset that the element says.
func (i *items) next(n uint64, offset, length uint32) ([]byte, error) {
	if headerSize+elementSize*n+uint64(offset) != i.at || length == 0 {
		return nil, fmt.Errorf("element %d: key is not where it must be", n)
	}
	key, err := i.takeBytes(length)
	if err != nil {
		return nil, fmt.Errorf("element %d: %w", n, err)
	}
	return key, nil
}

func (i *items) takeBytes(length uint32) ([]byte, error) {
	if uint64(length) > uint64(len(i.page))-i.at {
		return nil, fmt.Errorf("%d bytes do not fit", length)
	}
	b := i.page[i.at:][:length]
	i.at += uint64(length)
	return b, nil
}
