// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/pkg/controller"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

const (
	// resource is the resource of the pool fast.
	resource = "xpu.opiproject.org/fast"
	// labMTU is the MTU of the network lab.
	labMTU = 1450
	// podAddress is the address from the IPAM plugin.
	podAddress = "10.1.0.5/24"
)

// site is a world with everything that an extended resource needs: a card of two VFs with netdevs,
// the xPU's OPI agent, the kubelet, an IPAM plugin, and an administrator's post-delete hook.
type site struct {
	*world
	opi     *opitest.Agent
	kubelet *kubelettest.Kubelet
	pods    *kubelettest.Pods
	vfs     []function.ID
	dir     string
	// before has the host's netdevs before the agent started.
	before map[string]hostNetdev
	// declare creates or replaces the DevicePool fast.
	declare func(v1alpha1.DevicePoolSpec)
}

// eachProvisioner runs a test with both provisioners, because pods must see no difference.
func eachProvisioner(t *testing.T, test func(t *testing.T, s *site)) {
	t.Run(string(ProvisionerDirect), func(t *testing.T) { test(t, newDirectSite(t)) })
	t.Run(string(ProvisionerCRD), func(t *testing.T) { test(t, newCRDSite(t)) })
}

func newSite(t *testing.T) *site {
	t.Helper()
	xpu := netns.New(t)
	w := newNode(t, simulate.Config{
		Cards:  []simulate.Card{{PFs: 1, VFs: 2, Bus: "3b", LinkSpeed: 25000}},
		HostNS: "/proc/thread-self/ns/net", XPUNS: xpu.Path(),
	})

	w.config.ProvisionTimeout = 30 * time.Second
	s := &site{world: w, opi: opitest.Start(t), dir: filepath.Dir(w.config.KubeletDir),
		before: netdevs(t)}
	for _, address := range w.functions("0000:3b:00.0") {
		s.vfs = append(s.vfs, function.ID{Address: address})
	}

	s.kubelet = kubelettest.New(w.config.KubeletDir, kubelettest.Options{})
	if err := s.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.kubelet.Stop)

	pods, err := kubelettest.ServePods(w.config.KubeletDir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pods.Stop)

	s.pods = pods
	s.script("bin/fixed",
		`test "$CNI_COMMAND" != ADD || echo '{"cniVersion": "1.1.0", "ips": [{"address": "`+
			podAddress+`"}]}'`)
	s.script("hooks.d/10-note", "cat >>"+s.path("noted"))

	return s
}

// newDirectSite returns a site without an API server. A configuration of
// sriov-network-device-plugin declares the pool, and another file the xPU and its network.
func newDirectSite(t *testing.T) *site {
	t.Helper()
	s := newSite(t)
	s.config.ConfigFile, s.config.ResourcePrefix = s.path("pools"), v1alpha1.GroupName
	s.config.DirectConfig = s.path("direct.yaml")
	s.write("direct.yaml", fmt.Sprintf(`
xpus: [{name: card, endpoint: %q, insecure: true}]
networks: {lab: {vlan: 100, mtu: %d, allowedNamespaces: {from: All}}}
pools: {fast: lab}
`, s.opi.Config().Endpoint, labMTU))

	s.write("pools", `{"resourceList": [
		{"resourceName": "fast", "selectors": {"vendors": ["15b3"], "drivers": ["mlx5_core"]}}
	]}`)

	s.declare = func(spec v1alpha1.DevicePoolSpec) {
		text, err := yaml.Marshal(v1alpha1.DevicePool{
			TypeMeta: metav1.TypeMeta{
				APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "DevicePool",
			},
			ObjectMeta: metav1.ObjectMeta{Name: "fast"}, Spec: spec,
		})

		if err != nil {
			t.Fatal(err)
		}

		s.write("pools", string(text))
	}

	return s
}

// newCRDSite returns a site with the API server, the same declarations, and xpu-controller.
func newCRDSite(t *testing.T) *site {
	t.Helper()
	s := newSite(t)
	s.connect()

	s.create(&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card"}, Spec: v1alpha1.XPUSpec{
		NodeName: nodeName, PFs: []string{"0000:3b:00.0"}, Endpoint: s.opi.Config().Endpoint,
		Insecure: true,
	}})

	s.create(&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "lab"},
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: 100, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromAll,
			},
			MTU: new(int32(labMTU)),
		}})

	pool := &v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: "fast"}, Spec: byDevicePlugin(v1alpha1.ProvisionAtAdd),
	}
	s.create(pool)

	s.declare = func(spec v1alpha1.DevicePoolSpec) {
		if err := s.admin.Get(t.Context(), client.ObjectKeyFromObject(pool), pool); err != nil {
			t.Fatal(err)
		}
		pool.Spec = spec
		if err := s.admin.Update(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
	}

	s.startController()
	return s
}

// byDevicePlugin returns the spec of a pool that is offered as an extended resource.
func byDevicePlugin(at v1alpha1.ProvisionPoint) v1alpha1.DevicePoolSpec {
	return v1alpha1.DevicePoolSpec{
		Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}, Network: "lab",
		Allow:        v1alpha1.PrivilegedFields(),
		Publish:      v1alpha1.PublishDevicePlugin,
		DevicePlugin: &v1alpha1.DevicePluginSpec{ProvisionAt: at},
	}
}

// byDRA returns the spec of the same pool, offered by DRA.
func byDRA() v1alpha1.DevicePoolSpec {
	spec := byDevicePlugin("")
	spec.Publish, spec.DevicePlugin = v1alpha1.PublishDRA, nil
	return spec
}

// start starts an agent, which runs until end is called or the test ends. It returns when CNI
// plugins can reach the agent. The agent may publish Functions before that.
func (s *site) start() {
	s.t.Helper()
	s.world.start()
	s.eventually("the agent listens at its CNI socket", func() bool {
		connection, err := net.Dial("unix", s.config.CNISocket)
		return err == nil && connection.Close() == nil
	})
}

func (s *site) startController() {
	s.t.Helper()
	scheme, err := controller.Scheme()
	if err != nil {
		s.t.Fatal(err)
	}

	manager, err := ctrl.NewManager(cluster.Admin(), ctrl.Options{
		Scheme: scheme, Logger: logr.Discard(),
		Cache:      controller.CacheOptions(kubeapitest.AgentNamespace),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: ctrlconfig.Controller{SkipNameValidation: new(true)},
	})

	if err != nil {
		s.t.Fatal(err)
	}

	err = controller.Setup(s.t.Context(), manager, controller.Options{
		Installation: opitest.Installation, FailedGrace: 50 * time.Millisecond,
		Namespace: kubeapitest.AgentNamespace, Registerer: prometheus.NewRegistry(),
		Debounce: 50 * time.Millisecond,
	})

	if err != nil {
		s.t.Fatal(err)
	}

	must.Run(s.t, manager.Start)
}

func (s *site) path(name string) string { return filepath.Join(s.dir, name) }

// write replaces a file atomically.
func (s *site) write(name, text string) {
	s.t.Helper()
	err := os.WriteFile(s.path(name+".new"), []byte(text), 0o600)
	if err := errors.Join(err, os.Rename(s.path(name+".new"), s.path(name))); err != nil {
		s.t.Fatal(err)
	}
}

// script makes an executable.
func (s *site) script(name, commands string) {
	s.t.Helper()
	err := os.MkdirAll(filepath.Dir(s.path(name)), 0o755)
	if err := errors.Join(err,
		os.WriteFile(s.path(name), []byte("#!/bin/sh -e\n"+commands+"\n"), 0o755)); err != nil {
		s.t.Fatal(err)
	}
}

// wantHealthy waits until the kubelet may give exactly these Functions to pods.
func (s *site) wantHealthy(functions ...function.ID) {
	s.t.Helper()
	var want []string
	for _, f := range functions {
		want = append(want, f.String())
	}

	ctx, cancel := context.WithTimeout(s.t.Context(), 60*time.Second)
	defer cancel()

	if err := s.kubelet.Wait(ctx, func() bool {
		return slices.Equal(s.kubelet.Healthy(resource), want)
	}); err != nil {
		s.t.Fatalf("the kubelet sees %v, want %q to be healthy: %v",
			s.kubelet.Devices(resource), want, err)
	}
}

// give plays the kubelet that gives a Function to a pod, which is the only pod of the node then.
func (s *site) give(pod string, f function.ID) (map[string]string, error) {
	s.t.Helper()
	s.pods.Set(kubelettest.Pod(pod, resource, f.String()))
	response, err := s.kubelet.Allocate(s.t.Context(), resource, f.String())
	return response.GetEnvs(), err
}

// pod has the network namespace of a pod's sandbox, and the names that the runtime has for both.
type pod struct {
	*netns.Namespace
	name, sandbox string
}

func newPod(t *testing.T, name string) pod {
	t.Helper()
	return pod{netns.New(t), name, name + "-sandbox"}
}

// request returns the arguments with which the runtime executes the CNI plugin for the pod's net1.
// more has additional fields of the network configuration.
func (s *site) request(p pod, f function.ID, more map[string]any) *skel.CmdArgs {
	s.t.Helper()
	config := map[string]any{
		"cniVersion": "1.1.0", "name": "fast-net", "type": "xpu-cni", "deviceID": f.String(),
		"ipam":          map[string]any{"type": "fixed"},
		"runtimeConfig": map[string]any{"CNIDeviceInfoFile": s.path("devinfo/cni/" + p.sandbox)},
	}

	maps.Copy(config, more)
	text, err := json.Marshal(config)
	if err != nil {
		s.t.Fatal(err)
	}

	return &skel.CmdArgs{
		ContainerID: p.sandbox, Netns: p.Path(), IfName: "net1", Path: s.path("bin"),
		StdinData: text,
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=" + p.name + ";K8S_POD_UID=" +
			p.name + "-uid",
	}
}

func (s *site) shim(out io.Writer) skel.CNIFuncs {
	paths := func() (cni.Paths, error) {
		return cni.Paths{Socket: s.config.CNISocket, SpoolDir: s.config.SpoolDir}, nil
	}
	return cni.Plugin{
		DeviceInfoDir: s.path("devinfo/cni"), Paths: paths, Stdout: out, Stderr: io.Discard,
		Now: time.Now,
	}.Funcs()
}

// add runs ADD, and returns the result as it was printed.
func (s *site) add(p pod, f function.ID) (string, error) {
	s.t.Helper()
	var out bytes.Buffer
	err := s.shim(&out).Add(s.request(p, f, nil))
	return out.String(), err
}

// mustAdd runs ADD, and checks that the pod has the interface with the properties of the network
// and the IPAM plugin.
func (s *site) mustAdd(p pod, f function.ID) string {
	s.t.Helper()
	out, err := s.add(p, f)
	if err != nil {
		s.t.Fatalf("ADD: %v", err)
	}
	s.wantInPod(p, f)
	return out
}

func (s *site) del(p pod, f function.ID) {
	s.t.Helper()
	if err := s.shim(io.Discard).Del(s.request(p, f, nil)); err != nil {
		s.t.Fatalf("DEL: %v", err)
	}
}

// wantInPod fails the test unless the pod has the Function as net1, and the xPU serves it.
func (s *site) wantInPod(p pod, f function.ID) {
	s.t.Helper()
	s.wantInterface(p, "net1", provisioning.MAC(nodeName, f), podAddress)
	s.wantPorts(f)
}

// wantInterface fails the test unless the pod has an interface that is up and has the network's
// MTU.
func (s *site) wantInterface(p pod, name string, mac function.MAC, address string) {
	s.t.Helper()
	l, err := p.Handle().LinkByName(name)
	if err != nil {
		s.t.Fatalf("%s is not in %s: %v", name, p.name, err)
	}

	addresses, err := p.Handle().AddrList(l, netlink.FAMILY_V4)
	if err != nil || len(addresses) != 1 {
		s.t.Fatalf("addresses of %s: %v, %v; want one", name, addresses, err)
	}

	a := l.Attrs()
	if a.HardwareAddr.String() != string(mac) || a.MTU != labMTU || a.Flags&net.FlagUp == 0 ||
		addresses[0].IPNet.String() != address {
		s.t.Errorf("%s has MAC %s, MTU %d, flags %s, address %s; want %s, %d, up, %s",
			name, a.HardwareAddr, a.MTU, a.Flags, addresses[0].IPNet, mac, labMTU, address)
	}
}

// wantGone fails the test if the pod has an interface of this name.
func (s *site) wantGone(p pod, name string) {
	s.t.Helper()
	if _, err := p.Handle().LinkByName(name); !errors.As(err, new(netlink.LinkNotFoundError)) {
		s.t.Errorf("%s is still in %s (%v)", name, p.name, err)
	}
}

// awaitOnHost waits until all netdevs are on the host as they were before the agent.
func (s *site) awaitOnHost() {
	s.t.Helper()
	s.eventually("the netdevs are back", func() bool { return cmp.Equal(s.before, netdevs(s.t)) })
}

// wantPorts fails the test unless the xPU serves exactly these Functions.
func (s *site) wantPorts(functions ...function.ID) {
	s.t.Helper()
	var want []string
	for _, f := range functions {
		want = append(want, "vf-"+f.DeviceName())
	}
	if diff := cmp.Diff(want, s.opi.Ports(), cmpopts.EquateEmpty()); diff != "" {
		s.t.Errorf("ports of the OPI agent: -want +got\n%s", diff)
	}
}

// wantOnHost fails the test unless all netdevs are on the host as they were before the agent.
func (s *site) wantOnHost() {
	s.t.Helper()
	if diff := cmp.Diff(s.before, netdevs(s.t)); diff != "" {
		s.t.Errorf("the host's netdevs: -before +now\n%s", diff)
	}
}

// awaitHooks waits until all Functions that are back from pods are free.
func (s *site) awaitHooks() {
	s.t.Helper()
	s.eventually("post-delete hooks are done", func() bool {
		families, err := s.metrics.Gather()
		if err != nil {
			s.t.Fatal(err)
		}

		for _, f := range families {
			if f.GetName() == "xpu_hook_queue_length" {
				return f.GetMetric()[0].GetGauge().GetValue() == 0
			}
		}

		return false
	})
}

// endClean ends the agent once Functions are free, and fails the test if it left something of a pod
// behind.
func (s *site) endClean() {
	s.t.Helper()
	s.eventually("the spool is empty", func() bool {
		files, err := filepath.Glob(filepath.Join(s.config.SpoolDir, "*.json"))
		return err == nil && len(files) == 0
	})

	s.awaitHooks()
	s.end()
	s.wantOnHost()
	s.wantPorts()
	if left := s.records(); len(left) > 0 {
		s.t.Errorf("the journal still has %+v", left)
	}

	for _, dir := range []string{"devinfo/cni", "state/spool", "cdi", "run"} {
		err := filepath.WalkDir(s.path(dir), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() {
				s.t.Errorf("%s is left behind", path)
			}
			return nil
		})
		if err != nil {
			s.t.Error(err)
		}
	}

	if s.admin == nil {
		return
	}

	var ports v1alpha1.XPUPortList
	if err := s.admin.List(s.t.Context(), &ports); err != nil || len(ports.Items) > 0 {
		s.t.Errorf("XPUPorts %+v, %v are left behind", ports.Items, err)
	}
}

// records returns the records of the journal while no agent runs.
func (s *site) records() []journal.Attachment {
	s.t.Helper()
	j, err := journal.Open(filepath.Join(s.config.StateDir, "journal.db"))
	if err != nil {
		s.t.Fatal(err)
	}
	defer j.Close()
	return j.All()
}

// noted returns the inputs of the administrator's hook, one object for each run.
func (s *site) noted() []hookInput {
	s.t.Helper()
	text, err := os.ReadFile(s.path("noted"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.t.Fatal(err)
	}

	var all []hookInput
	for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
		var one hookInput
		if err := decoder.Decode(&one); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			s.t.Fatalf("%q: %v", text, err)
		}
		all = append(all, one)
	}
}

// hookInput has the fields of a hook's input that the tests compare.
type hookInput struct {
	Function    struct{ ID string }
	Resource    string
	Pod         struct{ Namespace, Name, UID string }
	ContainerID string
	Port        struct{ Network string }
}

// hostNetdev has the properties of a netdev that must be the same after a pod had it.
type hostNetdev struct {
	Type, MAC, Alias string
	MTU, TxQLen      int
	Up               bool
	AltNames         []string
	Addresses        []string
}

// netdevs returns the host's netdevs by name.
func netdevs(t *testing.T) map[string]hostNetdev {
	t.Helper()
	links, err := netns.Listed(netlink.LinkList)
	if err != nil {
		t.Fatal(err)
	}

	out := map[string]hostNetdev{}
	for _, l := range links {
		addresses, err := netns.Listed(func() ([]netlink.Addr, error) {
			return netlink.AddrList(l, netlink.FAMILY_V4)
		})
		if err != nil {
			t.Fatal(err)
		}

		a := l.Attrs()
		n := hostNetdev{
			Type: l.Type(), MAC: a.HardwareAddr.String(), Alias: a.Alias, MTU: a.MTU,
			TxQLen: a.TxQLen,
			Up:     a.Flags&net.FlagUp != 0, AltNames: slices.Sorted(slices.Values(a.AltNames)),
		}

		for _, address := range addresses {
			n.Addresses = append(n.Addresses, address.String())
		}

		out[a.Name] = n
	}

	return out
}

func decodeResult(t *testing.T, text string) *types100.Result {
	t.Helper()
	r, err := types100.NewResult([]byte(text))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return r.(*types100.Result)
}

// wantError fails the test unless a command failed with this CNI code and these words.
func wantError(t *testing.T, what string, err error, code uint, words string) {
	t.Helper()
	said := (*types.Error)(nil)
	if !errors.As(err, &said) || said.Code != code || !strings.Contains(said.Error(), words) {
		t.Errorf("%s: %v, want code %d and %q", what, err, code, words)
	}
}
