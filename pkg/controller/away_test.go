// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

var errAway = errors.New("the API server is away")

// away is an API server that does not answer.
type away struct{ client.Client }

func (away) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errAway
}

func (away) List(context.Context, client.ObjectList, ...client.ListOption) error { return errAway }

// TestAPIServerAway: what could not be read is tried again, and is not taken for something that
// does not exist.
func TestAPIServerAway(t *testing.T) {
	b := base{
		Cluster: reconciling.Cluster{Client: away{}},
		catalog: networks.Catalog{Client: away{}},
	}
	network := func(d claim.Device) error {
		_, err := (&claims{base: b}).networkOf(t.Context(), &resourceapi.ResourceClaim{}, &d)
		return err
	}

	for what, err := range map[string]error{
		"network of a DevicePool": network(claim.Device{ID: claim.PoolID{DevicePool: "fast"}}),
		"XPUNetwork": network(claim.Device{
			Config: v1alpha1.InterfaceConfig{Network: "lab"},
		}),
	} {
		var refusal *reconciling.Refusal
		if !errors.Is(err, errAway) || errors.As(err, &refusal) {
			t.Errorf("%s: error %v, want that of the API server", what, err)
		}
	}
}
