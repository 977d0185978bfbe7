package devlink

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

func deviceOf(a attribute.Set) Device {
	return Device{Bus: a.Text(unix.DEVLINK_ATTR_BUS_NAME), Name: a.Text(unix.DEVLINK_ATTR_DEV_NAME)}
}

// attributes name the device in a request.
func (d Device) attributes() []*nl.RtAttr {
	return []*nl.RtAttr{
		nl.NewRtAttr(unix.DEVLINK_ATTR_BUS_NAME, nl.ZeroTerminated(d.Bus)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_DEV_NAME, nl.ZeroTerminated(d.Name)),
	}
}

func portIndex(index uint32) *nl.RtAttr {
	return nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_INDEX, nl.Uint32Attr(index))
}

// one is the answer to a question that has one.
func one(messages [][]byte) (attribute.Set, error) {
	if len(messages) != 1 {
		return nil, fmt.Errorf("%d answers, want 1", len(messages))
	}
	return attribute.Parse(messages[0])
}

// list decodes one object from each message.
func list[T any](messages [][]byte, decode func(attribute.Set) (T, error)) ([]T, error) {
	var all []T
	for _, m := range messages {
		attrs, err := attribute.Parse(m)
		if err != nil {
			return nil, err
		}
		object, err := decode(attrs)
		if err != nil {
			return nil, err
		}
		all = append(all, object)
	}
	return all, nil
}
