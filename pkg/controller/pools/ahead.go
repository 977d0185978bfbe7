// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// MakesAhead reports whether Ports of a DevicePool are made ahead in the network.
func MakesAhead(ctx context.Context, c client.Reader, name, network string) (bool, error) {
	var pool v1alpha1.DevicePool
	err := c.Get(ctx, client.ObjectKey{Name: name}, &pool)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("DevicePool %s: %w", name, err)
	}
	return err == nil && pool.Spec.Provision == v1alpha1.ProvisionAhead &&
		pool.Spec.Network == network, nil
}
