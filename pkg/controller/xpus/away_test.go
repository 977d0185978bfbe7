// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"context"
	"errors"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

var errAway = errors.New("the API server is away")

// away is an API server that does not answer.
type away struct{ client.Client }

func (away) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errAway
}

// TestAPIServerAway: a Secret that could not be read is tried again, and is not taken for one that
// does not exist.
func TestAPIServerAway(t *testing.T) {
	r := &reconciler{Cluster: reconciling.Cluster{Client: away{}}}
	err := r.connect(t.Context(), &v1alpha1.XPU{
		Spec: v1alpha1.XPUSpec{
			Endpoint: "10.0.0.1:50151", TLS: &v1alpha1.XPUTLS{SecretName: "card"},
		},
	})

	var refusal *reconciling.Refusal
	if !errors.Is(err, errAway) || errors.As(err, &refusal) {
		t.Errorf("error %v, want the error of the API server", err)
	}
}
