// SPDX-License-Identifier: Apache-2.0

// Package cardid reads the properties that identify a card. The host and the xPU see the same card,
// so both read the same identity.
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

// These versions name the board of a card (Documentation/networking/devlink/devlink-info.rst).
const (
	versionPSID    = "fw.psid"
	versionBoardID = "board.id"
)

// Read returns the identity of the card of a PF. It does not need the PF's netdev. A slow card may
// take seconds to answer.
//
// Read asks the driver first. If the driver answers without a serial number, Read takes the serial
// number from the card's Vital Product Data. If the driver fails to answer, Read returns the error
// and does not read the Vital Product Data, because their serial number may differ from the one of
// the driver.
func Read(sysRoot string, pf pci.Address) (function.Card, error) {
	card, err := ofDriver(pf)
	if err == nil && card.Serial == "" {
		card.Serial, err = inVPD(sysRoot, pf)
	}
	return card, err
}

// ofDriver returns what "devlink dev info" shows of the PF, or the zero value if the driver has no
// such information. It opens a socket for each call, so that a card that hangs does not delay
// others.
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

// inVPD returns the serial number in the card's Vital Product Data, or "" if the card has no such
// data.
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
