// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
)

// base holds the dependencies of all reconcilers.
type base struct {
	Options
	reconciling.Cluster
	sessions   *sessions.Sessions
	catalog    networks.Catalog
	agentPorts xpus.AgentPorts
	metrics    *metrics

	store   *model.Ports
	retries workqueue.TypedRateLimiter[reconcile.Request] // each reconciler has its own
}
