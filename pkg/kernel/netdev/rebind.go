package netdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// RebindDriver is a [Rebind] by sysfs. It refuses a PF that has VFs, as these end with its driver. A device whose driver could
// not be bound again has none, which the health of the Function says.
func RebindDriver(sysRoot string) Rebind {
	return func(ctx context.Context, bus, device string) error {
		dir := sysfs.Root(sysRoot).Dir("bus", bus, "devices", device)
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

		// Nothing ends the call between the two: without its driver the device is of no use.
		orders := sysfs.Root(sysRoot).Dir("bus", bus, "drivers", driver)
		if err := orders.Write("unbind", device); err != nil {
			return fmt.Errorf("unbind %s: %w", driver, err)
		}
		if err := orders.Write("bind", device); err != nil {
			return fmt.Errorf("bind %s: %w", driver, err)
		}
		return nil
	}
}
