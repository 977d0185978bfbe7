// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

var quarantinedFunctions = prometheus.NewDesc("xpu_quarantined_functions",
	"Functions that did not come back from their pods as they were and are kept from others, by "+
		"reason.", []string{"reason"}, nil)

// Describe implements [prometheus.Collector].
func (m *Manager) Describe(to chan<- *prometheus.Desc) { to <- quarantinedFunctions }

// Collect implements [prometheus.Collector].
func (m *Manager) Collect(to chan<- prometheus.Metric) {
	count := map[journal.QuarantineReason]int{}
	for _, a := range m.journal.All() {
		if a.Quarantined() {
			count[a.Quarantine.Reason]++
		}
	}

	for _, reason := range journal.QuarantineReasons {
		to <- prometheus.MustNewConstMetric(quarantinedFunctions, prometheus.GaugeValue,
			float64(count[reason]), string(reason))
	}
}
