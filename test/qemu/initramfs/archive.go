// SPDX-License-Identifier: Apache-2.0

// Package initramfs makes the file system with which a guest's kernel starts. It needs neither root
// nor other programs.
package initramfs

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
)

// Modes of entries, as in st_mode of stat(2).
const (
	directory = 0o040755
	regular   = 0o100000
	symlink   = 0o120777
	character = 0o020600
)

type entry struct {
	mode         uint32
	content      []byte // for a symlink, its target
	major, minor uint32
}

// Archive is a file system in memory. Everything in it belongs to root. Make one with [New].
type Archive struct {
	entries map[string]entry // by path without leading slash
}

// New returns a file system with the devices that the kernel needs before it has mounted /dev, and
// with /bin, /lib, /lib64 and /sbin as links into /usr.
func New() *Archive {
	a := &Archive{entries: map[string]entry{}}
	for _, dir := range []string{"dev", "proc", "sys", "tmp", "run", "root"} {
		a.entries[dir] = entry{mode: directory}
	}

	for _, dir := range []string{"bin", "lib", "lib64", "sbin"} {
		a.Directory("/usr/" + dir)
		a.Link("/"+dir, "usr/"+dir)
	}

	a.entries["dev/console"] = entry{mode: character, major: 5, minor: 1}
	return a
}

// Directory adds a directory and its parents.
func (a *Archive) Directory(name string) {
	for name = clean(name); name != "." && name != ""; name = path.Dir(name) {
		if _, ok := a.entries[name]; ok {
			return
		}
		a.entries[name] = entry{mode: directory}
	}
}

// File adds a file, or replaces it, and the directories above it. The content must not be changed
// afterwards.
func (a *Archive) File(name string, content []byte, permissions uint32) {
	a.Directory(path.Dir(name))
	a.entries[clean(name)] = entry{mode: regular | permissions, content: content}
}

// Link adds a symbolic link, and the directories above it.
func (a *Archive) Link(name, target string) {
	a.Directory(path.Dir(name))
	a.entries[clean(name)] = entry{mode: symlink, content: []byte(target)}
}

func (a *Archive) has(name string) bool {
	_, ok := a.entries[clean(name)]
	return ok
}

func clean(name string) string { return strings.TrimPrefix(path.Clean(name), "/") }

// WriteTo writes the file system in the format newc of cpio
// (Documentation/driver-api/early-userspace/buffer-format.rst). It does not compress, because
// decompression under emulation takes longer than it saves.
func (a *Archive) WriteTo(to io.Writer) (int64, error) {
	w := &writer{to: bufio.NewWriterSize(to, 1<<20)}
	for i, name := range slices.Sorted(maps.Keys(a.entries)) {
		w.entry(i+1, name, a.entries[name])
	}

	w.entry(0, "TRAILER!!!", entry{})
	if w.err == nil {
		w.err = w.to.Flush()
	}
	return w.written, w.err
}

// writer keeps the first error, and writes nothing after it.
type writer struct {
	to      *bufio.Writer
	written int64
	err     error
}

func (w *writer) entry(inode int, name string, e entry) {
	const links, owner, group, time, deviceMajor, deviceMinor, checksum = 1, 0, 0, 0, 0, 0, 0
	header := "070701"
	for _, field := range []uint32{
		uint32(inode), e.mode, owner, group, links, time, uint32(len(e.content)), deviceMajor,
		deviceMinor, e.major, e.minor,
		uint32(len(name) + 1), checksum,
	} {
		header += fmt.Sprintf("%08X", field)
	}

	w.padded([]byte(header + name + "\x00"))
	w.padded(e.content)
}

// padded writes the content and fills it up to a multiple of four bytes.
func (w *writer) padded(content []byte) {
	for _, part := range [][]byte{content, make([]byte, -len(content)&3)} {
		if w.err != nil {
			return
		}
		n, err := w.to.Write(part)
		w.written += int64(n)
		w.err = err
	}
}
