// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// patience bounds operations that take seconds at most.
const patience = 30 * time.Second

// resources returns the names of the resources that [host.writePools] declares.
func resources(n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("intel.com/pool%d", i))
	}
	return out
}

// writePools declares n resources, like for sriov-network-device-plugin. Each has the same number
// of VFs of every PF.
func (h *host) writePools(n int) error {
	type selectors struct {
		PFNames []string `json:"pfNames"`
	}

	type resource struct {
		Name      string    `json:"resourceName"`
		Selectors selectors `json:"selectors"`
	}

	var config struct {
		Resources []resource `json:"resourceList"`
	}
	perPF := h.vfs / pfs
	for i := range n {
		r := resource{Name: fmt.Sprintf("pool%d", i)}
		for _, f := range h.functions {
			if f.Index < 0 {
				r.Selectors.PFNames = append(r.Selectors.PFNames,
					fmt.Sprintf("%s#%d-%d", f.Netdev, i*perPF/n, (i+1)*perPF/n-1))
			}
		}
		config.Resources = append(config.Resources, r)
	}

	text, err := json.Marshal(config)
	if err != nil {
		return err
	}

	return os.WriteFile(h.path("config.json"), text, 0o600)
}

// plugins is a kubelet with the device plugins of an agent in direct mode.
type plugins struct {
	*kubelettest.Kubelet
	*agent
	resources []string
	// registered and listed are the times from the start of the agent's program until all resources
	// were registered, and until the kubelet knew all VFs.
	registered, listed time.Duration
}

// startPlugins starts a kubelet and then an agent.
func (b *bench) startPlugins(
	ctx context.Context, h *host, pools int, more ...string,
) (_ *plugins, err error) {
	if err := errors.Join(h.clear(), h.writePools(pools)); err != nil {
		return nil, err
	}

	p := &plugins{Kubelet: kubelettest.New(h.path("kubelet"), kubelettest.Options{}),
		resources: resources(pools)}
	if err := p.Start(); err != nil {
		return nil, err
	}

	begin := time.Now()
	if p.agent, err = b.startDirect(h, more...); err != nil {
		p.Stop()
		return nil, err
	}

	if err = p.until(ctx, "are registered", p.known); err == nil {
		p.registered = time.Since(begin)
		err = p.until(ctx, fmt.Sprintf("have %d VFs", h.vfs), func() bool {
			return p.healthy() == h.vfs
		})
		p.listed = time.Since(begin)
	}

	if err != nil {
		return nil, errors.Join(err, p.close())
	}

	return p, nil
}

func (p *plugins) close() error {
	err := p.end()
	p.Stop()
	return err
}

func (p *plugins) known() bool {
	return !slices.ContainsFunc(p.resources, func(resource string) bool {
		return p.Registrations(resource) == 0
	})
}

// healthy returns how many devices the kubelet could allocate.
func (p *plugins) healthy() (n int) {
	for _, resource := range p.resources {
		n += len(p.Healthy(resource))
	}
	return n
}

// until returns when the condition holds, as soon as the kubelet gets the change.
func (p *plugins) until(ctx context.Context, what string, condition func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := p.Wait(ctx, condition); err != nil {
		return fmt.Errorf("wait until %q %s: %w; they have %d:\n%s", p.resources, what, err,
			p.healthy(), p.lastWords())
	}
	return nil
}

// measurePlugins measures the time from the start of the agent's program until the kubelet knows
// all VFs of a node.
func measurePlugins(ctx context.Context, b *bench) (out []Measurement, err error) {
	sizes := []struct{ vfs, pools int }{{64, 1}, {1024, 1}, {1024, 10}}
	if b.quick {
		sizes = sizes[:1]
	}

	for _, size := range sizes {
		some, err := b.startManyPlugins(ctx, size.vfs, size.pools)
		if err != nil {
			return nil, fmt.Errorf("%d VFs in %d pools: %w", size.vfs, size.pools, err)
		}
		out = append(out, some...)
	}

	return out, nil
}

func (b *bench) startManyPlugins(
	ctx context.Context, vfs, pools int,
) (out []Measurement, err error) {
	h, err := b.newHost(ctx, vfs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.close()) }()

	what := fmt.Sprintf("start to %d VFs in %d pools ", vfs, pools)
	if pools == 1 {
		what = fmt.Sprintf("start to %d VFs in 1 pool ", vfs)
	}

	const reference = "start it bare, read the tree"
	registered := Measurement{
		What: what + "registered", Unit: Seconds, Goal: lessThan(0.3), Reference: reference,
	}
	listed := Measurement{
		What: what + "listed", Unit: Seconds, Goal: lessThan(0.3), Reference: reference,
	}
	for round := range b.runs(7) + b.warmUp() {
		p, err := b.startPlugins(ctx, h, pools)
		if err != nil {
			return nil, err
		}
		if err := p.close(); err != nil {
			return nil, err
		}

		bare, err := timed(func() error { return b.startBare(ctx, h) })
		if err != nil {
			return nil, err
		}
		if round < b.warmUp() {
			continue // the first run loads the program and the tree into memory
		}

		registered.Samples = append(registered.Samples, p.registered.Seconds())
		listed.Samples = append(listed.Samples, p.listed.Seconds())
		listed.ReferenceSamples = append(listed.ReferenceSamples, bare.Seconds())
		registered.ReferenceSamples = listed.ReferenceSamples
	}

	return []Measurement{registered, listed}, nil
}

// startBare does what any device plugin must do: it starts the agent's program, only to print its
// version, and reads for each Function what pools select by.
func (b *bench) startBare(ctx context.Context, h *host) error {
	if err := exec.CommandContext(ctx, filepath.Join(b.bin, "xpu-agent"),
		"--version").Run(); err != nil {
		return err
	}

	devices := filepath.Join(h.simulated.SysRoot(), "bus/pci/devices")
	entries, err := os.ReadDir(devices)
	if err != nil {
		return err
	}

	for _, entry := range entries {
		dir := filepath.Join(devices, entry.Name())
		for _, name := range []string{"class", "vendor", "device", "numa_node"} {
			if _, err := os.ReadFile(filepath.Join(dir, name)); err != nil {
				return err
			}
		}

		for _, name := range []string{"driver", "physfn"} {
			_, _ = os.Readlink(filepath.Join(dir, name)) // not every device has them
		}
		_, _ = os.ReadDir(filepath.Join(dir, "net"))
	}

	return nil
}

// measureVF measures the time until the kubelet knows that a VF was added or removed.
func measureVF(ctx context.Context, b *bench) (out []Measurement, err error) {
	vfs := 128
	if b.quick {
		vfs = 16
	}

	h, err := b.newLiveHost(ctx, vfs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.close()) }()

	p, err := b.startPlugins(ctx, h, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.close()) }()

	pf := h.functions[slices.IndexFunc(h.functions, func(f simulate.Function) bool {
		return f.Index < 0
	})].Address
	others := vfs - vfs/pfs
	added := Measurement{
		What: fmt.Sprintf("VF added to %d others, listed", others), Unit: Seconds,
		Goal: lessThan(1), Reference: "make the VF",
	}

	removed := Measurement{
		What: "VF removed, listed", Unit: Seconds, Goal: lessThan(1), Reference: "remove the VF",
	}

	if err := p.change(ctx, nil, others, func() error {
		return h.simulated.RemoveVFs(pf)
	}); err != nil {
		return nil, err
	}

	for range b.runs(6) {
		if err := p.change(ctx, &added, others+1, func() error {
			return h.simulated.AddVFs(pf, 1)
		}); err != nil {
			return nil, err
		}
		if err := p.change(ctx, &removed, others, func() error {
			return h.simulated.RemoveVFs(pf)
		}); err != nil {
			return nil, err
		}
	}

	return []Measurement{added, removed}, nil
}

// change measures the time from the start of a change until the kubelet's list shows it. m may be
// nil.
func (p *plugins) change(
	ctx context.Context, m *Measurement, healthy int, change func() error,
) error {
	begin := time.Now()
	bare, err := timed(change)
	if err != nil {
		return err
	}

	err = p.until(ctx, fmt.Sprintf("have %d VFs", healthy), func() bool {
		return p.healthy() == healthy
	})
	if err != nil {
		return err
	}

	if m != nil {
		m.Samples = append(m.Samples, time.Since(begin).Seconds())
		m.ReferenceSamples = append(m.ReferenceSamples, bare.Seconds())
	}

	return sleep(ctx, 500*time.Millisecond) // until the simulation sends no more messages
}

// newLiveHost returns a host whose Functions have netdevs in this network namespace, which the tree
// follows.
func (b *bench) newLiveHost(ctx context.Context, vfs int) (_ *host, err error) {
	xpu, err := netns.Make(filepath.Join(b.dir, "xpu.netns"))
	if err != nil {
		return nil, err
	}

	h, err := b.simulate(ctx, vfs, simulate.Config{HostNS: "/proc/self/ns/net", XPUNS: xpu.Path()})
	if err != nil {
		return nil, errors.Join(err, xpu.Close())
	}

	h.xpu = xpu
	return h, h.clear()
}

// measureAllocate measures how long the kubelet waits when it allocates a VF to a container. The
// kubelet allocates for one container at a time.
func measureAllocate(ctx context.Context, b *bench) (out []Measurement, err error) {
	vfs, calls := 1024, 2000
	if b.quick {
		vfs, calls = 64, 100
	}

	h, err := b.newHost(ctx, vfs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.close()) }()

	if out, err = b.allocateMany(ctx, h, calls); err != nil {
		return nil, err
	}

	memory, err := b.measureDirectMemory(ctx, h)
	return append(out, memory), err
}

func (b *bench) allocateMany(
	ctx context.Context, h *host, calls int,
) (out []Measurement, err error) {
	p, err := b.startPlugins(ctx, h, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.close()) }()

	conn, err := kubelettest.Dial(p.Endpoints(p.resources[0])[0])
	if err != nil {
		return nil, err
	}
	defer conn.Close()

	client := pluginapi.NewDevicePluginClient(conn)
	const reference = "empty call of the same server"
	what := fmt.Sprintf("Allocate one of %d VFs, ", h.vfs)
	middle := Measurement{What: what + "p50", Unit: Seconds, Reference: reference}
	worst := Measurement{
		What: what + "p99", Unit: Seconds, Reference: reference, Goal: lessThan(0.001),
	}
	for round := range b.runs(5) + b.warmUp() {
		took, bare, err := h.allocate(ctx, client, calls)
		if err != nil {
			return nil, err
		}
		if round < b.warmUp() {
			continue // from now on each VF has its device-info file
		}

		for _, m := range []struct {
			*Measurement
			percent int
		}{{&middle, 50}, {&worst, 99}} {
			m.Samples = append(m.Samples, percentile(took, m.percent))
			m.ReferenceSamples = append(m.ReferenceSamples, percentile(bare, m.percent))
		}
	}

	return []Measurement{middle, worst}, nil
}

// allocate allocates one VF after the other, alternating with calls of the same server that do
// nothing.
func (h *host) allocate(
	ctx context.Context, client pluginapi.DevicePluginClient, calls int,
) (took, bare []float64, err error) {
	vfs := slices.DeleteFunc(slices.Clone(h.functions), func(f simulate.Function) bool {
		return f.Index < 0
	})
	for i := range calls {
		id := function.ID{Address: vfs[i%len(vfs)].Address}.String()
		one, err := timed(func() error {
			response, err := client.Allocate(ctx, &pluginapi.AllocateRequest{
				ContainerRequests: []*pluginapi.ContainerAllocateRequest{
					{DevicesIds: []string{id}},
				},
			}, grpc.WaitForReady(true))

			if err == nil &&
				(len(response.ContainerResponses) != 1 ||
					len(response.ContainerResponses[0].Envs) == 0) {
				err = fmt.Errorf("allocate %s: response %v, want one container with an environment",
					id, response)
			}

			return err
		})

		if err != nil {
			return nil, nil, err
		}

		empty, err := timed(func() error {
			_, err := client.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
			return err
		})
		if err != nil {
			return nil, nil, err
		}

		took, bare = append(took, one.Seconds()), append(bare, empty.Seconds())
	}

	return took, bare, nil
}

// percentile returns the smallest sample such that percent % of the samples are not greater.
func percentile(samples []float64, percent int) float64 {
	sorted := slices.Sorted(slices.Values(samples))
	if len(sorted) == 0 {
		return 0
	}
	return sorted[(len(sorted)-1)*percent/100]
}

// measureDirectMemory measures the memory of an idle agent without an API server.
func (b *bench) measureDirectMemory(ctx context.Context, h *host) (m Measurement, err error) {
	m = Measurement{
		What: fmt.Sprintf("agent with %d VFs, direct mode, memory (RSS) idle", h.vfs), Unit: Bytes,
		Goal: lessThan(50e6),
	}

	for range b.runs(3) {
		resident, err := b.directMemoryOnce(ctx, h)
		if err != nil {
			return m, err
		}
		m.Samples = append(m.Samples, resident)
	}

	return m, nil
}

func (b *bench) directMemoryOnce(ctx context.Context, h *host) (resident float64, err error) {
	p, err := b.startPlugins(ctx, h, 1)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, p.close()) }()

	if err := sleep(ctx, 5*time.Second); err != nil {
		return 0, err
	}
	return p.resident()
}
