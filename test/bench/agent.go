// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// pfs is the number of PFs of the simulated card, over which the VFs are spread.
const pfs = 4

// host is a simulated host: a sysfs tree, and the directories of an agent.
type host struct {
	dir       string
	runDir    string // in memory
	vfs       int
	simulated *simulate.Host
	functions []simulate.Function
	xpu       *netns.Namespace // of the representors; nil without netdevs
}

// newHost returns a host with a card of 4 PFs.
func (b *bench) newHost(ctx context.Context, vfs int) (*host, error) {
	h, err := b.simulate(ctx, vfs, simulate.Config{})
	if err != nil {
		return nil, err
	}

	for _, f := range h.functions {
		if err := h.showNetdev(f); err != nil {
			return nil, errors.Join(err, h.close())
		}
	}

	return h, h.clear()
}

// simulate returns a host for the configuration, which needs only network namespaces.
func (b *bench) simulate(ctx context.Context, vfs int, config simulate.Config) (*host, error) {
	dir, err := os.MkdirTemp(b.dir, "host-")
	if err != nil {
		return nil, err
	}

	h := &host{dir: dir, runDir: filepath.Join(b.runDir, filepath.Base(dir)), vfs: vfs}
	config.Root, config.Cards, config.Log = dir, []simulate.Card{
		{PFs: pfs, VFs: vfs / pfs},
	}, logr.Discard()
	if h.simulated, err = simulate.New(ctx, config); err != nil {
		return nil, fmt.Errorf("simulated host: %w", err)
	}

	h.functions = h.simulated.Functions()
	return h, nil
}

// showNetdev adds a netdev to sysfs that does not exist, with the attributes that an agent reads
// when it starts.
func (h *host) showNetdev(f simulate.Function) error {
	dir := filepath.Join(h.simulated.SysRoot(), "bus/pci/devices", string(f.Address),
		"net", f.Netdev)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}

	var errs []error
	for name, value := range map[string]string{
		"operstate": "up", "carrier": "1", "phys_port_name": "", "dev_port": "0", "mtu": "1500",
	} {
		errs = append(errs, os.WriteFile(filepath.Join(dir, name), []byte(value+"\n"), 0o644))
	}

	return errors.Join(errs...)
}

func (h *host) close() error {
	err := errors.Join(h.simulated.Close(), os.RemoveAll(h.dir), os.RemoveAll(h.runDir))
	if h.xpu != nil {
		err = errors.Join(err, h.xpu.Close())
	}
	return err
}

func (h *host) path(name string) string { return filepath.Join(h.dir, name) }

func (h *host) cniSocket() string { return filepath.Join(h.runDir, "agent/cni.sock") }
func (h *host) spoolDir() string  { return h.path("state/spool") }

// clear removes what an agent left.
func (h *host) clear() error {
	var errs []error
	for _, dir := range []string{h.path("state"), h.path("kubelet"), h.path("cdi"), h.runDir} {
		errs = append(errs, os.RemoveAll(dir), os.Mkdir(dir, 0o755))
	}
	return errors.Join(append(errs, os.Mkdir(h.path("kubelet/plugins_registry"), 0o755))...)
}

// agent is a running xpu-agent.
type agent struct {
	*process
	address string // of its metrics
	// kubelet answers which pods have devices, because the agent asks before it publishes anything.
	kubelet *kubelettest.Pods
}

func (a *agent) end() error {
	err := a.process.end()
	a.kubelet.Stop()
	return err
}

// startAgent starts an agent that uses the cluster.
func (b *bench) startAgent(c *cluster, h *host) (*agent, error) {
	return b.startAgentWith(h, "--kubeconfig="+c.agentKubeconfig)
}

// startDirect starts an agent without an API server. Its pools are those of [host.writePools].
func (b *bench) startDirect(h *host, more ...string) (*agent, error) {
	return b.startAgentWith(h,
		append([]string{"--provisioner=direct", "--config-file=" + h.path("config.json")},
			more...)...)
}

func (b *bench) startAgentWith(h *host, mode ...string) (*agent, error) {
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}

	kubelet, err := kubelettest.ServePods(h.path("kubelet"))
	if err != nil {
		return nil, err
	}

	p, err := b.start(h.dir, "xpu-agent", append([]string{
		"--node-name=" + nodeName, "--sys-root=" + h.simulated.SysRoot(),
		"--state-dir=" + h.path("state"), "--kubelet-dir=" + h.path("kubelet"), "--cdi-dir=" +
			h.path("cdi"),
		"--cni-socket=" + h.cniSocket(), "--spool-dir=" + h.spoolDir(), "--devinfo-dir=" +
			filepath.Join(h.runDir, "devinfo"),
		"--hooks-dir=" + h.path("hooks.d"), "--nri-socket=" + h.path("nri.sock"),
		"--listen=" + address,
	}, mode...)...)

	if err != nil {
		kubelet.Stop()
		return nil, err
	}

	return &agent{p, address, kubelet}, nil
}

// freeAddress returns an unused loopback address. No other program uses the network namespace.
func freeAddress() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}

// published returns a check that the agent reports all devices as published.
func (a *agent) published(devices int) func(context.Context) error {
	return func(ctx context.Context) error {
		got, err := a.metric(ctx, "xpu_dra_devices")
		if err == nil && got != float64(devices) {
			err = fmt.Errorf("%g of %d devices are published", got, devices)
		}
		return err
	}
}

func (a *agent) metric(ctx context.Context, name string) (float64, error) {
	text, err := fetch(ctx, "http://"+a.address+"/metrics")
	if err != nil {
		return 0, err
	}

	for line := range strings.Lines(text) {
		if value, found := strings.CutPrefix(line, name+" "); found {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}

	return 0, fmt.Errorf("metric %s: is not there", name)
}

// fetch returns the content at a URL.
func fetch(ctx context.Context, url string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}

	request.Header.Set("Accept-Encoding", "identity")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()

	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, response.Status)
	}

	return string(text), err
}
