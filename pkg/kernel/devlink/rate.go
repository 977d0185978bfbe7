package devlink

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// bytesPerMbit is what devlink counts where Rate has 1.
const bytesPerMbit = 1_000_000 / 8

// Rate asks for the limits of what the Function behind a port sends. exists is false where the port has no rate object,
// or is not there itself.
func (c *Conn) Rate(d Device, index uint32) (rate Rate, exists bool, err error) {
	defer explain(&err, "port function rate show %s/%d", d, index)
	attrs, err := c.ask(unix.DEVLINK_CMD_RATE_GET, d, portIndex(index))
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) { // EOPNOTSUPP: before Linux 5.14
		return Rate{}, false, nil
	}
	if err != nil {
		return Rate{}, false, err
	}
	return decodeRate(attrs), true, nil
}

func decodeRate(attrs attribute.Set) Rate {
	return Rate{
		Share: mbits(attrs.Uint64(unix.DEVLINK_ATTR_RATE_TX_SHARE)),
		Max:   mbits(attrs.Uint64(unix.DEVLINK_ATTR_RATE_TX_MAX)),
	}
}

// mbits rounds up: any limit at all is not 0, which would be none.
func mbits(bytesPerSecond uint64) int {
	n := bytesPerSecond / bytesPerMbit
	if bytesPerSecond%bytesPerMbit != 0 {
		n++
	}
	return int(n)
}

// SetRate limits what the Function behind a port sends. Only what differs is set, as there are drivers that have one
// of the limits only. If the kernel refuses one, both are what they were. EOPNOTSUPP: the driver has no such limit;
// ENODEV: the port has no rate object.
func (c *Conn) SetRate(d Device, index uint32, to Rate) (err error) {
	if to.Share < 0 || to.Max < 0 {
		return fmt.Errorf("rate of port %s/%d: share %d and max %d Mbit/s must not be negative", d, index, to.Share, to.Max)
	}
	defer explain(&err, "port function rate set %s/%d tx_share %dmbit tx_max %dmbit", d, index, to.Share, to.Max)
	port := portIndex(index)
	before, err := c.ask(unix.DEVLINK_CMD_RATE_GET, d, port)
	if err != nil {
		return err
	}
	now := decodeRate(before)
	var changes, undo []*nl.RtAttr
	note := func(kind int, now, to int) {
		if now != to {
			changes = append(changes, nl.NewRtAttr(kind, nl.Uint64Attr(uint64(to)*bytesPerMbit)))
			undo = append(undo, nl.NewRtAttr(kind, nl.Uint64Attr(before.Uint64(uint16(kind)))))
		}
	}
	note(unix.DEVLINK_ATTR_RATE_TX_SHARE, now.Share, to.Share)
	note(unix.DEVLINK_ATTR_RATE_TX_MAX, now.Max, to.Max)
	if len(changes) == 0 {
		return nil
	}
	if _, err = c.do(unix.DEVLINK_CMD_RATE_SET, d, append(changes, port)...); err == nil {
		return nil
	}
	if len(undo) > 1 { // the kernel sets the share, then the maximum, and leaves the one where it fails at the other
		if _, failed := c.do(unix.DEVLINK_CMD_RATE_SET, d, undo[0], port); failed != nil {
			return errors.Join(err, fmt.Errorf("put tx_share back: %w", failed))
		}
	}
	return err
}
