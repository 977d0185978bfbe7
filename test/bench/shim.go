// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/cni"
	api "github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// shim is the name of the CNI plugin.
const shim = "xpu-cni"

// pause is the time for work that an ADD or DEL leaves to others: the agent checks its Functions
// again a while after a message of the kernel.
const pause = 300 * time.Millisecond

// pods is a host whose VFs have netdevs in this network namespace, with the namespaces of as many
// pods. The tree does not follow the netdevs, but always shows them on the host, so that the
// simulation is not measured.
type pods struct {
	*host
	programs string // directory of the built plugin
	shim     string // the installed plugin, which calls the agent
	own      *netlink.Handle
	ownNS    *os.File
	vfs      []simulate.Function
	netns    []*netns.Namespace
	lastName int
}

// newPods creates veth pairs. The other end of a VF's pair stays here too, as the representor that
// opi-bridge uses.
func (b *bench) newPods(ctx context.Context, n int) (p *pods, err error) {
	p = &pods{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()

	if p.own, err = netlink.NewHandle(); err != nil {
		return p, err
	}
	if p.ownNS, err = os.Open("/proc/self/ns/net"); err != nil {
		return p, err
	}
	if p.host, err = b.newHost(ctx, max(n, pfs)); err != nil {
		return p, err
	}

	p.programs = b.bin
	p.shim, err = p.installShim("shim", cni.Paths{Socket: p.cniSocket(), SpoolDir: p.spoolDir()})
	if err != nil {
		return p, err
	}

	for _, f := range p.functions {
		representor := f.Representor
		if f.Index >= 0 {
			representor = f.PortID()
			p.vfs = append(p.vfs, f)
		}

		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: f.Netdev}, PeerName: representor}
		if err := p.own.LinkAdd(veth); err != nil {
			return p, fmt.Errorf("netdev %s: %w", f.Netdev, err)
		}
	}

	for i := range n {
		pod, err := netns.Make(p.path(fmt.Sprintf("pod-%d.netns", i)))
		if err != nil {
			return p, err
		}
		p.netns = append(p.netns, pod)
	}

	return p, nil
}

// installShim installs the plugin in a directory of the host, and returns its path. The plugin
// finds the agent by the file beside it.
func (p *pods) installShim(dir string, paths cni.Paths) (string, error) {
	program, err := os.ReadFile(filepath.Join(p.programs, shim))
	if err != nil {
		return "", err
	}

	content, err := json.Marshal(paths)
	if err != nil {
		return "", err
	}

	binary := p.path(filepath.Join(dir, shim))
	return binary, errors.Join(
		os.MkdirAll(filepath.Dir(binary), 0o755),
		os.WriteFile(binary, program, 0o755),
		os.WriteFile(cni.PathsFile(binary), content, 0o644),
	)
}

// startAgent calls start, with a kubelet that gave each pod its VF. It removes all earlier state
// first.
func (p *pods) startAgent(start func() (*agent, error)) (*agent, error) {
	if err := errors.Join(p.clear(), p.writePools(1)); err != nil {
		return nil, err
	}

	a, err := start()
	if err != nil {
		return nil, err
	}

	var given []*podresourcesapi.PodResources
	for i := range p.netns {
		given = append(given, kubelettest.Pod(podName(i), "intel.com/pool0", p.id(i)))
	}

	a.kubelet.Set(given...)
	return a, nil
}

func podName(i int) string { return fmt.Sprintf("pod-%d", i) }

func (p *pods) id(i int) string { return function.ID{Address: p.vfs[i].Address}.String() }

func (p *pods) close() error {
	var errs []error
	for _, pod := range p.netns {
		errs = append(errs, pod.Close())
	}

	if p.host != nil {
		for _, f := range p.functions {
			if l, err := p.own.LinkByName(f.Netdev); err == nil {
				errs = append(errs, p.own.LinkDel(l))
			}
		}
		errs = append(errs, p.host.close())
	}

	if p.ownNS != nil {
		errs = append(errs, p.ownNS.Close())
	}

	if p.own != nil {
		_ = p.own.Close()
	}

	return errors.Join(errs...)
}

// invocation has the parameters that the container runtime passes to the shim.
type invocation struct {
	container, pod string
	netns          string
	config         []byte
}

// invoke returns the invocation for a VF and a pod, each time with another container.
func (p *pods) invoke(number int, network string) (invocation, error) {
	p.lastName++
	config, err := json.Marshal(map[string]any{
		"cniVersion": "1.1.0", "name": "bench", "type": shim,
		"deviceID": p.id(number), "network": network, "mtu": 1400,
		"runtimeConfig": map[string]any{
			"mac": fmt.Sprintf("02:00:00:00:01:%02x", number),
			"ips": []string{fmt.Sprintf("10.10.0.%d/24", number+1)},
		},
	})

	return invocation{
		fmt.Sprintf("container-%d", p.lastName), podName(number), p.netns[number].Path(), config,
	}, err
}

// run runs the shim to its end, like a container runtime.
func (p *pods) run(ctx context.Context, command string, i invocation) (time.Duration, error) {
	return runShim(shimCommand(ctx, p.shim, command, i))
}

// runShim runs a shim's command to its end.
func runShim(cmd *exec.Cmd) (time.Duration, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	took, err := timed(cmd.Run)
	if err != nil {
		return 0, fmt.Errorf("%s %s: %w:\n%s%s", shim, cmd.Env[0], err, &stdout, &stderr)
	}
	if stderr.Len() > 0 { // it was spooled, because the agent did not answer
		return 0, fmt.Errorf("%s %s: %s", shim, cmd.Env[0], &stderr)
	}

	return took, nil
}

// shimCommand returns the command with which a container runtime calls a plugin.
func shimCommand(ctx context.Context, binary, command string, i invocation) *exec.Cmd {
	cmd := exec.CommandContext(ctx, binary)
	cmd.Env = []string{
		"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + i.container, "CNI_IFNAME=net1",
		"CNI_NETNS=" + i.netns,
		"CNI_PATH=" + filepath.Dir(binary),
		"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=" + i.pod +
			";K8S_POD_UID=" + i.pod,
	}

	cmd.Stdin = bytes.NewReader(i.config)
	return cmd
}

// free waits until all Functions are free again, because a DEL returns when the netdev is back, and
// the rest follows later.
func (p *pods) free(ctx context.Context, a *agent) error {
	if err := sleep(ctx, pause); err != nil {
		return err
	}
	return a.await(ctx, "has free Functions", func(ctx context.Context) error {
		waiting, err := a.metric(ctx, "xpu_hook_queue_length")
		if err == nil && waiting > 0 {
			err = fmt.Errorf("%g Functions are not free yet", waiting)
		}
		return err
	})
}

// measureShim compares ADD and DEL with the bare move of the same netdev, and many in parallel with
// as many in sequence.
func measureShim(ctx context.Context, b *bench) (out []Measurement, err error) {
	many := 64
	if b.quick {
		many = 4
	}

	p, err := b.newPods(ctx, many)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.close()) }()

	a, err := p.startAgent(func() (*agent, error) { return b.startDirect(p.host) })
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.end()) }()

	if err := p.serves(ctx, a); err != nil {
		return nil, err
	}

	one, err := b.oneInterface(ctx, p, a)
	if err != nil {
		return nil, err
	}

	all, err := b.manyInterfaces(ctx, p, a)
	if err != nil {
		return nil, err
	}

	memory, err := b.measureShimMemory(ctx, p)
	return append(append(one, all...), memory), err
}

// serves waits until an ADD can succeed.
func (p *pods) serves(ctx context.Context, a *agent) error {
	i, err := p.invoke(0, "")
	if err != nil {
		return err
	}
	return a.await(ctx, "serves the shim", func(ctx context.Context) error {
		_, err := p.run(ctx, "STATUS", i)
		return err
	})
}

// interfaceTimes are the times to attach and detach interfaces.
type interfaceTimes struct {
	// of the shim without work, and of an empty program
	start, least   []float64
	move, moveBack []float64 // by an agent that does nothing else
	add, del       []float64 // of the shim's whole run
}

// oneInterface attaches and detaches one VF repeatedly.
func (b *bench) oneInterface(ctx context.Context, p *pods, a *agent) ([]Measurement, error) {
	bare, err := p.listenBare()
	if err != nil {
		return nil, err
	}
	defer bare.listener.Close()

	var t interfaceTimes
	for round := range b.runs(30) + b.warmUp() {
		if err := p.round(ctx, a, bare, &t); err != nil {
			return nil, err
		}
		if round < b.warmUp() {
			t = interfaceTimes{}
		}
	}

	return []Measurement{
		{
			What: "start of the shim (VERSION)", Unit: Seconds, Samples: t.start,
			Reference: "start of /bin/true", ReferenceSamples: t.least,
		},
		{
			What: "ADD by the shim, without its start", Unit: Seconds,
			Samples:   without(t.start, t.add),
			Reference: "bare move into the pod", ReferenceSamples: t.move, Goal: atMostTimes(1.25),
		},
		{
			What: "DEL by the shim, without its start", Unit: Seconds,
			Samples:   without(t.start, t.del),
			Reference: "bare move back", ReferenceSamples: t.moveBack, Goal: atMostTimes(1.25),
		},
	}, nil
}

// without subtracts the median of a part from each sample of the whole.
func without(part, whole []float64) (rest []float64) {
	for _, sample := range whole {
		rest = append(rest, sample-median(part))
	}
	return rest
}

// round attaches and detaches the VF with an agent that only moves it, and with the real one.
func (p *pods) round(ctx context.Context, a *agent, bare *bareAgent, t *interfaceTimes) error {
	netdev := p.vfs[0].Netdev
	i, err := p.invoke(0, "")
	if err != nil {
		return err
	}

	add := func(samples *[]float64) func(time.Duration, error) error {
		return func(took time.Duration, err error) error {
			*samples = append(*samples, took.Seconds())
			return err
		}
	}

	for _, step := range []func() error{
		func() error { return add(&t.least)(timed(exec.CommandContext(ctx, "/bin/true").Run)) },
		func() error { return add(&t.start)(p.run(ctx, "VERSION", i)) },
		func() error {
			return add(&t.move)(bare.run(ctx, "ADD", i, func() (time.Duration, error) {
				return moveBare(netdev, p.own, p.netns[0].Fd())
			}))
		},
		func() error {
			return add(&t.moveBack)(bare.run(ctx, "DEL", i, func() (time.Duration, error) {
				return moveBare(netdev, p.netns[0].Handle(), int(p.ownNS.Fd()))
			}))
		},
		func() error { return add(&t.add)(p.run(ctx, "ADD", i)) },
		func() error { return add(&t.del)(p.run(ctx, "DEL", i)) },
	} {
		if err := errors.Join(step(), sleep(ctx, pause)); err != nil {
			return err
		}
	}

	return p.free(ctx, a)
}

// bareAgent is an agent that does only the measured operation while a shim waits. The shim matters
// because the kernel's times depend on its other work, such as a process that has just started.
type bareAgent struct {
	*pods
	listener *net.UnixListener
	shim     string // the plugin that calls this agent
}

func (p *pods) listenBare() (*bareAgent, error) {
	socket := p.path("bare.sock")
	binary, err := p.installShim("bare", cni.Paths{Socket: socket, SpoolDir: p.spoolDir()})
	if err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	return &bareAgent{p, listener, binary}, err
}

// accept returns the connection of a shim that has sent its request and waits.
func (b *bareAgent) accept() (net.Conn, error) {
	if err := b.listener.SetDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}

	conn, err := b.listener.Accept()
	if err != nil {
		return nil, err
	}
	if _, err := io.ReadAll(conn); err != nil {
		return nil, errors.Join(err, conn.Close())
	}

	return conn, nil
}

// run runs the shim, calls f while it waits, and returns the time of f.
func (b *bareAgent) run(
	ctx context.Context, command string, i invocation, f func() (time.Duration, error),
) (took time.Duration, err error) {
	served := make(chan error, 1)
	go func() {
		served <- b.serve(func() (err error) {
			took, err = f()
			return err
		})
	}()

	_, err = runShim(shimCommand(ctx, b.shim, command, i))
	return took, errors.Join(err, <-served)
}

func (b *bareAgent) serve(f func() error) error {
	conn, err := b.accept()
	if err != nil {
		return err
	}
	defer conn.Close()

	if err := f(); err != nil {
		return err
	}

	return json.NewEncoder(conn).Encode(api.Reply{
		Version: api.Version,
		Result:  json.RawMessage(`{"cniVersion":"1.1.0","interfaces":[{"name":"net1"}]}`),
	})
}

// manyInterfaces attaches and detaches all VFs, alternately in sequence and in parallel.
func (b *bench) manyInterfaces(ctx context.Context, p *pods, a *agent) ([]Measurement, error) {
	n := len(p.netns)
	adds := Measurement{
		What: fmt.Sprintf("%d ADDs at once", n), Unit: Seconds, Reference: "in a row",
		Goal: lessThanTimes(1),
	}

	dels := Measurement{
		What: fmt.Sprintf("%d DELs at once", n), Unit: Seconds, Reference: "in a row",
	}
	for range b.runs(3) {
		for _, way := range []struct {
			run       func(n int, one func(i int) error) error
			add, dels *[]float64
		}{
			{inARow, &adds.ReferenceSamples, &dels.ReferenceSamples},
			{atOnce, &adds.Samples, &dels.Samples},
		} {
			add, del, err := p.comeAndGo(ctx, a, way.run)
			if err != nil {
				return nil, err
			}
			*way.add, *way.dels = append(*way.add, add.Seconds()), append(*way.dels, del.Seconds())
		}
	}

	return []Measurement{adds, dels}, nil
}

func (p *pods) comeAndGo(
	ctx context.Context, a *agent, run func(int, func(int) error) error,
) (add, del time.Duration, err error) {
	all := make([]invocation, len(p.netns))
	for i := range all {
		if all[i], err = p.invoke(i, ""); err != nil {
			return 0, 0, err
		}
	}

	do := func(command string) (time.Duration, error) {
		return timed(func() error {
			return run(len(all), func(i int) error {
				_, err := p.run(ctx, command, all[i])
				return err
			})
		})
	}

	if add, err = do("ADD"); err != nil {
		return 0, 0, err
	}
	if err := sleep(ctx, pause); err != nil {
		return 0, 0, err
	}
	if del, err = do("DEL"); err != nil {
		return 0, 0, err
	}

	return add, del, p.free(ctx, a)
}

func inARow(n int, one func(i int) error) error {
	for i := range n {
		if err := one(i); err != nil {
			return err
		}
	}
	return nil
}

func atOnce(n int, one func(i int) error) error {
	errs := make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { errs[i] = one(i) })
	}
	group.Wait()
	return errors.Join(errs...)
}

// measureShimMemory measures the shim's memory while it waits for the agent, which is nearly its
// whole life. The kernel's value for an ended process (getrusage(2), ru_maxrss) is unsuitable,
// because it includes the process before exec, which was a copy of this one.
func (b *bench) measureShimMemory(ctx context.Context, p *pods) (m Measurement, err error) {
	m = Measurement{What: "shim, memory (RSS) while it waits", Unit: Bytes}
	bare, err := p.listenBare()
	if err != nil {
		return m, err
	}
	defer bare.listener.Close()

	i, err := p.invoke(0, "")
	if err != nil {
		return m, err
	}

	for range b.runs(5) {
		resident, err := bare.waitingShim(ctx, i)
		if err != nil {
			return m, err
		}
		m.Samples = append(m.Samples, resident)
	}

	return m, nil
}

// mappedSize matches a value that is counted page by page (proc_pid_smaps(5)); VmRSS may be some
// hundred kB off.
var mappedSize = regexp.MustCompile(`(?m)^Rss:\s+([0-9]+) kB`)

func (b *bareAgent) waitingShim(ctx context.Context, i invocation) (resident float64, err error) {
	cmd := shimCommand(ctx, b.shim, "ADD", i)
	if err := cmd.Start(); err != nil {
		return 0, err
	}

	defer func() {
		_ = cmd.Process.Kill() // it would wait for long
		_ = cmd.Wait()
	}()

	conn, err := b.accept()
	if err != nil {
		return 0, err
	}
	defer conn.Close()

	return kilobytes(cmd.Process.Pid, "smaps_rollup", mappedSize)
}
