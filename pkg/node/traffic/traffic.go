// SPDX-License-Identifier: Apache-2.0

// Package traffic exports to Prometheus what Functions receive and send. The counters of VFs come
// from their PFs. They have the names that sriov-network-metrics-exporter uses, so that existing
// queries keep working. The counters of every Function in a pod come from its netdev.
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

// fresh is how long a reading is reused. The limit protects the firmware of PFs from frequent
// requests, because every user of the node may scrape the agent's metrics.
const fresh = time.Second

// Kernel reads counters. [netdev.Engine] implements it.
type Kernel interface {
	// VFCounters returns the counters of all VFs of the PF with this netdev and PCI address, by
	// index. It returns an error if the netdev belongs to another device.
	VFCounters(netdev, address string) (map[int]netdev.Counters, error)
	Counters(netdev.Place) (counters netdev.Counters, exists bool, err error)
}

// Collector exports the counters. It implements [prometheus.Collector]. Several goroutines may use
// it at once.
//
// A scrape reads the counters, with one request for each PF with VFs and one for each Function in a
// pod, but at most once a second. Other scrapes wait for a reading under way, and export the same
// values.
type Collector struct {
	Functions   func() []function.Function // returns the Functions of the node
	Attachments func() []journal.Attachment
	// PoolOf returns the name of the DevicePool of a Function, or "" if it is in no pool.
	PoolOf func(function.ID) string
	Kernel Kernel
	Log    logr.Logger
	Now    func() time.Time // with a monotonic clock; nil for [time.Now]

	mutex sync.Mutex // held while the counters are read
	last  []prometheus.Metric
	read  time.Time // time of the last reading, or zero
}

// counter is a counter of [netdev.Counters] with its names in Prometheus.
type counter struct {
	vf, pod *prometheus.Desc // nil if it is not exported
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
	// podDevice makes it possible to join the metrics of VFs with pods: sriov_vf_rx_bytes *
	// on(pciAddr) group_left(pod, namespace) sriov_kubepoddevice.
	podDevice = prometheus.NewDesc("sriov_kubepoddevice",
		"Constantly 1: which pod has which Function.",
		[]string{"pciAddr", "dev_type", "pod", "namespace", "container"}, nil)
)

// Describe implements [prometheus.Collector].
func (c *Collector) Describe(descs chan<- *prometheus.Desc) {
	descs <- podDevice
	for _, counter := range counters {
		descs <- counter.vf
		if counter.pod != nil {
			descs <- counter.pod
		}
	}
}

// Collect implements [prometheus.Collector]. It exports the last reading if it is fresh, or else a
// new one.
func (c *Collector) Collect(metrics chan<- prometheus.Metric) {
	for _, metric := range c.current() {
		metrics <- metric
	}
}

// current returns the last reading if it is fresh, or else a new one.
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

// readAll reads all counters from the kernel. It finds the netdev of a PF by the address of the PF,
// because another PF may have got the name.
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
		// A PF cannot be asked if its netdev is in another namespace.
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

// ofPF returns the counters of a PF's VFs. It returns none if the PF does not report them.
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
		counted, reported := all[f.Index]
		if !reported {
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

// ofPod returns the counters of a Function in a pod.
func (c *Collector) ofPod(a journal.Attachment) (metrics []prometheus.Metric) {
	pool := c.PoolOf(a.Function)
	resource := a.Resource
	if resource == "" {
		resource = v1alpha1.GroupName + "/" + pool
	}

	metrics = append(metrics, prometheus.MustNewConstMetric(podDevice, prometheus.GaugeValue, 1,
		a.Function.String(), resource, a.Pod.Name, a.Pod.Namespace, ""))
	if a.Interface.Userspace || a.Observed == nil {
		return metrics // there is no netdev with counters
	}

	counted, exists, err := c.Kernel.Counters(a.Place)
	if err != nil || !exists {
		return metrics // the pod is ending
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
