// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"context"
	"errors"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var errAway = errors.New("the API server is away")

// away is an API server that does not answer.
type away struct{ client.Client }

func (away) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errAway
}

// only reads the XPUs with these names. No others are known to exist or not.
type only map[string]bool

func (o only) Get(
	_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption,
) error {
	if !o[key.Name] {
		return errAway
	}
	object.SetName(key.Name)
	return nil
}

func (only) List(context.Context, client.ObjectList, ...client.ListOption) error { return errAway }

// TestPortOfUnknownXPU: a port at an agent may belong to an XPUPort whose XPU cannot be read. It is
// not taken for one that nobody wants, unless it is this XPU's own.
func TestPortOfUnknownXPU(t *testing.T) {
	port := func(xpu string) *v1alpha1.XPUPort {
		return &v1alpha1.XPUPort{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: xpu},
			Spec: v1alpha1.XPUPortSpec{
				XPU: xpu, MAC: "02:00:00:00:00:51", Network: "blue",
				Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:02.0"},
			},
		}
	}

	for _, test := range []struct {
		ports []*v1alpha1.XPUPort
		want  string
	}{
		{nil, ""},
		{[]*v1alpha1.XPUPort{port("mine")}, ""},
		{[]*v1alpha1.XPUPort{port("away")}, "an XPU that cannot be read: " + errAway.Error()},
		{[]*v1alpha1.XPUPort{port("away"), port("mine")}, ""},
	} {
		a := AgentPorts{
			Client: only{"mine": true}, Ports: model.NewPorts(test.ports...), Installation: "n1",
		}
		at, err := a.Of(port("mine"), nil)
		must.Succeed(t, err)
		if got := a.ClaimedElsewhere(t.Context(), "mine", opi.PortStatus{Port: at}); got != test.want {
			t.Errorf("%d Ports: %q, want %q", len(test.ports), got, test.want)
		}
	}
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
