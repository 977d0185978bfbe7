// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// TestDeviceInfoOfNow: the device info describes the Function as it is after its last owner has
// released it.
func TestDeviceInfoOfNow(t *testing.T) {
	t.Parallel()
	c, s := newCard(t)
	before, now := c.function, c.function
	before.VDPA = function.VDPA{Name: "vdpa0", Driver: "vhost_vdpa", CharDevice: "vhost-vdpa-0"}
	now.VDPA = function.VDPA{Name: "vdpa1", Driver: "vhost_vdpa", CharDevice: "vhost-vdpa-1"}

	s.Pools = withSetup{pool.Pool{Name: "fast", Functions: []function.Function{before},
		Spec: v1alpha1.DevicePoolSpec{
			Publish:   v1alpha1.PublishDevicePlugin,
			Selectors: []v1alpha1.FunctionSelector{{VDPAType: "vhost"}},
		}}, true}

	looks := 0
	s.Function = func(function.ID) (function.Function, bool) {
		if looks++; looks == 1 {
			return before, true
		}
		return now, true
	}

	reply := s.handle(t.Context(),
		addVF("c1", map[string]any{"runtimeConfig": map[string]any{"CNIDeviceInfoFile": "/x"}}),
		nil)
	checkCode(t, reply, 0)
	if !strings.Contains(string(reply.DeviceInfo), "/dev/vhost-vdpa-1") {
		t.Errorf("device info %s, want that of vdpa1", reply.DeviceInfo)
	}
}
