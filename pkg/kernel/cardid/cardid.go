// SPDX-License-Identifier: Apache-2.0

// Package cardid reads what tells a card from all others: on the host and on the xPU itself, which
// see the same card.
package cardid

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/vpd"
)

// Names of versions that name a board (Documentation/networking/devlink/devlink-info.rst).
const (
	versionPSID    = "fw.psid"
	versionBoardID = "board.id"
)

// Read returns what is known without the PF's netdev. It asks the driver, and for the serial number
// reads the card's Vital Product Data if the driver does not tell it. If the driver fails to answer
// it does not, as drivers may tell another number than these data. A card may take long to answer.
func Read(sysRoot string, pf pci.Address) (function.Card, error) {
	card, err := ofDriver(pf)
	if err == nil && card.Serial == "" {
		card.Serial, err = inVPD(sysRoot, pf)
	}
	return card, err
}

// ofDriver returns what "devlink dev info" shows. Its socket is its own, so that a card that hangs
// holds up no other.
func ofDriver(pf pci.Address) (function.Card, error) {
	conn, err := devlink.Dial("")
	if err != nil {
		return function.Card{}, err
	}
	defer conn.Close()

	info, err := conn.Info(devlink.OfPCI(pf))
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) {
		return function.Card{}, nil
	}

	return function.Card{
		Serial: info.Serial, Board: cmp.Or(info.Fixed[versionPSID], info.Fixed[versionBoardID]),
	}, err
}

// inVPD returns "" where a card has no Vital Product Data.
func inVPD(sysRoot string, pf pci.Address) (string, error) {
	file, err := os.Open(string(sysfs.Root(sysRoot).PCI(pf).Dir("vpd")))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer file.Close()

	serial, err := vpd.SerialNumber(file)
	if err != nil {
		return "", fmt.Errorf("vpd: %w", err)
	}

	return serial, nil
}
