// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
)

// madePool returns a pool that offers SFs with RDMA, which do not exist before they are allocated.
func madePool() (p pool.Pool, ids []string) {
	pf := function.Function{
		ID: function.ID{Address: "0000:3b:00.0"}, Kind: function.PF, PF: "0000:3b:00.0",
		PFName:   "ens3f0",
		NUMANode: 1, LinkUp: true,
	}

	p = poolOf("fast", function.PotentialSF(pf, 1), function.PotentialSF(pf, 2))
	p.Spec.SFs = &v1alpha1.SFSpec{FirstNumber: 1, Count: 2}
	p.Spec.Selectors = []v1alpha1.FunctionSelector{{PFNames: []string{"ens3f0"}, IsRdma: true}}

	return p, []string{p.Functions[0].ID.String(), p.Functions[1].ID.String()}
}

// made returns an SF as it is once it exists.
func made(f function.Function) function.Function {
	f.Potential, f.Netdev, f.AuxDevice, f.RDMADevices = false, "eth7", "mlx5_core.sf.4", []string{
		"mlx5_4",
	}
	return f
}

// TestAllocateSetsUp: a container gets what belongs to the Function that was made for it, while the
// kubelet sees the same device before and after.
func TestAllocateSetsUp(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	p, ids := madePool()
	s.reserve = func(f function.Function) (function.Function, error) { return made(f), nil }
	s.set(p)
	s.run()
	s.awaitHealthy("registered", fast, ids...)
	before := s.kubelet.Devices(fast)
	response, err := s.kubelet.Allocate(t.Context(), fast, ids[0])
	if err != nil {
		t.Fatal(err)
	}

	info := response.Envs[environmentName(fast)+"_INFO"]
	if !strings.Contains(info, `"rdma_dev":"mlx5_4"`) {
		t.Errorf("the container is told %s, want its RDMA device", info)
	}

	p.Functions[0] = made(p.Functions[0])
	s.set(p)
	if diff := cmp.Diff(before, s.kubelet.Devices(fast), protocmp.Transform()); diff != "" {
		t.Errorf("devices: -before +after\n%s", diff)
	}
	if len(s.givenUp) > 0 {
		t.Errorf("%q were given up", s.givenUp)
	}
}

// TestAllocateGivesUp: if a container gets no Function, all of its reservations are given up,
// whatever went wrong.
func TestAllocateGivesUp(t *testing.T) {
	for _, test := range []struct {
		name    string
		reserve func(function.Function) (function.Function, error)
		ready   error
		code    codes.Code
		want    string
	}{
		{"one cannot be made", func(f function.Function) (function.Function, error) {
			if f.Index == 2 {
				return f, errors.New("the PF can have no more SFs")
			}
			return made(f), nil
		}, nil, codes.Unavailable,
			"Function 0000:3b:00.0/sf2 of resource xpu.opiproject.org/fast: the PF can have no " +
				"more SFs"},
		{"the container could not use it", func(f function.Function) (function.Function, error) {
			return f, nil
		},
			nil, codes.Internal, "RDMA"},
		{"the xPU refuses", func(f function.Function) (function.Function, error) {
			return made(f), nil
		},
			errors.New("no such network"), codes.Unavailable,
			"xPU not ready for it: no such network"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newScene(t, kubelettest.Options{})
			p, ids := madePool()
			p.Spec.Network, p.Spec.DevicePlugin.ProvisionAt = "blue", v1alpha1.ProvisionAtAllocate

			s.reserve, s.ready = test.reserve, func(
				context.Context, function.Function, pool.Pool,
			) error {
				return test.ready
			}

			s.set(p)
			s.run()
			s.awaitHealthy("registered", fast, ids...)
			_, err := s.kubelet.Allocate(t.Context(), fast, ids...)
			if status.Code(err) != test.code || !strings.Contains(err.Error(), test.want) {
				t.Errorf("Allocate = %v, want %s with %q", err, test.code, test.want)
			}
			if !slices.Equal(s.givenUp, ids) {
				t.Errorf("%q were given up, want %q", s.givenUp, ids)
			}
		})
	}
}
