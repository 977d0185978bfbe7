// SPDX-License-Identifier: Apache-2.0

package attribute_test

import (
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

func message() []byte {
	var m []byte
	nested := nl.NewRtAttr(7|unix.NLA_F_NESTED, nil)
	nested.AddRtAttr(1, nl.Uint8Attr(5))

	for _, a := range []*nl.RtAttr{
		nl.NewRtAttr(1, nl.Uint8Attr(1)), nl.NewRtAttr(2, nl.Uint16Attr(2)),
		nl.NewRtAttr(3, nl.Uint32Attr(3)), nested,
		nl.NewRtAttr(4, nl.Uint64Attr(4)), nl.NewRtAttr(5, nl.ZeroTerminated("eth0")),
		nl.NewRtAttr(1, nl.Uint8Attr(9)),
	} {
		m = append(m, a.Serialize()...)
	}

	return m
}

func TestParse(t *testing.T) {
	s, err := attribute.Parse(message())
	if err != nil {
		t.Fatal(err)
	}
	if s.Uint8(1) != 9 || s.Uint16(2) != 2 || s.Uint32(3) != 3 || s.Uint64(4) != 4 ||
		s.Text(5) != "eth0" {
		t.Errorf("read %v", s)
	}
	if s.Has(6) || !s.Has(5) || s.Uint8(6) != 0 || s.Uint16(1) != 0 || s.Uint32(4) != 0 ||
		s.Uint64(3) != 0 || s.Uint8(2) != 0 {
		t.Errorf("what is missing, or of another size, is in %v", s)
	}
	if inner, err := attribute.Parse(s[7]); err != nil || inner.Uint8(1) != 5 {
		t.Errorf("nested %v, %v", inner, err)
	}

	for _, broken := range [][]byte{{1}, {3, 0, 1, 0}, {9, 0, 1, 0, 5}, append(message(), 0)} {
		if s, err := attribute.Parse(broken); err == nil {
			t.Errorf("%v is read as %v", broken, s)
		}
	}
}

func TestAll(t *testing.T) {
	var kinds []uint16
	for kind := range attribute.All(append(message(), 0)) {
		kinds = append(kinds, kind)
	}
	if len(kinds) != 7 || kinds[0] != 1 || kinds[3] != 7 || kinds[6] != 1 {
		t.Errorf("walked over %d", kinds)
	}

	for kind := range attribute.All(message()) {
		if kind != 1 {
			t.Error("goes on after a break")
		}
		break
	}
}

func FuzzParse(f *testing.F) {
	f.Add(message())
	f.Add([]byte{5, 0, 1, 0, 7})
	f.Add([]byte{0xff})

	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := attribute.Parse(b)
		walked := 0
		for kind, value := range attribute.All(b) {
			walked++
			if err == nil && !s.Has(kind) || len(value) > len(b) {
				t.Errorf("attribute %d of %d bytes is not in %v", kind, len(value), s)
			}
		}

		if err == nil && walked < len(s) {
			t.Errorf("%d walked over, %d read", walked, len(s))
		}
	})
}
