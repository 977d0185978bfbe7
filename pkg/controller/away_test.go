package controller

import (
	"context"
	"errors"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

var errAway = errors.New("the API server is away")

// away is an API server that does not answer.
type away struct{ client.Client }

func (away) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errAway
}

func (away) List(context.Context, client.ObjectList, ...client.ListOption) error { return errAway }

// TestAPIServerAway: what could not be read is tried again, and is not taken for something that does not exist.
func TestAPIServerAway(t *testing.T) {
	b := portBuilder{reader: away{}}
	device := &claim.Device{Request: "nic", ID: claim.PoolID{DevicePool: "fast"}}
	for what, err := range map[string]error{
		"network of a DevicePool": func() error { _, err := b.network(t.Context(), device); return err }(),
		"XPUNetwork":              func() error { _, err := b.segment(t.Context(), device, "lab"); return err }(),
		"Secret of an XPU": (&xpus{client: away{}}).connect(t.Context(), &v1alpha1.XPU{
			Spec: v1alpha1.XPUSpec{TLS: &v1alpha1.XPUTLS{SecretName: "card"}},
		}),
	} {
		var p *problem
		if !errors.Is(err, errAway) || errors.As(err, &p) {
			t.Errorf("%s: error %v, want that of the API server", what, err)
		}
	}
}
