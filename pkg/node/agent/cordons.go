// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"sync"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
)

// cordons follow the spec of the node's XPUNode.
type cordons struct {
	health.Cordons
	// current reads the spec. It is nil in direct mode, which has no XPUNode.
	current func(context.Context) ([]v1alpha1.Cordon, error)
	changed func()
	log     logr.Logger

	// reading is held while the spec is read and set, so that an older read does not come last.
	reading sync.Mutex
}

// read reads the spec. If that fails, the cordons stay as they are, because an API server that does
// not answer says nothing about them.
func (c *cordons) read(ctx context.Context) {
	if c.current == nil {
		return
	}

	c.reading.Lock()
	defer c.reading.Unlock()

	now, err := c.current(ctx)
	if err != nil {
		c.log.Error(err, "Cordons are not known anew, keeping what is known")
		return
	}
	if c.Set(now) {
		c.log.Info("Cordons of PFs changed", "cordons", now)
		c.changed()
	}
}

// run follows the spec until ctx ends.
func (c *cordons) run(ctx context.Context, changes <-chan struct{}) error {
	for loop.Wait(ctx, changes, 0) {
		c.read(ctx)
	}
	return nil
}
