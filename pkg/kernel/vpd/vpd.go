// SPDX-License-Identifier: Apache-2.0

// Package vpd reads a card's Vital Product Data, which the manufacturer writes into the card. They
// contain its serial number, and an identifier that NVIDIA's cards have.
package vpd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// These are tags of resources, and the keyword of the serial number (PCI Local Bus Specification
// 3.0, appendix I).
const (
	tagEnd       = 0x78 // a small resource, whose low three bits are its length
	tagReadOnly  = 0x90 // VPD-R
	largeFlag    = 0x80
	serialNumber = "SN"
	// nvidiaCard is a keyword of NVIDIA's ("V3", kernel-boot/rdma_topo of rdma-core).
	nvidiaCard = "V3"
)

// maxSize is the maximum size of the data in bytes, because addresses have 15 bits.
const maxSize = 1 << 15

// SerialNumber returns the serial number without surrounding white space, or "" if the data contain
// no serial number. An error is an error of the reader or describes what is wrong with the data.
//
// SerialNumber reads nothing after the serial number, because the card must be asked for every 4
// bytes, and is slow to answer.
func SerialNumber(r io.Reader) (string, error) { return readOnly(r, serialNumber) }

// Card returns the identifier that NVIDIA gives to the functions of one card, such as a PF and the
// Data Direct function of a ConnectX-8, or "" if the data contain none. Otherwise it is like
// [SerialNumber].
func Card(r io.Reader) (string, error) { return readOnly(r, nvidiaCard) }

// readOnly returns the value of a keyword of the read-only data.
func readOnly(r io.Reader, keyword string) (string, error) {
	in := &reader{from: io.LimitReader(r, maxSize)}
	for {
		tag, length, err := in.resource()
		if errors.Is(err, io.EOF) || err == nil && tag == tagEnd {
			return "", nil
		}
		if err != nil {
			return "", err
		}

		if tag != tagReadOnly {
			if _, err := in.take(length); err != nil {
				return "", err
			}
			continue
		}

		return in.keyword(keyword, length)
	}
}

// reader counts the bytes that it has read, because errors name the position.
type reader struct {
	from io.Reader
	at   int
}

func (r *reader) take(n int) ([]byte, error) {
	data := make([]byte, n)
	got, err := io.ReadFull(r.from, data)
	r.at += got
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) && n > 0 {
		return nil, fmt.Errorf("ends at byte %d, inside a resource: %w", r.at, io.ErrUnexpectedEOF)
	}
	return data, err
}

// resource reads the tag and the length of a resource. The error is io.EOF if the data end here.
func (r *reader) resource() (tag byte, length int, err error) {
	var head [1]byte
	if _, err := io.ReadFull(r.from, head[:]); err != nil {
		return 0, 0, err
	}

	at := r.at
	r.at++
	switch tag := head[0]; {
	case tag&largeFlag != 0:
		size, err := r.take(2)
		if err != nil {
			return 0, 0, err
		}
		return tag, int(binary.LittleEndian.Uint16(size)), nil
	case tag&^7 == tagEnd:
		return tagEnd, 0, nil
	default:
		return 0, 0, fmt.Errorf("byte %d is %#02x, want the tag of a resource", at, tag)
	}
}

// keyword returns the value of a keyword in a list of keywords, or "" if the list lacks it. length
// is the size of the list in bytes.
func (r *reader) keyword(name string, length int) (string, error) {
	for length > 0 {
		head, err := r.take(3)
		if err != nil {
			return "", err
		}

		size := int(head[2])
		if length -= 3 + size; length < 0 {
			return "", fmt.Errorf("keyword %q before byte %d is longer than what it is in",
				head[:2], r.at)
		}

		value, err := r.take(size)
		if err != nil {
			return "", err
		}
		if string(head[:2]) == name {
			return text(name, value)
		}
	}
	return "", nil
}

// text returns a value without surrounding white space and without trailing zero bytes, by which
// some cards pad it. It returns an error unless the value is printable ASCII, as the specification
// demands.
func text(name string, value []byte) (string, error) {
	s := strings.TrimSpace(strings.TrimRight(string(value), "\x00"))
	if i := strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r > '~' }); i >= 0 {
		return "", fmt.Errorf("%s is %q, want printable ASCII", name, value)
	}
	return s, nil
}
