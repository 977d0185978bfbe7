// SPDX-License-Identifier: Apache-2.0

// Package witness compares the inventory with what sriovnet says about the same Functions. Both
// read the same kernel, by different code. If they disagree, one of them misreads the card, which
// is the earliest sign of trouble with a card that the project has never seen.
package witness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// A difference counts only if it is found in this many comparisons in succession, because netdevs
// move to pods and VFs are made while they are compared. The pause between two comparisons is
// longer than an inventory needs to follow the kernel.
const (
	comparisons = 3
	pause       = time.Second
)

// maxText bounds each text about a Function, in bytes. Names of the kernel are shorter.
const maxText = 255

// Source is what is compared. All fields but Reader are required.
type Source struct {
	// SysRoot is where the sysfs is that the inventory reads. sriovnet can read only /sys.
	SysRoot string
	// Functions returns the Functions of the inventory as they are now.
	Functions func(context.Context) ([]function.Function, error)
	// Ports lists the devlink ports of all devices.
	Ports func() ([]devlink.Port, error)
	// Reader returns the reader of one comparison; nil for sriovnet itself.
	Reader func() Reader
}

// Verify compares the Functions with what sriovnet says. It takes up to a few seconds if there are
// differences. Properties that were not compared when ctx ended are unknown. If no difference was
// found until then, there is no result, because what was not compared may differ.
func Verify(ctx context.Context, s Source) nodestate.Verification {
	if s.Reader == nil {
		s.Reader = Sriovnet
		if err := checkRoot(s.SysRoot); err != nil {
			return skipped(err)
		}
	}

	begin := time.Now().UTC()
	found, err := s.compare(ctx)
	for i := 1; i < comparisons && err == nil && len(found.differences) > 0; i++ {
		if !loop.Sleep(ctx, pause) {
			found.withdraw(found.differences, "it could not be compared again: "+
				context.Cause(ctx).Error())
			break
		}
		before := found.differences
		found, err = s.compare(ctx)
		found.confirm(before)
	}

	if err != nil {
		return skipped(err)
	}

	v := found.verification()
	v.Time = begin
	if cause := context.Cause(ctx); cause != nil && v.Different == 0 {
		v.Skipped = bounded(fmt.Sprintf("the comparison did not end (%v); %d properties are "+
			"unknown", cause, v.Unknown))
	}
	return v
}

// skipped returns a Verification that compared nothing.
func skipped(why error) nodestate.Verification {
	return nodestate.Verification{Time: time.Now().UTC(), Skipped: bounded(why.Error())}
}

// compare compares each property once.
func (s Source) compare(ctx context.Context) (comparison, error) {
	functions, err := s.Functions(ctx)
	if err != nil {
		return comparison{}, err
	}
	if len(functions) == 0 {
		return comparison{}, errors.New("this host has no Functions")
	}

	ports, err := s.Ports()
	v := newView(functions, ports, err, s.Reader())
	var c comparison
	for _, f := range functions {
		for _, q := range v.questions(f) {
			c.add(ctx, f.ID, q)
		}
	}

	return c, nil
}

// comparison is the result of one comparison. Each unknown property has an entry in unknown.
type comparison struct {
	same        int
	differences []nodestate.Difference
	unknown     []unknown
}

// unknown is a property of a Function that is neither the same nor different.
type unknown struct {
	function function.ID
	property string
	reason   string
}

// add asks a question about a Function.
func (c *comparison) add(ctx context.Context, id function.ID, q question) {
	said, err := answer{}, context.Cause(ctx)
	if err == nil {
		said, err = withoutPanic(q.ask)
	}

	switch {
	case err != nil:
		c.unknown = append(c.unknown, unknown{id, q.property, bounded(err.Error())})
	case said.agrees:
		c.same++
	default:
		c.differences = append(c.differences, nodestate.Difference{
			Function: id, Property: q.property, Inventory: bounded(q.inventory),
			Sriovnet: bounded(said.says), Look: q.look,
		})
	}
}

// withoutPanic asks, and returns an error if sriovnet panics: it takes names from sysfs to have
// the form that it expects.
func withoutPanic(ask func() (answer, error)) (said answer, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("sriovnet panicked: %v", cause)
		}
	}()
	return ask()
}

// confirm keeps the differences that were found before too.
func (c *comparison) confirm(before []nodestate.Difference) {
	known := make(map[nodestate.Difference]bool, len(before))
	for _, d := range before {
		known[d] = true
	}

	c.withdraw(slices.DeleteFunc(slices.Clone(c.differences), func(d nodestate.Difference) bool {
		return known[d]
	}), "it changed while it was compared")
}

// withdraw makes differences unknown.
func (c *comparison) withdraw(differences []nodestate.Difference, reason string) {
	gone := make(map[nodestate.Difference]bool, len(differences))
	for _, d := range differences {
		gone[d] = true
		c.unknown = append(c.unknown, unknown{d.Function, d.Property, reason})
	}
	c.differences = slices.DeleteFunc(slices.Clone(c.differences),
		func(d nodestate.Difference) bool { return gone[d] })
}

// verification sums up a comparison.
func (c *comparison) verification() nodestate.Verification {
	v := nodestate.Verification{
		Same: c.same, Different: len(c.differences), Unknown: len(c.unknown),
		Differences: c.differences[:min(len(c.differences), nodestate.MaxDifferences)],
	}

	for _, u := range c.unknown {
		i, known := slices.BinarySearchFunc(v.Unknowns, u.property,
			func(have nodestate.Unverified, property string) int {
				return cmp.Compare(have.Property, property)
			})
		if !known {
			v.Unknowns = slices.Insert(v.Unknowns, i, nodestate.Unverified{
				Property: u.property, First: u.function, Reason: u.reason,
			})
		}
		v.Unknowns[i].Functions++
	}

	if v.Same+v.Different == 0 && len(c.unknown) > 0 {
		first := c.unknown[0]
		v.Skipped = bounded(fmt.Sprintf("every property is unknown; %s of Function %s: %s",
			first.property, first.function, first.reason))
	}

	return v
}

// bounded cuts a text to maxText, and drops bytes that are not UTF-8, which JSON and the API do not
// accept.
func bounded(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxText)], "")
}
