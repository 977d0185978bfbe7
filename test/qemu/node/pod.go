// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// Pod is the network namespace of a pod's sandbox, and the runtime's names for both.
type Pod struct {
	*netns.Namespace
	Name, UID, Sandbox string
	// IP is the address of the pod's interface, in a network of 24 bits.
	IP netip.Addr

	node *Node
}

// NewPod returns a pod whose interface gets the address 192.0.2.host.
func (n *Node) NewPod(name string, host byte) *Pod {
	n.t.Helper()
	return &Pod{
		Namespace: netns.New(n.t), Name: name, UID: name + "-uid", Sandbox: name + "-sandbox",
		IP: netip.AddrFrom4([4]byte{192, 0, 2, host}), node: n,
	}
}

// NetConf has the fields of a network configuration that differ between pods.
type NetConf map[string]any

// execute runs xpu-cni for the pod's net1 as a runtime does, and returns its output. An error that
// xpu-cni printed is a [types.Error].
func (p *Pod) execute(command string, f function.ID, conf NetConf) ([]byte, error) {
	config := map[string]any{
		"cniVersion": "1.1.0", "name": "fast-net", "type": "xpu-cni", "deviceID": f.String(),
		"runtimeConfig": map[string]any{"ips": []string{p.IP.String() + "/24"}},
	}

	maps.Copy(config, conf)
	text, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}

	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()

	shim := exec.CommandContext(ctx, shimProgram)
	shim.Env = append(os.Environ(),
		"CNI_COMMAND="+command, "CNI_CONTAINERID="+p.Sandbox, "CNI_NETNS="+p.Path(),
		"CNI_IFNAME=net1",
		"CNI_PATH="+plan.Programs,
		"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME="+p.Name+
			";K8S_POD_UID="+p.UID)

	shim.Stdin = bytes.NewReader(text)
	output, err := shim.Output()
	if err == nil {
		return output, nil
	}

	said := new(types.Error)
	if json.Unmarshal(output, said) != nil {
		return nil, fmt.Errorf("xpu-cni printed %q: %w", output, err)
	}

	return nil, said
}

// Add runs ADD of xpu-cni for the Function as net1.
func (p *Pod) Add(f function.ID, conf NetConf) (*types100.Result, error) {
	p.node.give(p.Name, f)
	printed, err := p.execute("ADD", f, conf)
	if err != nil {
		return nil, err
	}
	return decode(printed)
}

func decode(printed []byte) (*types100.Result, error) {
	result, err := types100.NewResult(printed)
	if err != nil {
		return nil, fmt.Errorf("result %s: %w", printed, err)
	}
	return types100.GetResult(result)
}

// MustAdd runs ADD, and checks that net1 exists and is up.
func (p *Pod) MustAdd(f function.ID, conf NetConf) {
	p.node.t.Helper()
	result, err := p.Add(f, conf)
	if err != nil {
		p.node.t.Fatalf("ADD of %s for %s: %v", f, p.Name, err)
	}
	if len(result.Interfaces) != 1 || result.Interfaces[0].Name != "net1" ||
		result.Interfaces[0].Sandbox != p.Path() {
		p.node.t.Errorf("ADD of %s for %s: result %+v, want net1", f, p.Name, result)
	}

	p.Interface("net1")
}

// Check runs CHECK of xpu-cni.
func (p *Pod) Check(f function.ID, conf NetConf) error {
	_, err := p.execute("CHECK", f, conf)
	return err
}

// Del runs DEL of xpu-cni.
func (p *Pod) Del(f function.ID, conf NetConf) error {
	_, err := p.execute("DEL", f, conf)
	p.node.takeBack(p.Name, f) // as when the pod ends
	return err
}

// MustDel runs DEL, and checks that the pod has no net1.
func (p *Pod) MustDel(f function.ID, conf NetConf) {
	p.node.t.Helper()
	if err := p.Del(f, conf); err != nil {
		p.node.t.Fatalf("DEL of %s for %s: %v", f, p.Name, err)
	}
	p.WantNo("net1")
}

// Interface returns an interface, which the pod must have and which must be up.
func (p *Pod) Interface(name string) *netlink.LinkAttrs {
	p.node.t.Helper()
	l, err := p.Handle().LinkByName(name)
	if err != nil {
		p.node.t.Fatalf("%s is not in %s: %v", name, p.Name, err)
	}
	if l.Attrs().Flags&net.FlagUp == 0 {
		p.node.t.Errorf("%s of %s is down", name, p.Name)
	}
	return l.Attrs()
}

// Has reports whether the pod has an interface.
func (p *Pod) Has(name string) bool {
	_, err := p.Handle().LinkByName(name)
	return err == nil
}

// Ready reports whether the pod's net1 exists, is up, and has the pod's address.
func (p *Pod) Ready() bool {
	l, err := p.Handle().LinkByName("net1")
	if err != nil || l.Attrs().Flags&net.FlagUp == 0 {
		return false
	}
	addresses, err := p.Handle().AddrList(l, netlink.FAMILY_V4)
	return err == nil && slices.ContainsFunc(addresses, func(a netlink.Addr) bool {
		return a.IP.Equal(p.IP.AsSlice())
	})
}

// WantNo checks that the pod has no interface of this name.
func (p *Pod) WantNo(name string) {
	p.node.t.Helper()
	if _, err := p.Handle().LinkByName(name); !errors.As(err, new(netlink.LinkNotFoundError)) {
		p.node.t.Errorf("%s is in %s (%v)", name, p.Name, err)
	}
}

// Reaches reports whether the other pod answers a ping within the time.
func (p *Pod) Reaches(other *Pod, within time.Duration) bool {
	p.node.t.Helper()
	answered, err := p.Ping(p.IP, other.IP, within)
	must.Succeed(p.node.t, err)
	return answered
}

// WantReach checks that p reaches the other pod.
func (p *Pod) WantReach(t *testing.T, other *Pod) {
	t.Helper()
	if !p.Reaches(other, Patience) {
		t.Errorf("%s (%s) does not reach %s (%s)", p.Name, p.IP, other.Name, other.IP)
	}
}

// WantApart checks that p does not reach the other pod.
func (p *Pod) WantApart(t *testing.T, other *Pod) {
	t.Helper()
	if p.Reaches(other, time.Second) {
		t.Errorf("%s (%s) reaches %s (%s)", p.Name, p.IP, other.Name, other.IP)
	}
}
