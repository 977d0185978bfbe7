package inventory

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
)

// ddpKey changes whenever a PF may run another package: ice loads it when it is bound or reloaded, and that makes the
// netdev anew.
type ddpKey struct {
	instance instance
	driver   string
	netdev   string
}

// ddpProfile is a package that was read once.
type ddpProfile struct {
	key  ddpKey
	name string
}

// readDDPProfile asks at most once as long as the answer cannot change: it takes the firmware a while.
func (s *scanner) readDDPProfile(pf pci.Address, key ddpKey, known ddpProfile) ddpProfile {
	if key.driver != quirk.DDPDriver {
		return ddpProfile{}
	}
	if key.netdev == "" { // it is in a pod
		key.netdev = known.key.netdev
	}
	if key == known.key {
		return known
	}
	name, err := s.options.DDPProfile(pf)
	if err != nil {
		s.report(s.sysfs.PCI(pf), reasonDDP, err)
		return ddpProfile{}
	}
	return ddpProfile{key, name}
}

// devlinkDDPProfile reads what "devlink dev info" shows as fw.app.name, "" where a driver has no such thing.
func devlinkDDPProfile(netNS string, pf pci.Address) (string, error) {
	conn, err := devlink.Dial(netNS)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	versions, err := conn.RunningVersions(devlink.OfPCI(pf))
	if errors.Is(err, unix.EOPNOTSUPP) {
		return "", nil
	}
	return versions[quirk.DDPVersion], err
}
