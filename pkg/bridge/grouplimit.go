// SPDX-License-Identifier: Apache-2.0

package bridge

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

// groupLimits are the sysctls that bound how many multicast groups a socket may join, and values
// that suffice for more networks than there are VLAN ids. All VXLAN ports share the kernel's one
// socket for their UDP port. The kernel's own values suffice for 20 networks and, before Linux 6.7,
// with more groups for some 400: a group takes 48 bytes of a socket's option memory
// (ip_mc_join_group).
var groupLimits = map[string]int{
	"net/ipv4/igmp_max_memberships": 1 << 16,
	"net/core/optmem_max":           1 << 18,
}

// raiseGroupLimits raises those of the calling thread's network namespace that are too low. root
// has what /proc/sys has.
func raiseGroupLimits(root string) error {
	var failed []error
	for name, enough := range groupLimits {
		path := filepath.Join(root, name)
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) && name == "net/core/optmem_max" {
			continue // not in every namespace before Linux 6.7
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

// explainGroupLimits adds to the error of a VXLAN port that could not join its group what to do
// about it.
func explainGroupLimits(err error) error {
	if !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.ENOMEM) {
		return err
	}
	return fmt.Errorf("%w: the kernel lets no more networks with a VNI join their multicast "+
		"groups; on the xPU, as root: "+
		"sysctl -w net.ipv4.igmp_max_memberships=%d net.core.optmem_max=%d",
		err, groupLimits["net/ipv4/igmp_max_memberships"], groupLimits["net/core/optmem_max"])
}
