package controller

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// A replica that waits has the Ports in its cache too: counted twice, a sum over replicas would be wrong.
func TestOnlyLeaderCountsPorts(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	newMetrics(registry, nil, make(chan struct{}))
	if n, err := testutil.GatherAndCount(registry, "xpu_ports"); n != 0 || err != nil {
		t.Errorf("%d series, %v, of a replica that is not the leader; want none", n, err)
	}
}
