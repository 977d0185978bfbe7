// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
)

// kernel has PFs that report counters of their VFs, except for eth1.
type kernel struct {
	mutex sync.Mutex
	asked []string
	pods  int
}

func (k *kernel) VFCounters(pf, address string) (map[int]netdev.Counters, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.asked = append(k.asked, pf+" "+address)
	if pf == "eth1" {
		return nil, errors.New("no such device")
	}
	return map[int]netdev.Counters{1: {RxPackets: 3, TxBytes: 500, RxDropped: 2}}, nil
}

func (k *kernel) Counters(place netdev.Place) (netdev.Counters, bool, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.pods++
	return netdev.Counters{RxPackets: 7, TxBytes: 900}, place.Index == 5, nil
}

func TestCollect(t *testing.T) {
	vfs := append(pooltest.VFs(0x3b, 3), pooltest.VFs(0x5e, 1)...)
	for i := range vfs {
		vfs[i].PFName, vfs[i].NUMANode = "eth0", 1
	}

	vfs[3].PFName = "eth1"
	away := pooltest.VFs(0x5f, 2) // another PF has got the name of its PF
	away[1].PFName = "eth0"
	functions := slices.Concat(vfs, away)
	for pf, name := range map[pci.Address]string{
		vfs[0].PF: "eth0", vfs[3].PF: "eth1", away[0].PF: "",
	} {
		f := function.OfPF(pf)
		f.Netdev = name
		functions = append(functions, f)
	}

	attached := func(f function.Function, pod string, index int) journal.Attachment {
		return journal.Attachment{
			Function: f.ID, State: journal.Attached, Pod: journal.Pod{
				Namespace: "default", Name: pod,
			}, Port: &journal.Port{Network: "blue"},
			Place: netdev.Place{Index: index}, Observed: &netdev.Observed{Name: "net1"},
		}
	}

	dpdk := attached(vfs[2], "dpdk", 5)
	dpdk.Interface.Userspace, dpdk.Resource = true, "xpu.opiproject.org/plain"
	reserved := attached(vfs[3], "coming", 5)
	reserved.State = journal.Reserved
	k := &kernel{}
	c := &Collector{
		Functions: func() []function.Function { return functions },
		Attachments: func() []journal.Attachment {
			return []journal.Attachment{
				attached(vfs[1], "web", 5), dpdk, attached(vfs[0], "ending", 6), reserved,
			}
		},
		PoolOf: func(function.ID) string { return "fast" }, Kernel: k, Log: testr.New(t),
	}

	want := `
# HELP sriov_kubepoddevice Constantly 1: which pod has which Function.
# TYPE sriov_kubepoddevice gauge
sriov_kubepoddevice{container="",dev_type="xpu.opiproject.org/fast",namespace="default",pciAddr="` + vfs[0].ID.String() + `",pod="ending"} 1
sriov_kubepoddevice{container="",dev_type="xpu.opiproject.org/fast",namespace="default",pciAddr="` + vfs[1].ID.String() + `",pod="web"} 1
sriov_kubepoddevice{container="",dev_type="xpu.opiproject.org/plain",namespace="default",pciAddr="` + vfs[2].ID.String() + `",pod="dpdk"} 1
# HELP sriov_vf_rx_dropped Packets to a VF that were dropped, as its PF counts them.
# TYPE sriov_vf_rx_dropped counter
sriov_vf_rx_dropped{numa_node="1",pciAddr="` + vfs[1].ID.String() + `",pf="eth0",vf="1"} 2
# HELP xpu_pod_transmit_bytes_total Bytes that a pod sent by a Function.
# TYPE xpu_pod_transmit_bytes_total counter
xpu_pod_transmit_bytes_total{function="` + vfs[1].ID.String() + `",interface="net1",namespace="default",network="blue",pod="web",pool="fast"} 900
`

	err := testutil.CollectAndCompare(c, strings.NewReader(want), "sriov_kubepoddevice",
		"sriov_vf_rx_dropped", "xpu_pod_transmit_bytes_total")
	if err != nil {
		t.Error(err)
	}
	if slices.Sort(k.asked); !slices.Equal(k.asked,
		[]string{"eth0 " + string(vfs[0].PF), "eth1 " + string(vfs[3].PF)}) {
		t.Errorf("the kernel was asked about PFs %v, want each once", k.asked)
	}

	if problems, err := testutil.CollectAndLint(c); err != nil {
		t.Error(err)
	} else {
		for _, p := range problems {
			if !strings.HasPrefix(p.Metric, "sriov_") { // names of another project
				t.Errorf("%s: %s", p.Metric, p.Text)
			}
		}
	}
}

// pfsOf returns the PFs of the VFs. The netdev of each PF has this name.
func pfsOf(netdev string, vfs ...function.Function) (pfs []function.Function) {
	known := map[pci.Address]bool{}
	for _, vf := range vfs {
		if !known[vf.PF] {
			known[vf.PF] = true
			pf := function.OfPF(vf.PF)
			pf.Netdev = netdev
			pfs = append(pfs, pf)
		}
	}

	return pfs
}

// TestManyScrapesAtOnce checks that PFs and pods are asked once, and again after a second.
func TestManyScrapesAtOnce(t *testing.T) {
	vfs := pooltest.VFs(0x3b, 3)
	for i := range vfs {
		vfs[i].PFName = "eth0"
	}

	attachment := journal.Attachment{
		Function: vfs[1].ID, State: journal.Attached, Place: netdev.Place{Index: 5},
		Observed: &netdev.Observed{Name: "net1"},
	}

	k, now := &kernel{}, time.Unix(1, 0)
	c := &Collector{
		Functions:   func() []function.Function { return append(pfsOf("eth0", vfs...), vfs...) },
		Attachments: func() []journal.Attachment { return []journal.Attachment{attachment} },
		PoolOf:      func(function.ID) string { return "fast" }, Kernel: k, Log: testr.New(t),
		Now: func() time.Time { return now },
	}

	for round := 1; round <= 2; round++ {
		var scrapes sync.WaitGroup
		for range 100 {
			scrapes.Go(func() {
				if n := testutil.CollectAndCount(c); n == 0 {
					t.Error("a scrape has no metric")
				}
			})
		}

		scrapes.Wait()
		if len(k.asked) != round || k.pods != round {
			t.Errorf("round %d: the PF was asked %d times, the pod %d times", round,
				len(k.asked), k.pods)
		}

		now = now.Add(fresh)
	}
}

// TestPFsThatSwapNames checks that a PF is asked by its own address, and that another PF with the
// same name is not taken for it.
func TestPFsThatSwapNames(t *testing.T) {
	vfs := append(pooltest.VFs(0x3b, 1), pooltest.VFs(0x5e, 1)...)
	pfs := pfsOf("eth0", vfs...) // the inventory has not seen all of the swap yet
	k := &kernel{}
	c := &Collector{
		Functions:   func() []function.Function { return append(pfs, vfs...) },
		Attachments: func() []journal.Attachment { return nil },
		PoolOf:      func(function.ID) string { return "" }, Kernel: k, Log: testr.New(t),
	}

	testutil.CollectAndCount(c)
	want := []string{"eth0 " + string(vfs[0].PF), "eth0 " + string(vfs[1].PF)}
	if slices.Sort(k.asked); !slices.Equal(k.asked, want) {
		t.Errorf("asked for %q, want %q", k.asked, want)
	}
}
