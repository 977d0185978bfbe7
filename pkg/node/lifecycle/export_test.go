// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Free waits until the Function is not being released any more, as a new owner does.
func (m *Manager) Free(ctx context.Context, id function.ID) (err error) {
	defer wrap(&err, id)
	return m.await(ctx, journal.Attachment{Function: id, State: Releasing})
}
