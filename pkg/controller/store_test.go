// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
)

// storeOf is a store that has these Ports.
func storeOf(ports ...*v1alpha1.XPUPort) *model.Ports {
	store := model.NewPorts()
	for _, port := range ports {
		store.Set(port)
	}
	return store
}
