// Package quirk has what the code needs to know of single drivers that behave otherwise than the rest. Comments name a quirk as
// docs/reference/quirks.md does, which lists all. The code does not ask which driver it meets where it can do without: what
// one driver needs is done for all, if it harms none.
package quirk

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// CarrierPatience is how long a PF may take to have its carrier back. igb was seen to take 0.3-5 s. See "rates need a
	// carrier".
	CarrierPatience = 5 * time.Second
	// DDPDriver is the only driver that tells its DDP package by devlink, and DDPVersion is the version that it tells it
	// as. See "DDP package".
	DDPDriver  = "ice"
	DDPVersion = "fw.app.name"
	// NoIOMMUGroup is what vfio calls groups that it makes up where there is no IOMMU, and NoIOMMUPrefix the prefix of
	// their device nodes. See "groups without an IOMMU".
	NoIOMMUGroup  = "vfio-noiommu"
	NoIOMMUPrefix = "noiommu-"
	// VirtioDriver binds PCI devices whose netdev is that of a virtio device below them. See "netdev below virtio".
	VirtioDriver = "virtio-pci"
)

// errNotSupported is the kernel's ENOTSUPP (include/linux/errno.h).
const errNotSupported = unix.Errno(524)

// NotSupported says whether the kernel or a driver has no such thing. See "ENOTSUPP".
func NotSupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, errNotSupported)
}
