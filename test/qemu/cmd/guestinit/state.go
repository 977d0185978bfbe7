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

// state is what a suite must leave unchanged: all netdevs, with the settings that PFs enforce for
// VFs, and no processes. A key names a netdev by its device, if it has one, because the MACs and
// names of VFs' netdevs change when VFs are made again.
type state map[string]string

func readState() (state, error) {
	// Only a new handle requests information about VFs.
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
			// most drivers return EOPNOTSUPP
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

// processes returns the processes of programs except this one.
func processes() state {
	s := state{}
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		pid := filepath.Base(filepath.Dir(file))
		content, err := os.ReadFile(file)
		if err != nil || len(content) == 0 || pid == "1" { // has ended, or belongs to the kernel
			continue
		}
		program, _, _ := strings.Cut(string(content), "\x00")
		s["process "+pid+" "+program] = ""
	}

	return s
}

// left returns the netdevs that differ from the state before.
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

// leftBehind returns what a suite has changed. It waits some time before, because a netdev comes
// back a little later than its network namespace ends, and a card may have no carrier for seconds.
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

// settled returns the state when all PFs have a carrier.
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
