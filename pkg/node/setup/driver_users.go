package setup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// awaitUnused waits a little until no program has the device's IOMMU group open. vfio-pci would not let the device go,
// and a process that waits in the kernel for that cannot even be killed.
func (p *PCIDrivers) awaitUnused(ctx context.Context, d sysfs.Dir) error {
	group, err := d.Link("iommu_group")
	if err != nil || group == "" {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, endTime, errors.New("is still in use"))
	defer cancel()
	err = wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(context.Context) (bool, error) {
		return !p.isOpen(d, group), nil
	})
	if err != nil {
		return p.stillUsed(d, context.Cause(ctx))
	}
	return nil
}

// isOpen says whether a program has the group: the kernel lets one have it (vfio_group_fops_open). Where this process
// may not open device nodes, as in a container without privileges, it says whether a program has enabled the device,
// which vfio-pci does when it is opened and undoes when it is closed (vfio_pci_core_enable).
func (p *PCIDrivers) isOpen(d sysfs.Dir, group string) bool {
	for _, node := range nodesOf(group) {
		fd, err := unix.Open(filepath.Join(p.DevRoot, node), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil {
			_ = unix.Close(fd)
			return false
		}
		if errors.Is(err, unix.EBUSY) {
			return true
		}
	}
	enabled, err := d.Number("enable") // counts how often
	return err == nil && enabled != 0
}

// nodesOf lists where a group's device node can be, below /dev. That of a group without an IOMMU has a prefix.
func nodesOf(group string) []string {
	return []string{"vfio/" + group, "vfio/" + quirk.NoIOMMUPrefix + group}
}

// stillUsed adds to an error, as far as that can be seen, which processes have the device's IOMMU group open: "process
// 4711 (dpdk-testpmd)". The directory of the node that a process opened is not compared, as it is below that process's own
// root.
func (p *PCIDrivers) stillUsed(d sysfs.Dir, err error) error {
	group, groupErr := d.Link("iommu_group")
	if groupErr != nil || group == "" {
		return err
	}
	nodes := nodesOf(group)
	descriptors, _ := filepath.Glob(filepath.Join(p.ProcRoot, "[0-9]*/fd/*"))
	var holders []string
	for _, fd := range descriptors {
		target, _ := os.Readlink(fd) // the process may have ended
		if slices.ContainsFunc(nodes, func(node string) bool { return strings.HasSuffix(target, "/"+node) }) {
			process := filepath.Dir(filepath.Dir(fd))
			name, _ := os.ReadFile(filepath.Join(process, "comm"))
			holders = append(holders, fmt.Sprintf("process %s (%s)", filepath.Base(process), strings.TrimSpace(string(name))))
		}
	}
	if len(holders) == 0 {
		return fmt.Errorf("IOMMU group %s: %w", group, err)
	}
	return fmt.Errorf("IOMMU group %s is open in %s, which must end first: %w",
		group, strings.Join(slices.Compact(holders), ", "), err)
}
