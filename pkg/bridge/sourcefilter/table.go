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

// adopt reads the elements of existing tables. It writes the rules anew, because another version of
// the agent may have made them.
func (f *Filter) adopt() error {
	f.table = &nftables.Table{Name: TableName, Family: nftables.TableFamilyBridge}
	f.routed = &nftables.Table{Name: TableName, Family: nftables.TableFamilyINet}
	f.sets = map[string]*nftables.Set{}
	id := uint32(0)
	for table, types := range map[*nftables.Table]map[string]nftables.SetDatatype{
		f.table: keyTypes(), f.routed: routedKeyTypes(),
	} {
		for name, key := range types {
			id++
			value, isMap := valueTypes()[name]
			f.sets[name] = &nftables.Set{
				Table: table, Name: name, KeyType: key, ID: id, IsMap: isMap, DataType: value,
				Concatenation: key.Bytes > nftables.TypeIFIndex.Bytes,
				KeyByteOrder:  binaryutil.NativeEndian,
			}
		}
	}

	f.sets[setDroppedFrames].Dynamic, f.sets[setDroppedFrames].Size = true, 1<<16
	for _, table := range []*nftables.Table{f.table, f.routed} {
		if err := f.load(table); err != nil {
			return err
		}
	}

	f.hasRouted = f.routedElements()
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
	if err := f.declare(f.table); err != nil {
		return err
	}
	if f.hasRouted > 0 {
		if err := f.declare(f.routed); err != nil {
			return err
		}
	}
	return f.send(nil, nil)
}

// load reads the elements that the kernel has in a table.
func (f *Filter) load(table *nftables.Table) error {
	tables, err := f.conn.ListTablesOfFamily(table.Family)
	if errors.Is(err, unix.EINVAL) { // the kernel has no nf_tables (nfnetlink_rcv_msg)
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	if err != nil {
		return fmt.Errorf("nftables: list tables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == TableName }) {
		return nil
	}

	there, err := f.conn.GetSets(table)
	if err != nil {
		return fmt.Errorf("nftables: sets of table %s %s: %w", familyOf(table), TableName, err)
	}

	for name, set := range f.sets {
		if set.Table != table || set.Dynamic || !slices.ContainsFunc(there, func(s *nftables.Set) bool {
			return s.Name == name
		}) {
			continue
		}

		list, err := f.conn.GetSetElements(set)
		if err != nil {
			return fmt.Errorf("nftables: set %s of table %s %s: %w", name, familyOf(table), TableName,
				err)
		}

		for _, e := range list {
			f.learnElement(element{name, string(e.Key), string(e.Val)})
		}
	}

	return nil
}

// declare adds a table with its sets, chains and rules to the transaction. New rules replace those
// that the table has.
func (f *Filter) declare(table *nftables.Table) error {
	chains := f.chains()
	if table == f.routed {
		chains = routedChains()
	}

	f.conn.AddTable(table)
	for _, set := range f.sets {
		if set.Table != table {
			continue
		}
		if err := f.conn.AddSet(set, nil); err != nil {
			return fmt.Errorf("nftables: set %s: %w", set.Name, err)
		}
	}

	for _, c := range chains {
		c.Table = table
		f.conn.AddChain(&c.Chain)
		f.conn.FlushChain(&c.Chain)
	}

	for _, c := range chains { // after all chains, because a rule may go to any of them
		for _, rule := range c.rules {
			f.conn.AddRule(&nftables.Rule{Table: table, Chain: &c.Chain, Exprs: rule})
		}
	}

	return nil
}

// familyOf returns the name of a table's family.
func familyOf(table *nftables.Table) string {
	if table.Family == nftables.TableFamilyINet {
		return "inet"
	}
	return "bridge"
}

// send removes elements from sets, adds others, and ends the transaction.
func (f *Filter) send(add, remove []element) error {
	// A map has one value for a key, so the old one goes first.
	for name, elements := range bySet(remove) {
		for some := range slices.Chunk(elements, perMessage) {
			if err := f.conn.SetDeleteElements(f.sets[name], some); err != nil {
				return fmt.Errorf("nftables: remove from set %s: %w", name, err)
			}
		}
	}

	for name, elements := range bySet(add) {
		for some := range slices.Chunk(elements, perMessage) {
			if err := f.conn.SetAddElements(f.sets[name], some); err != nil {
				return fmt.Errorf("nftables: add to set %s: %w", name, err)
			}
		}
	}

	if err := f.conn.Flush(); err != nil {
		return fmt.Errorf("nftables: tables %s: %w", TableName, err)
	}

	return nil
}

func bySet(elements []element) map[string][]nftables.SetElement {
	sets := map[string][]nftables.SetElement{}
	for _, e := range elements {
		sets[e.set] = append(sets[e.set], nftables.SetElement{
			Key: []byte(e.key), Val: []byte(e.value),
		})
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
