// SPDX-License-Identifier: Apache-2.0

package sourcefilter

import (
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"golang.org/x/sys/unix"
)

// perMessage limits the elements of a message, because the length of a netlink attribute has 16
// bits.
const perMessage = 500

// adopt reads the elements of an existing table. It writes the rules anew, because another version
// of the agent may have made them.
func (f *Filter) adopt() error {
	f.table = &nftables.Table{Name: TableName, Family: nftables.TableFamilyBridge}
	f.sets = map[string]*nftables.Set{}
	id := uint32(0)
	for name, key := range keyTypes() {
		id++
		f.sets[name] = &nftables.Set{
			Table: f.table, Name: name, KeyType: key, ID: id,
			Concatenation: key.Bytes > nftables.TypeIFIndex.Bytes,
			KeyByteOrder:  binaryutil.NativeEndian,
		}
	}

	f.sets[setDroppedFrames].Dynamic, f.sets[setDroppedFrames].Size = true, 1<<16
	if err := f.load(); err != nil {
		return err
	}

	err := f.declareAndSend()
	// Another version may have made the sets or chains in another way.
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY) {
		err = f.Restore()
	}
	// ENOENT says that a part of nftables is missing, such as the module nft_meta_bridge.
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}

	return err
}

func (f *Filter) declareAndSend() error {
	if err := f.declare(); err != nil {
		return err
	}
	return f.send(nil, nil)
}

// load reads the elements that the kernel has.
func (f *Filter) load() error {
	tables, err := f.conn.ListTablesOfFamily(nftables.TableFamilyBridge)
	if errors.Is(err, unix.EINVAL) { // the kernel has no nf_tables (nfnetlink_rcv_msg)
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	if err != nil {
		return fmt.Errorf("nftables: list tables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == TableName }) {
		return nil
	}

	there, err := f.conn.GetSets(f.table)
	if err != nil {
		return fmt.Errorf("nftables: sets of table bridge %s: %w", TableName, err)
	}

	for name, set := range f.sets {
		if set.Dynamic || !slices.ContainsFunc(there, func(s *nftables.Set) bool {
			return s.Name == name
		}) {
			continue
		}

		list, err := f.conn.GetSetElements(set)
		if err != nil {
			return fmt.Errorf("nftables: set %s of table bridge %s: %w", name, TableName, err)
		}

		for _, e := range list {
			f.refCount[element{name, string(e.Key)}] = 0
		}
	}

	return nil
}

// declare adds the table with its sets, chains and rules to the transaction. New rules replace
// those that the table has.
func (f *Filter) declare() error {
	f.conn.AddTable(f.table)
	for _, set := range f.sets {
		if err := f.conn.AddSet(set, nil); err != nil {
			return fmt.Errorf("nftables: set %s: %w", set.Name, err)
		}
	}

	for _, c := range f.chains() {
		c.Table = f.table
		f.conn.AddChain(&c.Chain)
		f.conn.FlushChain(&c.Chain)
	}

	for _, c := range f.chains() { // after all chains, because a rule may go to any of them
		c.Table = f.table
		for _, rule := range c.rules {
			f.conn.AddRule(&nftables.Rule{Table: f.table, Chain: &c.Chain, Exprs: rule})
		}
	}

	return nil
}

// send adds elements to sets, removes others, and ends the transaction.
func (f *Filter) send(add, remove []element) error {
	for name, elements := range bySet(add) {
		for some := range slices.Chunk(elements, perMessage) {
			if err := f.conn.SetAddElements(f.sets[name], some); err != nil {
				return fmt.Errorf("nftables: add to set %s: %w", name, err)
			}
		}
	}

	for name, elements := range bySet(remove) {
		for some := range slices.Chunk(elements, perMessage) {
			if err := f.conn.SetDeleteElements(f.sets[name], some); err != nil {
				return fmt.Errorf("nftables: remove from set %s: %w", name, err)
			}
		}
	}

	if err := f.conn.Flush(); err != nil {
		return fmt.Errorf("nftables: table bridge %s: %w", TableName, err)
	}

	return nil
}

func bySet(elements []element) map[string][]nftables.SetElement {
	sets := map[string][]nftables.SetElement{}
	for _, e := range elements {
		sets[e.set] = append(sets[e.set], nftables.SetElement{Key: []byte(e.key)})
	}
	return sets
}

// Dropped returns how many frames of each port have been dropped since the port was made, by
// ifindex.
func (f *Filter) Dropped() (map[int]uint64, error) {
	if f.unsupported != nil {
		return nil, nil
	}

	list, err := f.reader.GetSetElements(f.sets[setDroppedFrames])
	if err != nil {
		return nil, fmt.Errorf("nftables: counters of table bridge %s: %w", TableName, err)
	}

	dropped := map[int]uint64{}
	for _, e := range list {
		index, err := portOf(e.Key)
		if err != nil {
			return nil, fmt.Errorf("nftables: counters of table bridge %s: %w", TableName, err)
		}
		if e.Counter != nil {
			dropped[index] = e.Counter.Packets
		}
	}

	return dropped, nil
}
