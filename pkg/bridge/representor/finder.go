// SPDX-License-Identifier: Apache-2.0

// Package representor finds the netdevs that represent Functions at an eswitch.
//
// The id of a bridge port names its representor in one of three ways: by the netdev's name or
// alternative name, by the PCI address of the Function, or by the eswitch's name for the Function,
// such as c1pf0vf3. A netdev that has the port's id as its name comes first. Only representors of
// Functions for clients are found: see [Config].
package representor

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Config says which netdevs clients may have as ports. Functions of another machine, which the
// eswitch names with their controller, are always for clients.
type Config struct {
	// HostPFs are the PFs whose Functions are for clients too. A PCI address in the id of a port is
	// resolved by these PFs only.
	HostPFs []HostPF
	// Netdevs are patterns of path.Match for names, or alternative names, of netdevs that may be
	// ports although no eswitch says that they represent a Function for clients.
	Netdevs []string
	// Sysfs describes the HostPFs that belong to this machine. If it is empty, it is /sys.
	Sysfs sysfs.Root
}

func (c Config) sysfs() sysfs.Root { return cmp.Or(c.Sysfs, "/sys") }

// Check returns an error if HostPFs contradict each other, or if a pattern in Netdevs matches
// nothing or everything.
func (c Config) Check() error {
	failed := []error{checkHostPFs(c.HostPFs)}
	for _, pattern := range c.Netdevs {
		if _, err := path.Match(pattern, ""); err != nil || strings.Trim(pattern, "*?") == "" {
			failed = append(failed,
				fmt.Errorf("representor %q: must be the name of a netdev, or a "+
					"pattern of names such as sim-*", pattern))
		}
	}

	return errors.Join(failed...)
}

// Finder finds the representors of ports. It keeps a view of devlink ports and netdevs, and takes a
// new view after a netdev was added or removed. One goroutine may call Find and FindAll while
// another one calls Added, Removed and EventsLost.
type Finder struct {
	config  Config
	handle  *links.Handle
	ports   func() ([]devlink.Port, error)
	netdevs func() ([]physPort, error)

	view   view
	viewed time.Time    // when view was taken, zero if never
	stale  atomic.Bool  // a netdev was added or removed since view was taken
	known  map[int]bool // the ifindexes of netdevs for which there was an event
}

// NewFinder returns a Finder that reads netdevs by a handle, and devlink ports by a function that
// must not hang: see [PortLister].
func NewFinder(
	config Config, handle *links.Handle, ports func() ([]devlink.Port, error),
) *Finder {
	f := &Finder{config: config, handle: handle, ports: ports, known: map[int]bool{}}
	f.netdevs = f.physPorts
	return f
}

// maxAge limits the age of a view in which a representor is missing, because not every change has
// an event. A younger view is used as it is, because many ports may miss their representors at the
// same time.
const maxAge = 500 * time.Millisecond

// notFoundError says why a port certainly has no representor.
type notFoundError struct{ error }

// IsNotFound reports whether the error says that a port certainly has no representor. With any
// other error it is unknown whether the port has one.
func IsNotFound(err error) bool { return errors.As(err, new(notFoundError)) }

// Find returns the port's netdev. The error satisfies IsNotFound if there is none.
func (f *Finder) Find(port string) (netlink.Link, error) {
	named, err := f.handle.LinkByName(port)
	if errors.Is(err, links.ErrNotFound) {
		named, err = nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("netdev %s: %w", port, err)
	}

	return f.choose(port, named)
}

// FindAll returns the netdevs of many ports, with a list of all netdevs of the machine. It leaves
// out the ports that have no netdev.
func (f *Finder) FindAll(ports []string, all []netlink.Link) (map[string]netlink.Link, error) {
	byName := map[string]netlink.Link{}
	for _, link := range all {
		for _, name := range append(slices.Clone(link.Attrs().AltNames), link.Attrs().Name) {
			byName[name] = link
		}
	}

	found := map[string]netlink.Link{}
	for _, port := range ports {
		link, err := f.choose(port, byName[port])
		if IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("representor of port %s: %w", port, err)
		}
		found[port] = link
	}

	return found, nil
}

// WithMAC returns the id of the port of the Function for clients that has a MAC, as devlink reports
// it (hw_addr). It returns an error if there is not exactly one. Several goroutines may call it.
func (f *Finder) WithMAC(mac net.HardwareAddr) (port string, err error) {
	ports, err := f.ports()
	if err != nil {
		return "", err
	}

	var found []string
	for _, p := range ports {
		eswitch, _ := pci.Parse(p.Device.Name)
		at := eswitchPort{eswitch: eswitch, name: nameOf(p)}
		hasMAC := p.Function.MAC != "" && p.Function.MAC == function.MAC(mac.String())
		if hasMAC && at.name != (portName{}) && f.config.isForClients(at) {
			found = append(found, opi.PortIDAt(at.name.pf, at.name.function))
		}
	}

	if len(found) != 1 {
		return "", fmt.Errorf("%d functions of the host have MAC %s by devlink, want 1", len(found),
			mac)
	}

	return found[0], nil
}

// choose returns the netdev with the port's name if it may be the port, or else the netdev that the
// port's id resolves to. named is nil if no netdev has the port's name.
func (f *Finder) choose(port string, named netlink.Link) (netlink.Link, error) {
	var byName error = notFoundError{
		fmt.Errorf("netdev %s is missing: no netdev has it as its name or alternative name", port),
	}
	if named != nil {
		if byName = f.allows(port, named.Attrs().Index); byName == nil {
			return named, nil
		}
	}

	for retried := false; ; retried = true {
		index, err := f.ifindex(port)
		if err != nil {
			return nil, joinReasons(byName, err)
		}

		link, err := f.handle.LinkByIndex(index)
		if err == nil {
			return link, nil
		}
		if !errors.Is(err, links.ErrNotFound) || retried {
			return nil, fmt.Errorf("netdev with ifindex %d: %w", index, err)
		}

		f.stale.Store(true) // the event of the netdev's removal has not been read yet
	}
}

// joinReasons says why a port has no netdev, neither by its name nor by its id. The error satisfies
// IsNotFound only if both reasons do.
func joinReasons(byName, byID error) error {
	certain := IsNotFound(byName) && IsNotFound(byID)
	err := errors.New(byName.Error() + ", and by its id: " + byID.Error())
	if certain {
		return notFoundError{err}
	}
	return err
}

// ifindex returns the ifindex of the representor that the port's id resolves to. The error
// satisfies IsNotFound if there is none.
func (f *Finder) ifindex(port string) (int, error) {
	at, err := f.config.resolve(port)
	if err != nil {
		return 0, notFoundError{err}
	}

	if !f.stale.Load() {
		index, err := f.view.find(at)
		if err == nil || time.Since(f.viewed) <= maxAge {
			return index, err
		}
	}

	if err := f.refresh(); err != nil {
		return 0, err
	}

	return f.view.find(at)
}

// allows returns nil if a netdev that has the port's name may be the port: the configuration allows
// the name, or the netdev represents a Function for clients. The error satisfies IsNotFound if the
// netdev certainly may not be the port.
func (f *Finder) allows(port string, index int) error {
	if f.config.allowsName(port) {
		return nil
	}

	isForClients := func() bool {
		return slices.ContainsFunc(f.view.functions[index], f.config.isForClients)
	}
	if f.stale.Load() || !isForClients() && time.Since(f.viewed) > maxAge {
		if err := f.refresh(); err != nil {
			return err
		}
	}

	if isForClients() {
		return nil
	}

	if err := f.view.noDevlink; err != nil {
		return fmt.Errorf(
			"netdev %s: whether it represents a function of the host is not known: %w", port, err,
		)
	}

	return notFoundError{fmt.Errorf("netdev %s: represents no function of the host; if it is "+
		"to be a port all the same, give it to opi-bridge with --representor %s", port, port)}
}

// refresh takes a new view.
func (f *Finder) refresh() error {
	// stale is reset before listing, because a netdev that is added from now on may be missing from
	// the list.
	f.stale.Store(false)
	// An interrupted list would take the ports of the netdevs that it lacks out of service.
	netdevs, err := request.Consistent(f.netdevs)
	if err != nil {
		f.stale.Store(true)
		return fmt.Errorf("list netdevs: %w", err)
	}

	// The ports are listed after the netdevs, so that the view has the port of each of its netdevs.
	ports, noDevlink := f.ports()
	f.view, f.viewed = newView(ports, noDevlink, netdevs), time.Now()

	return nil
}

// Added notes an event of a netdev, and reports whether it is the first event of this netdev. The
// first event counts even if the view has the netdev already, because the ports that miss their
// representor are reconciled because of it.
func (f *Finder) Added(index int) (first bool) {
	if f.known[index] {
		return false
	}
	f.known[index] = true
	f.stale.Store(true)
	return true
}

// Removed notes that a netdev was removed.
func (f *Finder) Removed(index int) {
	delete(f.known, index)
	f.stale.Store(true)
}

// EventsLost notes that any netdev may have been added or removed.
func (f *Finder) EventsLost() {
	clear(f.known)
	f.stale.Store(true)
}
