// SPDX-License-Identifier: Apache-2.0

package ethtool

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants of include/uapi/linux/ethtool.h for ETHTOOL_SRSSH.
const (
	setRSS            = 0x47       // ETHTOOL_SRSSH
	tableStays uint32 = 0xffffffff // ETH_RXFH_INDIR_NO_CHANGE
	// rxfhSize is the size of struct ethtool_rxfh without rss_config.
	rxfhSize = 24
)

// ioctlRSS changes RSS settings by ioctl, for kernels that can read them by netlink and not set
// them (ETHTOOL_MSG_RSS_SET came with Linux 6.17). An ioctl names the netdev, so that a netdev that
// gets another name in this moment is not found.
func (c *Conn) ioctlRSS(index int, to map[string]string) error {
	if c.socket == nil {
		return unix.EOPNOTSUPP
	}
	to, err := withTransformation(to, func() (map[string]string, error) {
		return c.Read(index, "RSS")
	})
	if err != nil {
		return err
	}
	config, err := rxfhOf(to)
	if err != nil {
		return err
	}

	fd := c.socket.Socket.GetFd()
	named, err := unix.NewIfreq("")
	if err != nil {
		return err
	}
	named.SetUint32(uint32(index))
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFNAME, named); err != nil {
		return fmt.Errorf("name of the netdev: %w", err)
	}

	// struct ifreq with a pointer to the configuration
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(unsafe.SliceData(config))}
	copy(request.name[:], named.Name())
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL,
		uintptr(unsafe.Pointer(&request)))
	runtime.KeepAlive(config)
	if errno != 0 {
		return errno
	}

	return nil
}

// transformation is the name of a setting of the group RSS.
const transformation = "input transformation"

// withTransformation adds the present transformation to settings that have none, because a kernel
// that reports a transformation takes 0 for none, and not for no change. read reads the present
// settings. A kernel that does not have this read by netlink is older than transformations. If the
// read fails otherwise, nothing may be changed.
func withTransformation(
	to map[string]string, read func() (map[string]string, error),
) (map[string]string, error) {
	if _, given := to[transformation]; given {
		return to, nil
	}

	now, err := read()
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return nil, fmt.Errorf("%s, which must stay: %w", transformation, err)
	}
	if now[transformation] == "" {
		return to, nil
	}

	all := maps.Clone(to)
	all[transformation] = now[transformation]
	return all, nil
}

// rxfhOf returns struct ethtool_rxfh with settings of the group RSS. What is not among them stays
// as it is, but for the transformation.
func rxfhOf(to map[string]string) ([]byte, error) {
	number := func(name string) (uint8, error) {
		text, given := to[name]
		if !given {
			return 0, nil
		}
		n, err := strconv.ParseUint(text, 10, 8)
		if err != nil {
			return 0, fmt.Errorf("%s: %q: must be 0-255", name, text)
		}
		return uint8(n), nil
	}
	function, err := number("hash function")
	if err != nil {
		return nil, err
	}
	// Kernels before Linux 6.8 do not report a transformation, and want 0 in its place.
	xfrm, err := number(transformation)
	if err != nil {
		return nil, err
	}
	size, queues, err := queuesOf(to)
	if err != nil {
		return nil, err
	}
	key, err := hex.DecodeString(to["hash key"])
	if err != nil {
		return nil, fmt.Errorf("hash key: must be in hexadecimal: %w", err)
	}

	native := binary.NativeEndian
	config := native.AppendUint32(make([]byte, 0, rxfhSize), setRSS)
	config = native.AppendUint32(config, 0) // rss_context
	config = native.AppendUint32(config, size)
	config = native.AppendUint32(config, uint32(len(key)))
	config = append(config, function, xfrm, 0, 0)
	config = native.AppendUint32(config, 0) // rsvd32

	return append(append(config, queues...), key...), nil
}

// queuesOf returns the table, and its number of entries: 0 for the kernel's own table for all
// channels, and tableStays if no table is given.
func queuesOf(to map[string]string) (size uint32, queues []byte, err error) {
	text, given := to["table"]
	switch {
	case !given:
		return tableStays, nil, nil
	case strings.HasPrefix(text, equal):
		return 0, nil, nil
	}

	for _, word := range strings.Fields(text) {
		queue, err := strconv.ParseUint(word, 10, 32)
		if err != nil {
			return 0, nil, fmt.Errorf("table: %q: must be the number of a queue", word)
		}
		queues = binary.NativeEndian.AppendUint32(queues, uint32(queue))
	}
	return uint32(len(queues) / 4), queues, nil
}
