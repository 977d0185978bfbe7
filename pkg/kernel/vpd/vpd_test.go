// SPDX-License-Identifier: Apache-2.0

package vpd

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// resource returns a large resource: tag, length, content.
func resource(tag byte, content string) string {
	return string([]byte{tag, byte(len(content)), byte(len(content) >> 8)}) + content
}

func keyword(name, value string) string { return name + string([]byte{byte(len(value))}) + value }

const name = "BlueField-3 VPI QSFP112 2P 200G"

func TestSerialNumber(t *testing.T) {
	readOnly := keyword("PN", "900-9D3B6-00CV-A") + keyword("EC", "B1") +
		keyword("SN", "MT2334XZ0LTK  ") + keyword("RV", "\x05")
	for what, test := range map[string]struct{ data, want, problem string }{
		"a card": {
			data: resource(0x82, name) + resource(0x90, readOnly) +
				resource(0x91, keyword("YA", "x")) + "\x78", want: "MT2334XZ0LTK",
		},
		"filled up with zeros": {
			data: resource(0x90, keyword("SN", "A1\x00\x00")) + "\x78", want: "A1",
		},
		"no serial number": {data: resource(0x82, name) + resource(0x90, keyword("PN", "x")) +
			"\x78"},
		"no read-only part": {data: resource(0x82, name) + "\x78"},
		"nothing":           {},
		"no end":            {data: resource(0x82, name)},
		"erased": {
			data: strings.Repeat("\xff", 64), problem: "ends at byte 64, inside a resource",
		},
		"zeros": {
			data: strings.Repeat("\x00", 64), problem: "byte 0 is 0x00, want the tag of a resource",
		},
		"ends early": {
			data: resource(0x90, readOnly)[:9], problem: "ends at byte 9, inside a resource",
		},
		"ends in a head": {data: "\x82\x01", problem: "ends at byte 2, inside a resource"},
		"keyword too long": {
			data:    resource(0x90, "SN\x09abc") + "\x78",
			problem: `keyword "SN" before byte 6 is longer than what it is in`,
		},
		"not text": {
			data: resource(0x90, keyword("SN", "A\x01")), problem: "want printable ASCII",
		},
	} {
		got, err := SerialNumber(strings.NewReader(test.data))
		if got != test.want || (err == nil) != (test.problem == "") || err != nil &&
			!strings.Contains(err.Error(), test.problem) {
			t.Errorf("%s: %q, %v; want %q, %q", what, got, err, test.want, test.problem)
		}
	}
}

// TestCard checks the identifier by which functions of one ConnectX card name each other.
func TestCard(t *testing.T) {
	const uuid = "6f1c52f1d1b0ef118000a088c2000000"
	for what, test := range map[string]struct{ data, want, problem string }{
		"a ConnectX-8": {
			data: resource(0x82, name) + resource(0x90, keyword("PN", "900-9X81E-00EX-DT0")+
				keyword("SN", "MT2450X00000")+keyword("V3", uuid)+keyword("RV", "\x05")) + "\x78",
			want: uuid,
		},
		"another card": {data: resource(0x90, keyword("SN", "A1")) + "\x78"},
		"not text": {
			data: resource(0x90, keyword("V3", "A\x01")), problem: "V3 is",
		},
	} {
		got, err := Card(strings.NewReader(test.data))
		if got != test.want || (err == nil) != (test.problem == "") || err != nil &&
			!strings.Contains(err.Error(), test.problem) {
			t.Errorf("%s: %q, %v; want %q, %q", what, got, err, test.want, test.problem)
		}
	}
}

// TestReadsNoMoreThanItMust checks that nothing after the serial number is read, because each read
// is a request to the card.
func TestReadsNoMoreThanItMust(t *testing.T) {
	data := resource(0x82, name) +
		resource(0x90, keyword("SN", "MT2334XZ0LTK")+keyword("RV", strings.Repeat("\x00", 200)))
	needed := strings.Index(data, "MT2334XZ0LTK") + len("MT2334XZ0LTK")
	asked := errors.New("asked for more")
	from := io.MultiReader(strings.NewReader(data[:needed]), iotest.ErrReader(asked))
	if got, err := SerialNumber(from); got != "MT2334XZ0LTK" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := SerialNumber(iotest.ErrReader(asked)); !errors.Is(err, asked) {
		t.Errorf("error %v, want that of the reader", err)
	}
}

func FuzzSerialNumber(f *testing.F) {
	f.Add([]byte(resource(0x82, name) + resource(0x90, keyword("SN", "MT2334XZ0LTK")) + "\x78"))
	f.Add([]byte("\xff\xff\xff"))

	f.Fuzz(func(t *testing.T, data []byte) {
		serial, err := SerialNumber(bytes.NewReader(data))
		if err != nil && serial != "" {
			t.Errorf("%q with error %v", serial, err)
		}
		if len(serial) > 255 || strings.TrimSpace(serial) != serial {
			t.Errorf("%q", serial)
		}
	})
}
