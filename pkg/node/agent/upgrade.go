// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"path/filepath"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/keep"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
)

// register makes the DRA driver known to the kubelet, unless the agent is in direct mode.
func (p *process) register(ctx context.Context) (err error) {
	if p.clientset == nil {
		return nil
	}

	p.copies = keep.NewCopies(p.config.CDIDir,
		filepath.Join(upgrade.DriverDir(p.config.KubeletDir), "cdi"))
	p.registration, err = upgrade.Register(ctx, upgrade.RegisterOptions{
		Client: p.clientset, Node: p.config.NodeName, PodUID: p.config.PodUID,
		KubeletDir: p.config.KubeletDir, CDIDir: p.config.CDIDir,
		Files: kubeletplugin.MetadataFileOperations{
			WriteFile: p.copies.WriteFile, Remove: p.copies.Remove, Glob: p.copies.Glob,
		},
		Log: p.log.WithName("dra"),
	})
	return err
}

func (p *process) deregister() {
	if p.registration != nil {
		p.registration.Close()
	}
}

// takeOver asks the agent that has the node for it. It returns nil if no other agent runs, or
// if that agent does not hand over.
func (p *process) takeOver(ctx context.Context) (*upgrade.Predecessor, error) {
	var known func(context.Context)
	if p.registration != nil {
		known = func(ctx context.Context) { p.registration.Await(ctx, p.config.times.register) }
	}
	return upgrade.TakeOver(ctx, upgrade.Socket(p.config.StateDir), known, p.readiness, p.log)
}

// succeeded reports whether a successor has asked for the node.
func (p *process) succeeded() bool { return p.successor.Load() != nil }

// awaitSuccessor waits for a successor that asks for the node. Then it ends the work of this agent
// by [upgrade.ErrSucceeded].
func (a *agent) awaitSuccessor(ctx context.Context) error {
	successor, err := upgrade.AwaitSuccessor(ctx, upgrade.Socket(a.env.config.StateDir),
		a.env.log.WithName("handover"))
	if err != nil || successor == nil {
		return err
	}

	// A rolling update would end this agent if it were not ready before the successor is.
	a.process.readiness.SetReady()
	a.process.successor.Store(successor)
	a.plugins.StandAside()

	return upgrade.ErrSucceeded
}

// awaitPredecessorEnd waits until the process of the predecessor has ended. Kubelets before 1.37
// then consider the endpoints gone that this agent has registered for the same resources.
func (a *agent) awaitPredecessorEnd(ctx context.Context) error {
	if predecessor := a.process.predecessor; predecessor != nil {
		predecessor.AwaitEnd(ctx)
		a.plugins.Reconnect(ctx)
		a.adoptFiles() // also those that the predecessor wrote after this agent started
	}
	return nil
}

// adoptFiles makes copies of CDI files of an agent that kept none.
func (a *agent) adoptFiles() {
	if a.env.copies == nil {
		return
	}
	if err := a.env.copies.Adopt(dra.MetadataFiles); err != nil {
		a.env.log.Error(err, "Some CDI files will not come back if somebody removes them")
	}
}

// retired is an agent that has ended its work because its successor has asked for the node.
type retired struct {
	process *process
	cni     *cniserver.Server
	plugins *lasting
}

// run gives the node to the successor, and forwards calls of the kubelet to it until ctx ends. It
// returns an error if the successor ends first.
func (r *retired) run(ctx context.Context) error {
	successor := r.process.successor.Load()
	defer successor.Close()
	socket := r.cni.Socket()
	defer socket.Close() // does nothing if there is no socket
	if err := successor.Give(socket); err != nil {
		return err
	}

	r.process.log.Info("Another agent has the node; this one waits for its end")
	successor.AwaitEnd(ctx)
	var err error
	if ctx.Err() == nil {
		err = errors.New("the agent that took the node over is gone; starting again")
	}

	return errors.Join(err, r.plugins.end())
}
