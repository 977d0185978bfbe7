// SPDX-License-Identifier: Apache-2.0

// Package traffic tells Prometheus what Functions receive and send: of VFs what their PFs count,
// under the names that sriov-network-metrics-exporter gives it, so that queries keep working; and
// of every Function in a pod what its netdev counts there.
package traffic

import (
	"strconv"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// fresh is how long what was read is told again. Whoever may scrape the agent's metrics, which
// everybody on the node may, does not have the PFs' firmware asked more often.
const fresh = time.Second

// Kernel reads counters. It is [netdev.Engine].
type Kernel interface {
	// VFCounters are those of the PF with this netdev and PCI address. A netdev of another device
	// is an error.
	VFCounters(netdev, address string) (map[int]netdev.Counters, error)
	Counters(netdev.Place) (counters netdev.Counters, exists bool, err error)
}

// Collector reads the counters when it is scraped, but not more often than once a second, by one
// request for each PF with VFs and one for each Function in a pod. Scrapes that come meanwhile
// wait, and get the same. It implements [prometheus.Collector], and may be used by several
// goroutines at once.
type Collector struct {
	Functions   func() []function.Function // of the node
	Attachments func() []journal.Attachment
	// PoolOf is the DevicePool that has a Function; "" for none.
	PoolOf func(function.ID) string
	Kernel Kernel
	Log    logr.Logger
	Now    func() time.Time // with its monotonic clock; nil for [time.Now]

	mutex sync.Mutex // held while the counters are read
	last  []prometheus.Metric
	read  time.Time // when last was read, zero before
}

// A counter is one of [netdev.Counters] under its names.
type counter struct {
	vf, pod *prometheus.Desc // nil where it is not told
	of      func(netdev.Counters) uint64
}

var (
	vfLabels  = []string{"pf", "vf", "pciAddr", "numa_node"}
	podLabels = []string{"namespace", "pod", "interface", "function", "pool", "network"}

	counters = []counter{
		{
			prometheus.NewDesc("sriov_vf_rx_packets",
				"Packets that a VF received, as its PF counts them.", vfLabels, nil),
			prometheus.NewDesc("xpu_pod_receive_packets_total",
				"Packets that a pod received by a Function.", podLabels, nil),
			func(c netdev.Counters) uint64 { return c.RxPackets },
		},
		{
			prometheus.NewDesc("sriov_vf_tx_packets",
				"Packets that a VF sent, as its PF counts them.", vfLabels, nil),
			prometheus.NewDesc("xpu_pod_transmit_packets_total",
				"Packets that a pod sent by a Function.", podLabels, nil),
			func(c netdev.Counters) uint64 { return c.TxPackets },
		},
		{
			prometheus.NewDesc("sriov_vf_rx_bytes",
				"Bytes that a VF received, as its PF counts them.", vfLabels, nil),
			prometheus.NewDesc("xpu_pod_receive_bytes_total",
				"Bytes that a pod received by a Function.", podLabels, nil),
			func(c netdev.Counters) uint64 { return c.RxBytes },
		},
		{
			prometheus.NewDesc("sriov_vf_tx_bytes", "Bytes that a VF sent, as its PF counts them.",
				vfLabels, nil),
			prometheus.NewDesc("xpu_pod_transmit_bytes_total",
				"Bytes that a pod sent by a Function.", podLabels, nil),
			func(c netdev.Counters) uint64 { return c.TxBytes },
		},
		{
			prometheus.NewDesc("sriov_vf_rx_dropped",
				"Packets to a VF that were dropped, as its PF counts them.", vfLabels, nil),
			prometheus.NewDesc("xpu_pod_receive_packets_dropped_total",
				"Packets to a pod that were dropped at a Function.", podLabels, nil),
			func(c netdev.Counters) uint64 { return c.RxDropped },
		},
		{
			prometheus.NewDesc("sriov_vf_tx_dropped",
				"Packets of a VF that were dropped, as its PF counts them.", vfLabels, nil),
			prometheus.NewDesc("xpu_pod_transmit_packets_dropped_total",
				"Packets of a pod that were dropped at a Function.", podLabels, nil),
			func(c netdev.Counters) uint64 { return c.TxDropped },
		},
		{
			prometheus.NewDesc("sriov_vf_rx_broadcast",
				"Broadcasts that a VF received, as its PF counts them.", vfLabels, nil),
			nil,
			func(c netdev.Counters) uint64 { return c.RxBroadcast },
		},
		{
			prometheus.NewDesc("sriov_vf_rx_multicast",
				"Multicasts that a VF received, as its PF counts them.", vfLabels, nil),
			nil,
			func(c netdev.Counters) uint64 { return c.RxMulticast },
		},
	}
	// podDevice joins the metrics of VFs with pods: sriov_vf_rx_bytes * on(pciAddr) group_left(pod,
	// namespace) sriov_kubepoddevice.
	podDevice = prometheus.NewDesc("sriov_kubepoddevice",
		"Constantly 1: which pod has which Function.",
		[]string{"pciAddr", "dev_type", "pod", "namespace", "container"}, nil)
)

// Describe names the metrics.
func (c *Collector) Describe(descs chan<- *prometheus.Desc) {
	descs <- podDevice
	for _, counter := range counters {
		descs <- counter.vf
		if counter.pod != nil {
			descs <- counter.pod
		}
	}
}

// Collect tells the counters, and reads them if the last reading is not fresh.
func (c *Collector) Collect(metrics chan<- prometheus.Metric) {
	for _, metric := range c.current() {
		metrics <- metric
	}
}

// current is the last reading, or a new one.
func (c *Collector) current() []prometheus.Metric {
	now := c.Now
	if now == nil {
		now = time.Now
	}

	c.mutex.Lock()
	defer c.mutex.Unlock()

	if !c.read.IsZero() && now().Sub(c.read) < fresh {
		return c.last
	}

	c.last = c.readAll()
	c.read = now()
	return c.last
}

// readAll asks the kernel. A PF is known by its address: its name may be another one's by now.
func (c *Collector) readAll() (metrics []prometheus.Metric) {
	byPF, netdevs := map[pci.Address][]function.Function{}, map[pci.Address]string{}
	for _, f := range c.Functions() {
		switch f.Kind {
		case function.VF:
			byPF[f.PF] = append(byPF[f.PF], f)
		case function.PF:
			netdevs[f.PF] = f.Netdev
		}
	}

	for pf, vfs := range byPF {
		// A PF whose netdev is in another namespace cannot be asked.
		if name := netdevs[pf]; name != "" {
			metrics = append(metrics, c.ofPF(pf, name, vfs)...)
		}
	}

	for _, a := range c.Attachments() {
		if a.State == journal.Attached {
			metrics = append(metrics, c.ofPod(a)...)
		}
	}

	return metrics
}

// ofPF are the counters of a PF's VFs. There are none where the PF does not tell.
func (c *Collector) ofPF(
	pf pci.Address, name string, vfs []function.Function,
) (metrics []prometheus.Metric) {
	all, err := c.Kernel.VFCounters(name, string(pf))
	if err != nil {
		c.Log.V(1).Info("PF does not tell what its VFs count", "pf", name, "address", string(pf),
			"error", err.Error())
		return nil
	}

	for _, f := range vfs {
		counted, told := all[f.Index]
		if !told {
			continue
		}

		numa := ""
		if f.NUMANode >= 0 {
			numa = strconv.Itoa(f.NUMANode)
		}

		for _, counter := range counters {
			metrics = append(metrics,
				prometheus.MustNewConstMetric(counter.vf, prometheus.CounterValue,
					float64(counter.of(counted)), name, strconv.Itoa(f.Index),
					string(f.ID.Address), numa))
		}
	}

	return metrics
}

// ofPod are the counters of a Function in a pod.
func (c *Collector) ofPod(a journal.Attachment) (metrics []prometheus.Metric) {
	pool := c.PoolOf(a.Function)
	resource := a.Resource
	if resource == "" {
		resource = v1alpha1.GroupName + "/" + pool
	}

	metrics = append(metrics, prometheus.MustNewConstMetric(podDevice, prometheus.GaugeValue, 1,
		a.Function.String(), resource, a.Pod.Name, a.Pod.Namespace, ""))
	if a.Interface.Userspace || a.Observed == nil {
		return metrics // there is no netdev that could count
	}

	counted, exists, err := c.Kernel.Counters(a.Place)
	if err != nil || !exists {
		return metrics // the pod ends
	}

	network := ""
	if a.Port != nil {
		network = a.Port.Network
	}

	for _, counter := range counters {
		if counter.pod != nil {
			metrics = append(metrics,
				prometheus.MustNewConstMetric(counter.pod, prometheus.CounterValue,
					float64(counter.of(counted)), a.Pod.Namespace, a.Pod.Name, a.Observed.Name,
					a.Function.String(), pool, network))
		}
	}

	return metrics
}
