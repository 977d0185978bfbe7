// Package sriov makes the Functions that DevicePools ask for. It works between the declaration of pools, which it
// reads, and their publication, which waits for nothing: pools have the Functions that are there.
package sriov

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// pause is the shortest time between two looks at one PF that is in use: pods come and go in crowds.
	pause = 200 * time.Millisecond
	// firstRetry and slowestRetry are the pauses before a PF is looked at again that did not get its VFs, or whose VFs the
	// inventory does not know yet. Not everything that frees a PF tells of it.
	firstRetry, slowestRetry = time.Second, time.Minute
)

// Snapshots knows all of the node's Functions.
type Snapshots interface {
	// Snapshot returns all Functions, sorted.
	Snapshot() []function.Function
}

// Pools knows the node's pools.
type Pools interface {
	// Pools returns the pools as they are now; known is false until they have been read once.
	Pools() (pools []pool.Pool, known bool)
}

// Journal knows who has which Function.
type Journal interface {
	All() []journal.Attachment
	// Lock makes the caller the only one to work on a Function until it calls unlock.
	Lock(ctx context.Context, id function.ID) (unlock func(), err error)
	// Subscribe returns a channel that receives a value after changes.
	Subscribe(ctx context.Context) <-chan struct{}
}

// VFs gives the PFs of the node as many VFs as DevicePools ask for by spec.numVFs, and tells of PFs that it cannot give
// them. A PF that somebody uses, or one of whose VFs somebody uses, is never changed; one that has as many already is
// not touched. It keeps no state on disk: what is wanted is in the DevicePools, what there is the kernel knows.
type VFs struct {
	// SysRoot is where the host's sysfs is, writable.
	SysRoot     string
	Functions   Snapshots
	Pools       Pools
	Journal     Journal
	Assignments Assignments
	// NetdevUse says what the host does with a netdev, "" for nothing.
	NetdevUse func(netdev string) (string, error)
	// Changed, where set, is called when what [VFs.Supply] says has changed. It must neither block nor call methods of VFs.
	Changed func()
	// Writing, where set, is called before a number of VFs is written to a PF's sriov_numvfs.
	Writing func(pf pci.Address, n int)
	Metrics *Metrics
	Log     logr.Logger

	queue   workqueue.TypedRateLimitingInterface[pci.Address] // of PFs
	running sync.WaitGroup

	mutex    sync.Mutex
	pfs      map[pci.Address]*pfState // those that DevicePools with numVFs name
	supplies map[string]pool.Supply   // by DevicePool
}

// Supply says what a DevicePool with numVFs lacks on this node; known is false until that has been looked at. It does
// not wait for work on PFs.
func (v *VFs) Supply(devicePool string) (s pool.Supply, known bool) {
	v.mutex.Lock()
	defer v.mutex.Unlock()
	s, known = v.supplies[devicePool]
	return s, known
}

// Describe is that of a [prometheus.Collector], of what pools lack.
func (v *VFs) Describe(descs chan<- *prometheus.Desc) { descs <- shortagesDesc }

// Collect is that of a [prometheus.Collector].
func (v *VFs) Collect(metrics chan<- prometheus.Metric) {
	pools, _ := v.Pools.Pools()
	for _, p := range pools {
		supply, _ := v.Supply(p.Name)
		count := map[string]int{}
		for _, s := range slices.Concat(supply.Shortages, p.Shortages) {
			count[s.Reason]++
		}
		for reason, n := range count {
			metrics <- prometheus.MustNewConstMetric(shortagesDesc, prometheus.GaugeValue, float64(n), p.Name, reason)
		}
	}
}

// device is what the kernel shows of a PCI device.
func (v *VFs) device(a pci.Address) sysfs.Dir { return sysfs.Root(v.SysRoot).PCI(a) }

// vfs lists the VFs of a PF by index.
func (v *VFs) vfs(pf pci.Address) ([]pci.Address, error) {
	links, err := v.device(pf).VFs()
	if err != nil {
		return nil, err
	}
	vfs := make([]pci.Address, 0, len(links))
	for _, link := range links {
		vfs = append(vfs, link.Address)
	}
	return vfs, nil
}
