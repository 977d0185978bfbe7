// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// Rebinding makes it possible to bind a driver again even if the process ends between unbind and
// bind. The caller of [Engine.Restore] must keep the driver durably, because a device without its
// driver is of no use.
type Rebinding struct {
	// Driver is the driver that an earlier call was about to unbind, or "". If the device has no
	// driver and no netdev, Restore binds this driver.
	Driver string
	// Intend stores the driver durably. It is called before the driver is unbound. If it returns an
	// error, the driver is not unbound.
	Intend func(driver string) error
}

func (r *Rebinding) unfinished() bool { return r != nil && r.Driver != "" }

// rebind unbinds the driver of a device and binds it again. This destroys the netdevs of the device
// and all netdevs on top of them, in every namespace. The driver then makes new netdevs, possibly a
// moment after rebind returns.
//
// rebind refuses a PF that has VFs, because its VFs would end with the driver.
func (e *Engine) rebind(
	ctx context.Context, who Identity, intend func(driver string) error,
) error {
	dir := e.deviceDir(who)
	driver, err := dir.Link("driver")
	switch {
	case err != nil:
		return err
	case driver == "":
		return errors.New("has no driver")
	}

	switch vfs, err := dir.Number("sriov_numvfs"); {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case vfs > 0:
		return fmt.Errorf("has %d VFs, which would end", vfs)
	}

	if err := ctx.Err(); err != nil {
		return err
	}
	if err := intend(driver); err != nil {
		return err
	}

	// After the unbind, the call always tries to bind, even if ctx has ended. Only the end of the
	// process can prevent this.
	for _, order := range []string{"unbind", "bind"} {
		if err := e.orderDriver(who, driver, order); err != nil {
			return err
		}
	}

	return nil
}

// bind binds a driver to a device. It does nothing if the device does not exist or has a driver. It
// succeeds if the device gets another driver meanwhile.
func (e *Engine) bind(who Identity, driver string) error {
	dir := e.deviceDir(who)
	current, err := dir.Link("driver")
	if current != "" || err != nil {
		return err
	}
	if gone, err := sysfs.Root(e.sysRoot).Gone(dir); gone || err != nil {
		return err
	}
	if !e.driverDir(who, driver).Exists() {
		return fmt.Errorf("the node does not have driver %s any more: load its module again",
			driver)
	}

	err = e.orderDriver(who, driver, "bind")
	if current, _ := dir.Link("driver"); current != "" {
		return nil
	}

	return err
}

// orderDriver makes a driver bind or unbind a device.
func (e *Engine) orderDriver(who Identity, driver, order string) error {
	return e.step(fmt.Sprintf("%s %s of %s", order, driver, who.Parent), func() error {
		return e.driverDir(who, driver).Write(order, who.Parent)
	})
}

func (e *Engine) deviceDir(who Identity) sysfs.Dir {
	return sysfs.Root(e.sysRoot).Dir("bus", who.Bus, "devices", who.Parent)
}

func (e *Engine) driverDir(who Identity, driver string) sysfs.Dir {
	return sysfs.Root(e.sysRoot).Dir("bus", who.Bus, "drivers", driver)
}
