package traffic

import (
	"errors"
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
)

// kernel is one whose PFs tell what their VFs count, but for eth1.
type kernel struct{ asked []string }

func (k *kernel) VFCounters(pf string) (map[int]netdev.Counters, error) {
	k.asked = append(k.asked, pf)
	if pf == "eth1" {
		return nil, errors.New("no such device")
	}
	return map[int]netdev.Counters{1: {RxPackets: 3, TxBytes: 500, RxDropped: 2}}, nil
}

func (k *kernel) Counters(place netdev.Place) (netdev.Counters, bool, error) {
	return netdev.Counters{RxPackets: 7, TxBytes: 900}, place.Index == 5, nil
}

func TestCollect(t *testing.T) {
	vfs := append(pooltest.VFs(0x3b, 3), pooltest.VFs(0x5e, 1)...)
	for i := range vfs {
		vfs[i].PFName, vfs[i].NUMANode = "eth0", 1
	}
	vfs[3].PFName = "eth1"
	attached := func(f function.Function, pod string, index int) journal.Attachment {
		return journal.Attachment{
			Function: f.ID, State: journal.Attached, Pod: journal.Pod{Namespace: "default", Name: pod}, Port: &journal.Port{Network: "blue"},
			Place: netdev.Place{Index: index}, Observed: &netdev.Observed{Name: "net1"},
		}
	}
	dpdk := attached(vfs[2], "dpdk", 5)
	dpdk.Interface.Userspace, dpdk.Resource = true, "xpu.opiproject.org/plain"
	reserved := attached(vfs[3], "coming", 5)
	reserved.State = journal.Reserved
	k := &kernel{}
	c := &Collector{
		Functions: func() []function.Function { return vfs },
		Attachments: func() []journal.Attachment {
			return []journal.Attachment{attached(vfs[1], "web", 5), dpdk, attached(vfs[0], "ending", 6), reserved}
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
	err := testutil.CollectAndCompare(c, strings.NewReader(want), "sriov_kubepoddevice", "sriov_vf_rx_dropped", "xpu_pod_transmit_bytes_total")
	if err != nil {
		t.Error(err)
	}
	if len(k.asked) != 2 {
		t.Errorf("the kernel was asked about PFs %v, want each once", k.asked)
	}
	if problems, err := testutil.CollectAndLint(c); err != nil {
		t.Error(err)
	} else {
		for _, p := range problems {
			if !strings.HasPrefix(p.Metric, "sriov_") { // those are not ours
				t.Errorf("%s: %s", p.Metric, p.Text)
			}
		}
	}
}
