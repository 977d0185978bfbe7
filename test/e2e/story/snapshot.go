// SPDX-License-Identifier: Apache-2.0

package story

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Snapshot is the state that a pod's life may change and must restore.
type Snapshot struct {
	// Netdevs are the netdevs of the nodes' PFs and VFs, such as "node1/ens1f0v3".
	Netdevs map[string]Netdev
	// Representors are the representors on the xPUs, each with its bridge.
	Representors map[string]string
	// Devices are the devices in ResourceSlices, by pool.
	Devices map[string][]resourceapi.Device
	// SliceVersions are the resource versions of the slices, which show whether the slices were
	// written.
	SliceVersions map[string]string
	// Resources are the nodes' extended resources, such as "node1/xpu.opiproject.org/plain" with "8
	// of 8" available.
	Resources map[string]string
	// Ports and Claims are names of objects that should not exist any more.
	Ports, Claims []string
	// Attachments are the entries of the agents' journals, and Left the files left behind on a
	// node.
	Attachments, Left []string
}

// Netdev is the kernel's state of a netdev that may have been changed.
type Netdev struct {
	MAC      string
	MTU      int
	Up       bool
	Alias    string
	AltNames []string
	Addrs    []string
	Features map[string]string // of the driver, as ethtool reads them
}

// snapshot reads the state of nodes, xPUs and API server.
func (w *World) snapshot(ctx context.Context) (Snapshot, error) {
	s := Snapshot{
		Netdevs: map[string]Netdev{}, Representors: map[string]string{},
		Devices: map[string][]resourceapi.Device{}, SliceVersions: map[string]string{},
		Resources: map[string]string{},
	}

	for _, x := range w.xpus {
		if err := errors.Join(s.addNode(x.node), s.addXPU(x), s.addJournal(x.node),
			s.addFiles(x.node)); err != nil {
			return Snapshot{}, err
		}
	}

	if err := w.addResources(ctx, s); err != nil {
		return Snapshot{}, err
	}
	if w.direct {
		return s, nil
	}

	return s, w.addObjects(ctx, &s)
}

// addResources adds the extended resources that the kubelets report.
func (w *World) addResources(ctx context.Context, s Snapshot) error {
	var nodes corev1.NodeList
	if err := w.client.List(ctx, &nodes); err != nil {
		return err
	}

	for _, node := range nodes.Items {
		for name, capacity := range node.Status.Capacity {
			if strings.HasPrefix(string(name), v1alpha1.GroupName+"/") {
				allocatable := node.Status.Allocatable[name]
				s.Resources[node.Name+"/"+
					string(name)] = fmt.Sprintf("%d of %d", allocatable.Value(), capacity.Value())
			}
		}
	}

	return nil
}

// addObjects adds the objects for claims and xPUs.
func (w *World) addObjects(ctx context.Context, s *Snapshot) error {
	var slicesList resourceapi.ResourceSliceList
	var ports v1alpha1.XPUPortList
	var claims resourceapi.ResourceClaimList
	if err := errors.Join(w.client.List(ctx, &slicesList), w.client.List(ctx, &ports),
		w.client.List(ctx, &claims, client.InNamespace("default"))); err != nil {
		return err
	}

	for _, slice := range slicesList.Items {
		s.Devices[slice.Spec.Pool.Name] = append(s.Devices[slice.Spec.Pool.Name],
			slice.Spec.Devices...)
		s.SliceVersions[slice.Name] = slice.ResourceVersion
	}

	for _, port := range ports.Items {
		s.Ports = append(s.Ports, port.Namespace+"/"+port.Name)
	}

	for _, claim := range claims.Items {
		s.Claims = append(s.Claims, claim.Name)
	}

	return nil
}

// addJournal reads a copy of the journal of the node's agent, because the agent has locked the
// file.
func (s *Snapshot) addJournal(node Node) error {
	dir, err := os.MkdirTemp("", "journal-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	file := filepath.Join(dir, "journal.db")
	content, err := readStable(filepath.Join(node.Root, "var/lib/xpu-agent/journal.db"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, content, 0o600); err != nil {
		return err
	}

	records, err := journal.Open(file)
	if err != nil {
		return err
	}
	defer records.Close()

	for _, a := range records.All() {
		s.Attachments = append(s.Attachments,
			fmt.Sprintf("%s/%s %s", node.Name, a.Function, a.State))
	}

	return nil
}

// readStable reads a file while it is not being written.
func readStable(file string) ([]byte, error) {
	before, err := os.ReadFile(file)
	for err == nil {
		var after []byte
		if after, err = os.ReadFile(file); bytes.Equal(before, after) {
			break
		}
		before = after
	}

	return before, err
}

// addFiles lists files that belong to one pod: device-info files, requests for an agent that was
// away, and addresses assigned by IPAM plugins. It omits the device plugin's own device-info files,
// which are removed only some minutes after the kubelet has forgotten the pod, because a pod may
// get another sandbox.
func (s *Snapshot) addFiles(node Node) error {
	for _, pattern := range []string{
		"run/k8s.cni.cncf.io/devinfo/cni/*", "var/lib/xpu-agent/spool/*",
		"var/lib/xpu-agent/spool/bad/*",
		"var/lib/cni/networks/yellow/1*",
	} {
		files, err := filepath.Glob(filepath.Join(node.Root, pattern))
		if err != nil {
			return err
		}
		for _, file := range files {
			if info, err := os.Stat(file); err == nil && !info.IsDir() {
				s.Left = append(s.Left, node.Name+strings.TrimPrefix(file, node.Root))
			}
		}
	}
	return nil
}

func (s Snapshot) addNode(node Node) error {
	ns, err := netns.GetFromPath(node.NetNS)
	if err != nil {
		return err
	}
	defer ns.Close()

	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer handle.Close()

	links, err := handle.LinkList()
	if err != nil {
		return err
	}

	driver, err := ethtool.Dial(ns)
	if err != nil {
		return err
	}
	defer driver.Close()

	for _, l := range links {
		a := l.Attrs()
		if !strings.HasPrefix(a.Name, cardName) {
			continue
		}

		addrs, err := handle.AddrList(l, unix.AF_INET)
		if err != nil {
			return err
		}

		n := Netdev{MAC: a.HardwareAddr.String(), MTU: a.MTU, Up: a.RawFlags&unix.IFF_UP != 0,
			Alias: a.Alias, AltNames: a.AltNames}
		for _, address := range addrs {
			n.Addrs = append(n.Addrs, address.IPNet.String())
		}
		if n.Features, err = driver.Read(a.Index, "features"); err != nil {
			return fmt.Errorf("%s of %s: %w", a.Name, node.Name, err)
		}

		s.Netdevs[node.Name+"/"+a.Name] = n
	}

	return nil
}

// cardName is the prefix of all netdevs of the simulated card, which is in slot 3b. A netdev that
// returned from a pod under another name is therefore missing.
const cardName = "enp59s0f"

// podBridge is the bridge of the pods on an xPU that is a node itself.
const podBridge = "cni0"

func (s Snapshot) addXPU(x *xpu) error {
	links, err := x.links.LinkList()
	if err != nil {
		return err
	}

	names := map[int]string{0: "no bridge"}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}

	for _, l := range links {
		if master := names[l.Attrs().MasterIndex]; l.Type() == "veth" && master != podBridge {
			s.Representors[x.node.Name+"/"+l.Attrs().Name] = master
		}
	}

	return nil
}

// Diff describes the differences between two snapshots, or returns "".
func (s Snapshot) Diff(now Snapshot) string { return cmp.Diff(s, now) }
