// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// state is what a suite must leave as it was: all netdevs, with what PFs enforce for VFs, and no
// processes. A key says which netdev it is, by its device where it has one: MACs and names of VFs'
// netdevs are others when VFs are made anew.
type state map[string]string

func readState() (state, error) {
	// Only a handle of its own tells about VFs.
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer handle.Close()

	links, err := handle.LinkList()
	if err != nil {
		return nil, fmt.Errorf("netdevs: %w", err)
	}

	s := processes()
	for _, l := range links {
		a := l.Attrs()
		key := fmt.Sprintf("%s %s", l.Type(), a.Name)
		if a.ParentDev != "" {
			// EOPNOTSUPP with most drivers
			port, _ := os.ReadFile(filepath.Join("/sys/class/net", a.Name, "phys_port_name"))
			key = strings.TrimSpace("netdev of " + a.ParentDev + " " +
				strings.TrimSpace(string(port)))
		}

		s[key] = fmt.Sprintf("up %v, MTU %d, alias %q, names %q, master %d",
			a.Flags&net.FlagUp != 0, a.MTU, a.Alias, a.AltNames, a.MasterIndex)
		if len(a.Vfs) > 0 {
			s[key] += fmt.Sprintf(", carrier %v", a.RawFlags&unix.IFF_LOWER_UP != 0)
		}

		for _, vf := range a.Vfs {
			s[fmt.Sprintf("VF %d at %s", vf.ID, a.ParentDev)] = fmt.Sprintf(
				"VLAN %d, QoS %d, rate %d to %d, spoof check %v, trust %v, link state %d",
				vf.Vlan, vf.Qos, vf.MinTxRate, vf.MaxTxRate, vf.Spoofchk, vf.Trust == 1,
				vf.LinkState)
		}
	}

	return s, nil
}

// processes are those of programs, but for this one.
func processes() state {
	s := state{}
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		pid := filepath.Base(filepath.Dir(file))
		content, err := os.ReadFile(file)
		if err != nil || len(content) == 0 || pid == "1" { // ended, or the kernel's
			continue
		}
		program, _, _ := strings.Cut(string(content), "\x00")
		s["process "+pid+" "+program] = ""
	}

	return s
}

// left says in which netdevs the state differs from what it was before.
func (s state) left(before state) []string {
	var differs []string
	for _, key := range slices.Sorted(maps.Keys(s)) {
		if was, there := before[key]; !there {
			differs = append(differs, key+" is new")
		} else if was != s[key] {
			differs = append(differs, fmt.Sprintf("%s: %s; it was: %s", key, s[key], was))
		}
	}

	for _, key := range slices.Sorted(maps.Keys(before)) {
		if _, there := s[key]; !there {
			differs = append(differs, key+" is gone")
		}
	}

	return differs
}

// leftBehind says what a suite left otherwise than it was before, after a while: a netdev that
// leaves a network namespace with it comes back a little later, and a card may have no carrier for
// seconds.
func leftBehind(before state) ([]string, error) {
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		now, err := readState()
		if err != nil {
			return nil, err
		}
		differs := now.left(before)
		if len(differs) == 0 || time.Now().After(end) {
			return differs, nil
		}
	}
}

// settled is the state when all PFs have a carrier.
func settled() (state, error) {
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		s, err := readState()
		if err != nil {
			return nil, err
		}

		waits := slices.ContainsFunc(slices.Collect(maps.Values(s)), func(text string) bool {
			return strings.Contains(text, "carrier false")
		})
		if !waits || time.Now().After(end) {
			return s, nil
		}
	}
}
