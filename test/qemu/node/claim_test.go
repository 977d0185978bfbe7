// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// newCluster returns a field whose agent works with an API server and offers all VFs by DRA, as the
// pool "fast".
func newCluster(t *testing.T) *field {
	t.Helper()
	f := newFieldWith(t, node.Options{Cluster: true})
	f.Cluster.Create(&v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "fast"},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{Devices: []string{"10ca"}}},
			Allow:     v1alpha1.PrivilegedFields(),
		}})

	f.StartRuntime()
	return f
}

// expected returns the devices of the pool "fast". It takes them from the options of QEMU and from
// files of sysfs that the agent does not read.
func (f *field) expected() map[string]resourceapi.Device {
	devices := map[string]resourceapi.Device{}
	for i, pf := range f.pfs {
		for index, vf := range f.vfs[i] {
			text := func(s string) resourceapi.DeviceAttribute {
				return resourceapi.DeviceAttribute{StringValue: &s}
			}
			number := func(n int64) resourceapi.DeviceAttribute {
				return resourceapi.DeviceAttribute{IntValue: &n}
			}
			d := resourceapi.Device{Name: vf.DeviceName(),
				Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
					"kind": text("VF"), "pool": text("fast"), "pf": text(string(pf)),
					"pfName": text(card.Netdev(pf)),
					"index":  number(int64(index)), "vendor": text("8086"), "device": text("10ca"),
					"k8s.cni.cncf.io/deviceID":        text(vf.String()),
					"k8s.cni.cncf.io/resourceName":    text(resource),
					"resource.kubernetes.io/pciBusID": text(vf.String()),
					"resource.kubernetes.io/pcieRoot": text("pci0000:00"),
					"linkSpeed":                       number(1000),
					"rdma":                            {BoolValue: new(false)},
				}}

			if strings.HasPrefix(string(pf), "0000:21:") { // the last card; see package machine
				d.Attributes["resource.kubernetes.io/pcieRoot"] = text("pci0000:20")
				d.Attributes["resource.kubernetes.io/numaNode"] = number(1)
			}

			devices[d.Name] = d
		}
	}

	return devices
}

// wantDevices waits until the slices have these devices.
func (f *field) wantDevices(t *testing.T, want map[string]resourceapi.Device) {
	t.Helper()
	diff := "never looked at"
	defer func() {
		if diff != "" {
			t.Logf("devices (-want +got):\n%s", diff)
		}
	}()

	f.Eventually("slices have what sysfs has", func() bool {
		diff = cmp.Diff(want, f.Cluster.Devices(), cmpopts.EquateEmpty())
		return diff == ""
	})
}

func (f *field) wantUntouched(t *testing.T, before map[string]string) {
	t.Helper()
	if diff := cmp.Diff(before, f.Cluster.Versions()); diff != "" {
		t.Errorf("slices were written (-before +now):\n%s", diff)
	}
}

// TestStart checks that the agent publishes what sysfs has, whatever the VFs' drivers and the PF's
// name are.
func TestStart(t *testing.T) {
	f := newCluster(t)
	f.Start()

	f.Run("slices equal sysfs", func(t *testing.T) {
		f.wantDevices(t, f.expected())
		for name, slice := range f.Cluster.Slices() {
			if slice.Spec.NodeName == nil || *slice.Spec.NodeName != plan.NodeName ||
				slice.Spec.Pool.ResourceSliceCount != 1 {
				t.Errorf("slice %s: %+v", name, slice.Spec)
			}
		}

		if n := len(f.Cluster.Slices()); n != len(f.pfs) {
			t.Errorf("%d slices, want one for each of %d PFs", n, len(f.pfs))
		}
	})

	f.Run("VF without a driver and VF with vfio-pci", f.drivers)
	f.Run("PF with another name", f.startRenamed)
	f.End()
}

// drivers takes the driver from a VF and gives another VF vfio-pci. It checks that the slices show
// neither change, even if an agent starts then.
func (f *field) drivers(t *testing.T) {
	bare, userspace := f.vfs[0][0].Address, f.vfs[0][1].Address
	before := f.Cluster.Versions()
	card.SetAttribute(t, bare, "driver/unbind", string(bare))
	setDriver(t, userspace, "vfio-pci")

	if got := [2]string{
		card.Link(bare, "driver"), card.Link(userspace, "driver"),
	}; got != [2]string{"", "vfio-pci"} {
		t.Fatalf("drivers are %q", got)
	}

	f.End()
	f.Start()
	f.AwaitRuntime()
	f.wantDevices(t, f.expected())
	f.wantUntouched(t, before)
	setDriver(t, userspace, "igbvf")
	setDriver(t, bare, "igbvf")

	f.Eventually("both have netdevs", func() bool {
		return card.Netdev(bare) != "" &&
			card.Netdev(userspace) != ""
	})

	f.wantUntouched(t, before)
}

// setDriver binds a driver in place of the bound one.
func setDriver(t *testing.T, device pci.Address, driver string) {
	t.Helper()
	if card.Link(device, "driver") != "" {
		card.SetAttribute(t, device, "driver/unbind", string(device))
	}
	card.SetAttribute(t, device, "driver_override", driver)
	card.SetAttribute(t, device, "../../drivers/"+driver+"/bind", string(device))
	card.SetAttribute(t, device, "driver_override", "\n")
}

func (f *field) startRenamed(t *testing.T) {
	pf := f.pfs[1]
	old := card.Netdev(pf)
	uplink, err := netlink.LinkByName(old)
	must.Succeed(t, err)
	must.Succeed(t, netlink.LinkSetName(uplink, "uplink1"))
	f.wantDevices(t, f.expected())
	before := f.Cluster.Versions()
	f.End()
	f.Start()
	f.AwaitRuntime()
	f.wantDevices(t, f.expected())
	f.wantUntouched(t, before)
	must.Succeed(t, netlink.LinkSetName(uplink, old))
	f.wantDevices(t, f.expected())
}

// TestClaim takes VFs to pods by DRA and NRI, and back.
func TestClaim(t *testing.T) {
	f := newCluster(t)
	f.Start()
	f.wantDevices(t, f.expected())
	f.AwaitRuntime()
	c := &claims{field: f, driver: f.Register(), versions: f.Cluster.Versions()}
	c.Run("properties are what the claim asked for, and are restored", c.properties)
	c.Run("what the driver refuses is refused with nothing half set", c.refused)
	c.Run("pods of one VLAN reach each other, others do not", c.traffic)
	c.Run("two VFs of a claim are one bond", c.bond)
	c.Run("agent killed while pods have VFs", c.killed)
	c.Run("network namespace deleted under a VF", c.namespaceDeleted)
	f.wantUntouched(t, c.versions)
	f.End()
	f.WantNothingLeft()
}

// claims is a field whose DRA driver is registered at the kubelet.
type claims struct {
	*field
	driver   *node.Driver
	versions map[string]string // resource versions of slices
}

// prepared returns a pod for which a claim of a VF was prepared.
func (c *claims) prepared(
	name string, host byte, pf, vf int, config v1alpha1.InterfaceConfig,
) (*node.Pod, *resourceapi.ResourceClaim) {
	pod := c.NewPod(name, host)
	config.InterfaceName, config.Addresses = "net1", []string{pod.IP.String() + "/24"}
	object := c.Cluster.Allocate(pod, "fast", c.pfs[pf], c.vfs[pf][vf], config)
	c.driver.MustPrepare(object)
	return pod, object
}

// release plays the runtime and the kubelet when the pod ends.
func (c *claims) release(pod *node.Pod, object *resourceapi.ResourceClaim) {
	pod.MustStop()
	c.driver.MustUnprepare(object)
	c.Cluster.Unallocate(object)
}

func (c *claims) properties(t *testing.T) {
	pf := c.pfs[0]
	pod, object := c.prepared("properties", 1, 0, 1, v1alpha1.InterfaceConfig{
		MTU: new(int32(1400)), MAC: "02:00:00:00:00:01", VF: &v1alpha1.VFConfig{
			VLAN: new(int32(100)), QoS: new(int32(3)), SpoofCheck: new(false), Trust: new(true),
			MaxTxRate: new(int32(100)),
		},
	})

	node.WantState(t, c.before) // nothing is changed before there is a pod
	pod.MustRun("net1")
	want := c.before.VF(t, pf, 1)
	want.MAC, want.VLAN, want.QoS, want.MaxRate = "02:00:00:00:00:01", 100, 3, 100
	want.SpoofCheck, want.Trust = false, true
	if diff := cmp.Diff(want, node.HostState(t).VF(t, pf, 1)); diff != "" {
		t.Errorf("VF 1 of %s (-want +got):\n%s", pf, diff)
	}
	if got := pod.Interface("net1"); got.HardwareAddr.String() != "02:00:00:00:00:01" ||
		got.MTU != 1400 {
		t.Errorf("net1 has MAC %s and MTU %d", got.HardwareAddr, got.MTU)
	}

	c.Eventually("the claim says so", func() bool {
		must.Succeed(t,
			c.Cluster.Admin.Get(t.Context(), client.ObjectKeyFromObject(object), object))
		return len(object.Status.Devices) == 1 && object.Status.Devices[0].NetworkData != nil
	})

	network := &resourceapi.NetworkDeviceData{
		InterfaceName: "net1", HardwareAddress: "02:00:00:00:00:01", IPs: []string{"192.0.2.1/24"},
	}
	if diff := cmp.Diff(network, object.Status.Devices[0].NetworkData); diff != "" {
		t.Errorf("status of the claim (-want +got):\n%s", diff)
	}

	c.release(pod, object)
	node.WantState(t, c.before)
}

func (c *claims) refused(t *testing.T) {
	for i, test := range []struct {
		name, words string
		vf          v1alpha1.VFConfig
	}{
		{"minimum rate", "vf.minTxRate",
			v1alpha1.VFConfig{MinTxRate: new(int32(10)), MaxTxRate: new(int32(100))}},
		{"802.1ad", "vf.vlanProtocol", v1alpha1.VFConfig{VLANProtocol: "802.1ad"}},
		{"link state", "vf.linkState", v1alpha1.VFConfig{LinkState: "enable"}},
	} {
		c.Run(test.name, func(t *testing.T) {
			test.vf.VLAN, test.vf.Trust, test.vf.SpoofCheck = new(int32(100)), new(true), new(false)
			pod, object := c.prepared(fmt.Sprintf("refused%d", i), 1, 0,
				0, v1alpha1.InterfaceConfig{
					MTU: new(int32(1400)), VF: &test.vf,
				})

			err := pod.Run()
			if err == nil { // the runtime did not wait for the error
				c.Eventually("the container is refused for a reason", func() bool {
					err = pod.Container()
					return err == nil || strings.Contains(err.Error(), test.words)
				})
				must.Succeed(t, pod.Stop())
			}

			if err == nil || !strings.Contains(err.Error(), test.words) {
				t.Errorf("the pod: %v, want an error with %q", err, test.words)
			}

			pod.WantNo("net1")
			node.WantState(t, c.before)
			c.release(pod, object)
		})
	}
}

func (c *claims) traffic(t *testing.T) {
	vlan := func(id int32) v1alpha1.InterfaceConfig {
		return v1alpha1.InterfaceConfig{VF: &v1alpha1.VFConfig{VLAN: &id}}
	}
	objects := map[*node.Pod]*resourceapi.ResourceClaim{}
	run := func(name string, host byte, pf, vf int, config v1alpha1.InterfaceConfig) *node.Pod {
		t.Helper()
		pod, object := c.prepared(name, host, pf, vf, config)
		pod.MustRun("net1")
		objects[pod] = object
		return pod
	}

	a, b := run("blue1", 1, 0, 0, vlan(100)), run("blue2", 2, 0, 1, vlan(100))
	other, across := run("red", 3, 0, 2, vlan(200)), run("blue3", 4, 1, 0, vlan(100))
	a.WantReach(t, b)
	a.WantReach(t, across)
	a.WantApart(t, other)

	for pod, object := range objects {
		c.release(pod, object)
	}

	node.WantState(t, c.before)
}

// bond gives a pod a bond of two VFs of two PFs, the first of which fails.
func (c *claims) bond(t *testing.T) {
	pod := c.NewPod("bonded", 1)
	object := c.Cluster.AllocateEach(pod, "fast", c.pfs[:2],
		[]function.ID{c.vfs[0][0], c.vfs[1][0]}, v1alpha1.InterfaceConfig{
			Bond:      &v1alpha1.Bond{Name: "bond0", Mode: function.BondActiveBackup},
			Addresses: []string{pod.IP.String() + "/24"},
		})
	c.driver.MustPrepare(object)
	other, beside := c.prepared("beside", 2, 0, 1, v1alpha1.InterfaceConfig{})
	other.MustRun("net1")
	pod.MustRun("bond0")
	c.Eventually("both VFs are ports of the bond", func() bool {
		return pod.Has("net1") && pod.Has("net2") &&
			pod.Interface("net1").MasterIndex == pod.Interface("bond0").Index &&
			pod.Interface("net2").MasterIndex == pod.Interface("bond0").Index
	})

	pod.WantReach(t, other)
	must.Succeed(t, pod.Handle().LinkSetDown(&netlink.Device{LinkAttrs: *pod.Interface("net1")}))
	pod.WantReach(t, other)

	c.Eventually("the claim says so", func() bool {
		must.Succeed(t,
			c.Cluster.Admin.Get(t.Context(), client.ObjectKeyFromObject(object), object))
		return len(object.Status.Devices) == 2
	})
	for _, device := range object.Status.Devices {
		if data := device.NetworkData; data == nil || data.InterfaceName != "bond0" ||
			len(data.IPs) != 1 || data.IPs[0] != pod.IP.String()+"/24" {
			t.Errorf("device %s: network data %v", device.Device, data)
		}
	}

	c.release(pod, object)
	pod.WantNo("bond0")
	c.release(other, beside)
	node.WantState(t, c.before)
}

// killed has the agent killed twice: with a claim that is prepared, and with a claim whose VF is in
// the pod.
func (c *claims) killed(t *testing.T) {
	pod, object := c.prepared("killed", 1,
		0, 1, v1alpha1.InterfaceConfig{VF: &v1alpha1.VFConfig{VLAN: new(int32(100))}})
	restart := func() {
		t.Helper()
		c.Kill()
		c.Start()
		c.AwaitRuntime()
		c.driver = c.Register()
		c.driver.MustPrepare(object)
	}

	restart()
	pod.MustRun("net1")
	had := pod.Interface("net1").Index
	restart()
	if got := pod.Interface("net1").Index; got != had {
		t.Errorf("net1 has index %d, had %d", got, had)
	}

	c.release(pod, object)
	node.WantState(t, c.before)
}

func (c *claims) namespaceDeleted(t *testing.T) {
	pod, object := c.prepared("deleted", 1, 1, 1, v1alpha1.InterfaceConfig{
		MTU: new(int32(1400)), VF: &v1alpha1.VFConfig{
			VLAN: new(int32(100)), Trust: new(true), MaxTxRate: new(int32(100)),
		},
	})

	pod.MustRun("net1")
	must.Succeed(t, pod.Close())
	vf := c.vfs[1][1]
	c.Eventually("the VF is back", func() bool { return card.Netdev(vf.Address) != "" })
	must.Succeed(t, pod.Stop())
	c.driver.MustUnprepare(object)
	c.Cluster.Unallocate(object)
	node.WantState(t, c.before)
}
