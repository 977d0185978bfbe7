// SPDX-License-Identifier: Apache-2.0

package controller

import (
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kubecache"
)

// indexed is a cache that has these Ports.
func indexed(ports ...*v1alpha1.XPUPort) *kubecache.Indexes[*v1alpha1.XPUPort] {
	store := toolscache.NewIndexer(toolscache.MetaNamespaceKeyFunc, kubecache.Indexers(portKeys()))
	for _, port := range ports {
		_ = store.Add(port) // its key can be computed
	}
	return kubecache.NewIndexes[*v1alpha1.XPUPort](store, func() bool { return true })
}
