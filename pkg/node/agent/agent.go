// SPDX-License-Identifier: Apache-2.0

// Package agent makes the parts of the node's agent and runs them. Data flows one way: the
// inventory discovers Functions, pools select them, and the device plugin and the DRA driver
// publish and allocate them. The xPU is provisioned. CNI or NRI reports the network namespace of a
// pod, and the lifecycle attaches the Functions to it, releases them, and lets the post-delete
// hooks run.
//
// [Run] starts a process, which asks for the node. Once the process has the node, it opens the
// journal, makes the parts in the order of their dependencies, and runs them. Each part is ready
// for use when its constructor returns. Parts notify each other of changes by the two signals of
// the environment.
package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/admin"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceplugin"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/keep"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// Run runs the agent until ctx ends. It returns an error only if the agent cannot work at all, or
// if a successor took over the node and then ended.
func Run(ctx context.Context, config Config, registry *prometheus.Registry, log logr.Logger) error {
	tracer, err := tracing.Dial(ctx, config.TracingEndpoint, "xpu-agent", log)
	if err != nil {
		return fmt.Errorf("--tracing-endpoint: %w", err)
	}
	defer tracer.Stop(ctx)

	p := &process{config: config, log: log, registry: registry, tracer: tracer}
	if p.readiness, err = upgrade.ServeReadiness(ctx, config.ReadySocket); err != nil {
		return fmt.Errorf("--ready-socket: %w", err)
	}
	defer p.readiness.Close()

	if config.Provisioner == ProvisionerCRD {
		if p.clientset, err = newClientset(config.Kubernetes); err != nil {
			return err
		}
	}

	// Without a UID, the sockets would have the names of the sockets of an agent that still runs.
	if config.PodUID != "" {
		if err := p.register(ctx); err != nil {
			return err
		}
		defer p.deregister()
	}

	if p.predecessor, err = p.takeOver(ctx); err != nil {
		return err
	}

	if p.predecessor != nil {
		defer p.predecessor.Close() // shows the predecessor that this agent has ended
	}

	retired, err := p.work(ctx)
	if err != nil || retired == nil {
		return err
	}

	return retired.run(ctx)
}

// process is the process of an agent, which may not have the node yet.
type process struct {
	config   Config
	log      logr.Logger
	registry *prometheus.Registry
	tracer   *tracing.Tracer // nil for none

	readiness *upgrade.Readiness
	// clientset and registration are nil in direct mode.
	clientset    kubernetes.Interface
	registration *upgrade.Registration
	// copies are of the CDI files of the registration's library, nil in direct mode.
	copies *keep.Copies
	// predecessor is the agent that handed over the node to this agent; nil if there was none.
	predecessor *upgrade.Predecessor
	// successor is the agent that has asked for the node; nil before any has.
	successor atomic.Pointer[upgrade.Successor]
}

// work runs the agent that has the node, until ctx ends, or until a successor asks for the node. In
// this case it returns the retired agent.
func (p *process) work(ctx context.Context) (*retired, error) {
	records, err := takeJournal(ctx, filepath.Join(p.config.StateDir, "journal.db"),
		p.readiness.SetReady, p.log)
	if err != nil {
		return nil, err
	}
	defer records.Close()

	if p.registration == nil {
		if err := p.register(ctx); err != nil {
			return nil, err
		}
		defer p.deregister()
	}

	env := &environment{
		config: p.config, log: p.log, registry: p.registry, tracer: p.tracer, journal: records,
		copies: p.copies,
	}

	hardware, err := openHardware(env)
	if err != nil {
		return nil, err
	}
	defer hardware.close()

	kubelet, err := newKubelet(env, hardware.inventory.Auxiliary)
	if err != nil {
		return nil, err
	}
	defer kubelet.pods.Close()

	a, err := newAgent(ctx, p, env, hardware, kubelet)
	if err != nil {
		return nil, err
	}

	p.readiness.Set(a.ready)
	return a.run(ctx)
}

// takeJournal opens the journal. It waits until another agent that shuts down has closed it, and
// calls waiting before it does. Until then this agent must do nothing, and must not open its
// sockets, because the other agent serves them.
func takeJournal(
	ctx context.Context, path string, waiting func(), log logr.Logger,
) (*journal.Journal, error) {
	records, err := journal.Open(path)
	if errors.Is(err, boltfile.ErrLocked) {
		log.Info("Waiting for another agent to end, which has the journal", "path", path)
		waiting()
	}

	for errors.Is(err, boltfile.ErrLocked) && ctx.Err() == nil {
		records, err = journal.Open(path)
	}
	return records, err
}

// environment is what every part of the agent may use.
type environment struct {
	config   Config
	log      logr.Logger
	registry *prometheus.Registry
	tracer   *tracing.Tracer // nil for none
	journal  *journal.Journal
	copies   *keep.Copies // nil in direct mode

	// inputs notifies the parts that assign Functions to pools. outputs notifies the parts that
	// publish pools and health.
	inputs, outputs notify.Signal
}

// deviceInfoDir is the directory of the device-info files of the device plugin.
func (e *environment) deviceInfoDir() string { return filepath.Join(e.config.DeviceInfoDir, "dp") }

// held reports whether a pod has the Function, or had it and the Function is not free yet.
func (e *environment) held(id function.ID) bool {
	_, held := e.journal.Get(id)
	return held
}

// gave reports whether, by the journal, a pod has the Function by an extended resource.
func (e *environment) gave(id function.ID, resource string) bool {
	a, held := e.journal.Get(id)
	return held && a.Claim.UID == "" && a.Resource == resource
}

// agent has the parts of the agent that has the node, in the order in which they are made.
type agent struct {
	process *process
	env     *environment

	hardware *hardware
	kubelet  *kubelet
	backend  *backend
	pools    *pools
	owners   *owners
	plugins  *deviceplugin.Manager
	claims   *claims // nil in direct mode
	cni      *cniserver.Server
	admin    *admin.Server
}

// newAgent makes the parts that need not be closed.
func newAgent(
	ctx context.Context, process *process, env *environment, hardware *hardware, kubelet *kubelet,
) (*agent, error) {
	backend, err := newBackend(ctx, env, hardware, kubelet, process.clientset)
	if err != nil {
		return nil, err
	}

	pools, err := newPools(env, hardware, kubelet, backend)
	if err != nil {
		return nil, err
	}

	owners, err := newOwners(env, hardware, kubelet, backend, pools)
	if err != nil {
		return nil, err
	}

	plugins, err := newDevicePlugin(env, hardware, kubelet, backend, pools, owners)
	if err != nil {
		return nil, err
	}

	inherited, err := process.predecessor.Listener()
	if err != nil {
		return nil, err
	}

	claims := newClaims(env, hardware, kubelet, backend, pools, owners, process.registration)
	return &agent{
		process: process, env: env, hardware: hardware, kubelet: kubelet, backend: backend,
		pools: pools, owners: owners, plugins: plugins, claims: claims,
		cni:   newCNI(env, hardware, backend, pools, owners, inherited, process.succeeded),
		admin: newAdmin(env, hardware, pools, owners, plugins, claims),
	}, nil
}

// ready returns why the agent cannot serve pods at the moment; nil if it can.
func (a *agent) ready() error {
	if err := a.pools.known(); err != nil {
		return err
	}
	if err := a.plugins.Registered(); err != nil || a.claims == nil {
		return err
	}

	pools, _ := a.pools.Pools()
	byClaim := slices.ContainsFunc(pools, func(p pool.Pool) bool {
		return p.Spec.Publish != v1alpha1.PublishDevicePlugin
	})
	if byClaim && !a.claims.nri.Connected() { // extended resources do not need the runtime
		return fmt.Errorf("not connected to the container runtime at %s", a.env.config.NRISocket)
	}

	return nil
}
