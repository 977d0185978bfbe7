// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// absence knows for how long PCI devices have been missing. It believes only looks at the bus that
// found devices, one after the other: after one that did not, all that was known is forgotten. An
// entry of the bus is there, whether it can be read or not. The times are of the monotonic clock.
type absence struct {
	sysfs sysfs.Root

	mutex sync.Mutex
	// begun is the time of the first look since the last one that failed; zero after that one.
	begun time.Time
	there map[string]bool
	// left has the devices that a look found missing after another look had found them.
	left map[string]time.Time
}

// look sees which devices are there.
func (a *absence) look() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.see()
}

// see is look for a caller that holds the mutex.
func (a *absence) see() {
	names, _, err := a.sysfs.Dir(sysfs.PCIDevices).Names()
	if err != nil || len(names) == 0 {
		a.begun = time.Time{}
		return
	}

	now := time.Now()
	if a.begun.IsZero() {
		a.begun, a.there, a.left = now, nil, map[string]time.Time{}
	}

	before := a.there
	a.there = make(map[string]bool, len(names))
	for _, name := range names {
		a.there[name] = true
		delete(a.left, name)
	}
	for name := range before {
		if !a.there[name] {
			a.left[name] = now
		}
	}
}

// forget forgets everything, because the devices could not be read.
func (a *absence) forget() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.begun = time.Time{}
}

// missingFor looks once more, and returns for how long all looks have found the device missing. It
// returns false if one of the devices of the bus has the address, or if that is not known.
func (a *absence) missingFor(address pci.Address) (known time.Duration, missing bool) {
	a.mutex.Lock()
	defer a.mutex.Unlock()

	a.see()
	gone, err := a.sysfs.Gone(a.sysfs.PCI(address))
	switch {
	case err != nil:
		a.begun = time.Time{}
	case gone && !a.begun.IsZero() && !a.there[string(address)]:
		since, seen := a.left[string(address)]
		if !seen {
			since = a.begun
		}
		return time.Since(since), true
	}
	return 0, false
}

// MissingFor returns for how long the kernel has not had the PCI device, as far as this process has
// seen it without interruption: every scan and a look now found other devices, and not this one.
// missing is false for a device that is there, and while anything of that is unknown.
func (i *Inventory) MissingFor(address pci.Address) (known time.Duration, missing bool) {
	return i.absence.missingFor(address)
}
