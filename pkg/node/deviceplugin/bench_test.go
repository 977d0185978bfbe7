// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// bigPools returns different pools with the given number of VFs each, on four PFs each.
func bigPools(vfs, pools int) (all []pool.Pool, resources []string) {
	for p := range pools {
		functions := make([]function.Function, 0, vfs)
		for i := range vfs {
			functions = append(functions, function.Function{
				ID: function.ID{
					Address: pci.Address(fmt.Sprintf("%04x:%02x:%02x.%d", p, i/256, i/8%32, i%8)),
				},
				Kind: function.VF, PF: pci.Address(fmt.Sprintf("%04x:%02x:00.0", p, i*4/vfs)),
				Index: i, LinkUp: true,
			})
		}

		all = append(all, poolOf(fmt.Sprint("pool", p), functions...))
		resources = append(resources, fmt.Sprint("xpu.opiproject.org/pool", p))
	}
	return all, resources
}

// BenchmarkStart measures the time from the start of a manager that knows its pools until every
// resource has sent its first list.
func BenchmarkStart(b *testing.B) {
	for _, size := range []struct{ vfs, pools int }{{64, 1}, {1024, 1}, {1024, 10}} {
		b.Run(fmt.Sprintf("%dx%d", size.vfs, size.pools), func(b *testing.B) {
			pools, resources := bigPools(size.vfs, size.pools)
			for b.Loop() {
				b.StopTimer()
				dir := must.SocketDir(b)
				kubelet := kubelettest.New(dir, kubelettest.Options{})
				if err := kubelet.Start(); err != nil {
					b.Fatal(err)
				}

				n := &node{pools: pools, known: true}
				m := newManager(b, dir, n, logr.Discard())
				ctx, stop := context.WithCancel(b.Context())
				done := make(chan error, 1)
				b.StartTimer()
				go func() { done <- m.Run(ctx, nil) }()
				waiting, cancel := context.WithTimeout(ctx, patience)
				err := kubelet.Wait(waiting, func() bool {
					for _, resource := range resources {
						if len(kubelet.Devices(resource)) != size.vfs {
							return false
						}
					}
					return true
				})

				b.StopTimer()
				cancel()
				stop()
				if err != nil {
					b.Fatal(err)
				}
				if err := <-done; err != nil {
					b.Fatal(err)
				}

				kubelet.Stop()
				b.StartTimer()
			}
		})
	}
}

// BenchmarkAllocate measures one Allocate of one of 1024 VFs, over the socket.
func BenchmarkAllocate(b *testing.B) {
	dir := must.SocketDir(b)
	kubelet := kubelettest.New(dir, kubelettest.Options{})
	if err := kubelet.Start(); err != nil {
		b.Fatal(err)
	}
	defer kubelet.Stop()

	pools, resources := bigPools(1024, 1)
	n := &node{pools: pools, known: true}
	m := newManager(b, dir, n, logr.Discard())
	m.DeviceInfo = NewDeviceInfo(must.MemoryDir(b), must.MemoryDir(b))
	ctx, stop := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx, nil) }()

	if err := kubelet.Wait(ctx, func() bool {
		return len(kubelet.Devices(resources[0])) == 1024
	}); err != nil {
		b.Fatal(err)
	}

	var took []time.Duration
	i := 0
	for b.Loop() {
		begin := time.Now()
		if _, err := kubelet.Allocate(ctx, resources[0],
			pools[0].Functions[i%1024].ID.String()); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begin))
		i++
	}

	b.ReportMetric(float64(percentile(took, 99).Microseconds()), "p99-µs")
	stop()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}

func percentile(took []time.Duration, percent int) time.Duration {
	slices.Sort(took)
	return took[len(took)*percent/100]
}
