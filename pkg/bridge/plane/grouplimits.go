// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// groupLimits are the sysctls that limit how many multicast groups a socket may join. All VXLAN
// ports of the machine share one socket of the kernel. The kernel's default for the number of
// groups is enough for 20 networks. Its default for option memory is enough for about 400 networks
// before Linux 6.7, because a group takes 48 bytes of it (ip_mc_join_group). These values are
// enough for more networks than there are VLAN ids.
var groupLimits = map[string]int{
	"net/ipv4/igmp_max_memberships": 1 << 16,
	"net/core/optmem_max":           1 << 18,
}

// raiseGroupLimits raises the limits that are too low, in the network namespace of the calling
// thread. root is a directory with the files of /proc/sys.
func raiseGroupLimits(root string) error {
	var failed []error
	for name, enough := range groupLimits {
		path := filepath.Join(root, name)
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) && name == "net/core/optmem_max" {
			continue // exists only in the first namespace before Linux 6.7
		}

		have, errNumber := strconv.Atoi(strings.TrimSpace(string(text)))
		if err == nil {
			err = errNumber
		}

		if err == nil && have < enough {
			err = os.WriteFile(path, strconv.AppendInt(nil, int64(enough), 10), 0)
		}

		if err != nil {
			failed = append(failed,
				fmt.Errorf("sysctl %s: %w", strings.ReplaceAll(name, "/", "."), err))
		}
	}

	return errors.Join(failed...)
}

// explainGroupLimits says what to do if a VXLAN port could not join its multicast group.
func explainGroupLimits(err error) error {
	if !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.ENOMEM) {
		return err
	}
	return fmt.Errorf("%w: the kernel lets no more networks with a VNI join their multicast "+
		"groups; on the xPU, as root: "+
		"sysctl -w net.ipv4.igmp_max_memberships=%d net.core.optmem_max=%d",
		err, groupLimits["net/ipv4/igmp_max_memberships"], groupLimits["net/core/optmem_max"])
}
