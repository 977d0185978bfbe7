// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/admin"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceplugin"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// newDevicePlugin makes the part that offers Functions as extended resources.
func newDevicePlugin(
	env *environment, hardware *hardware, kubelet *kubelet, backend *backend, pools *pools,
	owners *owners,
) (*deviceplugin.Manager, error) {
	var cdi *deviceplugin.CDI
	if env.config.UseCDI {
		var err error
		if cdi, err = deviceplugin.NewCDI(env.config.CDIDir); err != nil {
			return nil, err
		}
	}

	return &deviceplugin.Manager{
		KubeletDir: env.config.KubeletDir,
		Pools:      pools.Pools,
		Problems:   owners.offer(owners.lifecycle.Releasing).Problems,
		Allocator: &podAllocator{
			mac:    backend.macs(env, hardware).Of,
			portID: backend.portID(env, hardware),
			find:   hardware.inventory.Get, lifecycle: owners.lifecycle,
			provisioner: backend.provisioner, rdma: pools.rdma, log: env.log.WithName("deviceplugin"),
		},
		InUse: env.held, Gave: env.gave,
		Nodes: *hardware.nodes,
		DeviceInfo: deviceplugin.NewDeviceInfo(env.deviceInfoDir(),
			filepath.Join(env.config.StateDir, "devinfo")),
		CDI:      cdi,
		Assigned: kubelet.pods.Assigned, AllocateTimeout: env.config.times.allocate,
		Metrics: deviceplugin.NewMetrics(env.registry),
		Log:     env.log.WithName("deviceplugin"),
	}, nil
}

// newCNI makes the server of the CNI plugin. inherited is the listening socket of the predecessor,
// or nil. succeeded reports whether a successor has asked for the node.
func newCNI(
	env *environment, hardware *hardware, backend *backend, pools *pools, owners *owners,
	inherited *net.UnixListener, succeeded func() bool,
) *cniserver.Server {
	return &cniserver.Server{
		BootID: hardware.bootID, Path: env.config.CNISocket, SpoolDir: env.config.SpoolDir,
		Inherited: inherited, Succeeded: succeeded,
		Function: pools.Get, Auxiliary: hardware.inventory.Auxiliary,
		Pools: pools.Tracker, Journal: env.journal, Lifecycle: owners.lifecycle,
		Provisioner: backend.provisioner,
		MAC:         backend.macs(env, hardware).Of,
		PortID:      backend.portID(env, hardware),
		Ready:       func() error { return errors.Join(pools.known(), env.journal.Writable()) },
		Report:      backend.report,
		AllowKeys:   env.config.CNIAllowKeys,
		AddTimeout:  env.config.times.add,
		Metrics:     cniserver.NewMetrics(env.registry),
		Log:         env.log.WithName("cni"),
	}
}

// queuePatience is how long requests of the CNI plugin wait for the pools after the node was handed
// over.
const queuePatience = 5 * time.Second

// serveCNI serves the CNI plugin. Requests in the queue of a socket that was handed over wait until
// the pools are known, because an ADD would fail without them. They wait only for a while, because
// DELs need no API server.
func (a *agent) serveCNI(ctx context.Context) error {
	if a.cni.Inherited != nil {
		patience, cancel := context.WithTimeout(ctx, queuePatience)
		_ = loop.Until(patience, a.env.outputs.Subscribe, func() bool {
			return a.pools.known() == nil
		})
		cancel()
	}
	return a.cni.Run(ctx)
}

// newAdmin makes the server of administrators. claims is nil in direct mode.
func newAdmin(
	env *environment, hardware *hardware, pools *pools, owners *owners,
	plugins *deviceplugin.Manager, claims *claims,
) *admin.Server {
	return &admin.Server{
		Socket:    filepath.Join(env.config.StateDir, filepath.Base(nodestate.DefaultSocket)),
		Node:      env.config.NodeName,
		Functions: hardware.inventory.Snapshot, Pools: pools.Pools,
		// problems are those with which the pool of the Function is published
		Problems: func(of pool.Pool, f function.Function) []function.Problem {
			if of.Spec.Publish == v1alpha1.PublishDRA && claims != nil {
				return claims.checker.Problems(f)
			}
			return plugins.Problems(f)
		},
		Card: hardware.cards.Of, Journal: env.journal,
		GiveUp: owners.hooks.GiveUp, Release: owners.lifecycle.Release,
		Verification: hardware.verifier.Last, Verify: hardware.verifier.Verify,
		Log: env.log.WithName("admin"),
	}
}
