// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/pkg/node/nri/nritest"
)

// startRuntime simulates the container runtime's side of NRI until stop is called, because agents
// prepare no claims without it.
func (h *host) startRuntime() (stop func(), err error) {
	runtime, err := nritest.Start(h.path("nri.sock"), nil)
	if err != nil {
		return nil, fmt.Errorf("container runtime: %w", err)
	}
	return runtime.Stop, nil
}
