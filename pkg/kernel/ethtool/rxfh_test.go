// SPDX-License-Identifier: Apache-2.0

package ethtool

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestTransformationStays: a change of another setting keeps the transformation, and is not made
// while it is unknown.
func TestTransformationStays(t *testing.T) {
	for name, test := range map[string]struct {
		to, now map[string]string
		failure error
		want    string
		fails   bool
	}{
		"given": {
			to: map[string]string{transformation: "0", "hash function": "1"}, failure: unix.EIO,
			want: "0",
		},
		"known":        {now: map[string]string{transformation: "1", "hash function": "2"}, want: "1"},
		"not reported": {now: map[string]string{"hash function": "2"}},
		"no netlink":   {failure: fmt.Errorf("ethtool RSS: %w", unix.EOPNOTSUPP)},
		"unreadable":   {failure: fmt.Errorf("ethtool RSS: %w", unix.EBUSY), fails: true},
	} {
		to := test.to
		if to == nil {
			to = map[string]string{"hash function": "1"}
		}
		got, err := withTransformation(to, func() (map[string]string, error) {
			return test.now, test.failure
		})
		if errors.Is(err, unix.EBUSY) != test.fails || err != nil && !test.fails {
			t.Errorf("%s: error %v", name, err)
		}
		if err == nil && (got[transformation] != test.want || got["hash function"] != "1") {
			t.Errorf("%s: settings %v, want transformation %q", name, got, test.want)
		}
		if _, changed := to[transformation]; changed && test.to == nil {
			t.Errorf("%s: the caller's settings were changed", name)
		}
	}
}

// TestRXFH checks the layout of struct ethtool_rxfh, in which 0 or ETH_RXFH_INDIR_NO_CHANGE mean that
// a setting stays.
func TestRXFH(t *testing.T) {
	native := binary.NativeEndian
	for name, test := range map[string]struct {
		to                map[string]string
		tableSize, keyLen uint32
		function, xfrm    byte
		config            []byte
		error             string
	}{
		"nothing": {tableSize: tableStays},
		"key": {to: map[string]string{"hash key": "0102ff"}, tableSize: tableStays, keyLen: 3,
			config: []byte{1, 2, 0xff}},
		"table": {to: map[string]string{"table": "0 1 1"}, tableSize: 3,
			config: native.AppendUint32(native.AppendUint32(native.AppendUint32(nil, 0), 1), 1)},
		"own table": {to: map[string]string{"table": "equal 4"}},
		"all": {
			to: map[string]string{"table": "5", "hash key": "aa", "hash function": "1",
				"input transformation": "2"},
			tableSize: 1, keyLen: 1, function: 1, xfrm: 2,
			config: append(native.AppendUint32(nil, 5), 0xaa),
		},
		"no number":  {to: map[string]string{"table": "0 x"}, error: `table: "x"`},
		"no key":     {to: map[string]string{"hash key": "0g"}, error: "hexadecimal"},
		"too large":  {to: map[string]string{"hash function": "256"}, error: "must be 0-255"},
		"no integer": {to: map[string]string{"input transformation": "-"}, error: "must be 0-255"},
	} {
		got, err := rxfhOf(test.to)
		if test.error != "" {
			if err == nil || !strings.Contains(err.Error(), test.error) {
				t.Errorf("%s: error %v, want %q", name, err, test.error)
			}
			continue
		}
		must.Succeed(t, err)
		if len(got) < rxfhSize || native.Uint32(got) != setRSS || native.Uint32(got[4:]) != 0 ||
			native.Uint32(got[8:]) != test.tableSize || native.Uint32(got[12:]) != test.keyLen ||
			got[16] != test.function || got[17] != test.xfrm ||
			!bytes.Equal(got[18:rxfhSize], make([]byte, 6)) {
			t.Errorf("%s: % x", name, got)
		}
		if !bytes.Equal(got[rxfhSize:], test.config) {
			t.Errorf("%s: table and key % x, want % x", name, got[rxfhSize:], test.config)
		}
	}
}
