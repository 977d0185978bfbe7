// SPDX-License-Identifier: Apache-2.0

// Package settings reads the settings of a netdev that a tenant with NET_ADMIN can change, and
// changes them.
package settings

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// Of returns the settings of a netdev: "rings rx" is one of a driver, by its group, and
// "sysctl ipv4/conf rp_filter" one of the kernel.
func Of(n *netns.Namespace, name string) (map[string]string, error) {
	all := map[string]string{}
	err := each(n, name, func(conn *ethtool.Conn, index int) error {
		for _, group := range ethtool.Groups() {
			has, err := read(conn, index, group)
			if err != nil {
				return fmt.Errorf("%s of %s: %w", group, name, err)
			}
			for setting, value := range has {
				all[group+" "+setting] = value
			}
		}

		return eachSysctl(name, func(dir, file string) error {
			value, err := os.ReadFile(filepath.Join(procfs, dir, name, file))
			if err == nil {
				all["sysctl "+dir+" "+file] = strings.TrimSpace(string(value))
			}
			return nil // some can be written only, or not now
		})
	})
	return all, err
}

// ChangeAll changes each setting of a netdev for which the driver or the kernel takes another value.
// It returns the changed settings, named as by [Of].
func ChangeAll(n *netns.Namespace, name string) (changed []string, err error) {
	err = each(n, name, func(conn *ethtool.Conn, index int) error {
		for _, group := range ethtool.Groups() {
			has, err := read(conn, index, group)
			if err != nil {
				return fmt.Errorf("%s of %s: %w", group, name, err)
			}
			for _, setting := range slices.Sorted(maps.Keys(has)) {
				if change(conn, index, group, setting, has[setting]) {
					changed = append(changed, group+" "+setting)
				}
			}
		}

		return eachSysctl(name, func(dir, file string) error {
			if changeSysctl(filepath.Join(procfs, dir, name, file)) {
				changed = append(changed, "sysctl "+dir+" "+file)
			}
			return nil
		})
	})
	return changed, err
}

// Set changes settings of a group of a netdev.
func Set(
	t testing.TB, n *netns.Namespace, name, group string, to map[string]string,
) {
	t.Helper()
	err := each(n, name, func(conn *ethtool.Conn, index int) error {
		return conn.Change(index, group, to)
	})
	if err != nil {
		t.Fatalf("%s of %s: %v", group, name, err)
	}
}

// each calls do in a namespace with a netdev of it.
func each(n *netns.Namespace, name string, do func(conn *ethtool.Conn, index int) error) error {
	link, err := n.Handle().LinkByName(name)
	if err != nil {
		return err
	}
	conn, err := ethtool.Dial(vnetns.NsHandle(n.Fd()))
	if err != nil {
		return err
	}
	defer conn.Close()
	return n.Do(func() error { return do(conn, link.Attrs().Index) })
}

// read returns the settings of a group, none if the driver does not have the group.
func read(conn *ethtool.Conn, index int, group string) (map[string]string, error) {
	has, err := conn.Read(index, group)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	return has, err
}

// procfs has the sysctls of the network namespace of the calling thread.
const procfs = "/proc/sys/net"

// eachSysctl calls do for each sysctl of a netdev, with its directory below /proc/sys/net.
func eachSysctl(name string, do func(dir, file string) error) error {
	for _, dir := range []string{"ipv4/conf", "ipv4/neigh", "ipv6/conf", "ipv6/neigh"} {
		files, err := os.ReadDir(filepath.Join(procfs, dir, name))
		if errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6
			continue
		}
		if err != nil {
			return err
		}
		for _, file := range files {
			if err := do(dir, file.Name()); err != nil {
				return err
			}
		}
	}
	return nil
}

// change reports whether the driver takes another value for a setting.
func change(conn *ethtool.Conn, index int, group, name, value string) bool {
	for _, other := range others(value) {
		if conn.Change(index, group, map[string]string{name: other}) != nil {
			continue
		}
		now, err := conn.Read(index, group)
		if err == nil && now[name] != value {
			return true
		}
	}
	return false
}

// changeSysctl reports whether the kernel takes another value for a sysctl.
func changeSysctl(path string) bool {
	data, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	value := strings.TrimSpace(string(data))
	for _, other := range others(value) {
		if os.WriteFile(path, []byte(other), 0) != nil {
			continue
		}
		if now, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(now)) != value {
			return true
		}
	}
	return false
}

// others returns values of the same kind as value.
func others(value string) []string {
	if i := slices.Index([]string{ethtool.On, ethtool.Off}, value); i >= 0 {
		return []string{[]string{ethtool.Off, ethtool.On}[i]}
	}
	if n, err := strconv.Atoi(value); err == nil {
		var list []string
		for _, other := range []int{n / 2, 2 * n, n + 1, max(n-1, 0), 1 - min(n, 1)} {
			list = append(list, strconv.Itoa(other))
		}
		return list
	}
	if strings.HasPrefix(value, "equal ") { // an RSS table of unknown size
		var list []string
		for _, size := range []int{8, 16, 32, 64, 128, 256, 512} {
			list = append(list, strings.TrimSpace(strings.Repeat("0 ", size)))
		}
		return list
	}
	if key, err := hex.DecodeString(value); err == nil && len(key) > 0 { // an RSS key
		key[0]++
		return []string{hex.EncodeToString(key)}
	}
	if words := strings.Fields(value); len(words) > 1 { // as message classes, and an RSS table
		return []string{words[0], strings.Join(slices.Repeat(words[:1], len(words)), " ")}
	}
	return nil
}
