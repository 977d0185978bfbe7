// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// bondWherePossible calls bondFunctions where the kernel has bonds, and otherwise says that it has none.
func (w *World) bondWherePossible(ctx context.Context) error {
	probe, err := netns.Make(filepath.Join(w.dir, "probe"))
	if err != nil {
		return err
	}
	bonds := netns.Bonds()
	has, err := probe.Try(bonds)
	if err := errors.Join(err, probe.Close()); err != nil {
		return err
	}

	if !has {
		w.Detail("examples/bond.yaml is left out: the kernel has no %s", bonds)
		return nil
	}
	return w.bondFunctions(ctx)
}

// bondFunctions starts the pod of examples/bond.yaml, and checks that its two VFs are the ports of a
// bond, by which it reaches a pod of node2, also when the active port is down.
func (w *World) bondFunctions(ctx context.Context) error {
	const pod, peer, address = "bond", "beside", "10.10.0.71"
	file := filepath.Join(w.Source, "examples", "bond.yaml")
	if _, err := w.Cluster.Kubectl(ctx, "apply", "-f", file); err != nil {
		return err
	}
	if err := w.createPodWithClaims(ctx, peer, "node2",
		`"network": "blue", "addresses": ["`+address+`/24"]`); err != nil {
		return err
	}
	if err := errors.Join(w.waitForPod(ctx, pod), w.waitForPod(ctx, peer)); err != nil {
		return err
	}

	own, err := w.addressOfBond(ctx, pod)
	if err != nil {
		return err
	}
	namespace, err := namespaceOf(own)
	if err != nil {
		return err
	}
	if err := w.failOver(ctx, namespace, connectivityCheck{pod, peer, true}, address); err != nil {
		return fmt.Errorf("pod %s: %w", pod, err)
	}

	if _, err := w.Cluster.Kubectl(ctx, "delete", "--grace-period=1", "-f", file); err != nil {
		return err
	}
	return w.deletePodsAndWait(ctx, pod, peer)
}

// addressOfBond returns the address of a pod's bond, once its claim has it for both devices.
func (w *World) addressOfBond(ctx context.Context, pod string) (address string, err error) {
	err = poll(ctx, 30*time.Second, "the claim of pod "+pod+" has its bond",
		func(ctx context.Context) error {
			var list resourceapi.ResourceClaimList
			if err := w.client.List(ctx, &list, client.InNamespace("default")); err != nil {
				return err
			}
			for _, c := range list.Items {
				if owner := metav1.GetControllerOf(&c); owner != nil && owner.Name == pod {
					address, err = bondAddress(c.Status.Devices)
					return err
				}
			}
			return errors.New("there is no claim")
		})
	return address, err
}

// bondAddress returns the address that both devices of a claim have by their bond.
func bondAddress(devices []resourceapi.AllocatedDeviceStatus) (string, error) {
	var addresses []string
	for _, d := range devices {
		if d.NetworkData == nil || d.NetworkData.InterfaceName != "bond0" ||
			len(d.NetworkData.IPs) != 1 {
			return "", fmt.Errorf("device %s has network data %+v, want one address of bond0",
				d.Device, d.NetworkData)
		}
		addresses = append(addresses, d.NetworkData.IPs[0])
	}
	if len(addresses) != 2 || addresses[0] != addresses[1] {
		return "", fmt.Errorf("the devices have addresses %q, want two that are the same", addresses)
	}

	address, _, _ := strings.Cut(addresses[0], "/")
	return address, nil
}

// failOver checks the bond in a namespace, takes its active port down, and checks that packets go by the
// other one.
func (w *World) failOver(
	ctx context.Context, namespace string, check connectivityCheck, address string,
) error {
	ns, err := vnetns.GetFromPath(namespace)
	if err != nil {
		return err
	}
	defer ns.Close()
	pod, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer pod.Close()

	var bond string
	var active netlink.Link
	err = poll(ctx, 30*time.Second, "a port is active", func(context.Context) error {
		links, err := pod.LinkList()
		if err == nil {
			bond, active, err = bondOf(links)
		}
		return err
	})
	if err != nil {
		return err
	}
	w.Detail("%s has %s", check.from, bond)
	if err := w.checkConnectivity(ctx, check, address); err != nil {
		return err
	}

	if err := pod.LinkSetDown(active); err != nil {
		return err
	}
	w.Detail("%s of %s is down", active.Attrs().Name, check.from)
	return poll(ctx, 30*time.Second, "the other port takes over", func(ctx context.Context) error {
		return w.checkConnectivity(ctx, check, address)
	})
}

// bondOf describes the bond bond0 among the netdevs of a pod, and returns its active port. The bond
// must be what examples/bond.yaml asks for.
func bondOf(links []netlink.Link) (text string, active netlink.Link, err error) {
	var bond *netlink.Bond
	for _, l := range links {
		if b, isBond := l.(*netlink.Bond); isBond && b.Name == "bond0" {
			bond = b
		}
	}
	if bond == nil {
		return "", nil, errors.New("there is no bond bond0")
	}

	var ports []string
	for _, l := range links {
		if a := l.Attrs(); a.MasterIndex == bond.Index {
			ports = append(ports, a.Name)
			if a.Index == bond.ActiveSlave {
				active = l
			}
		}
	}
	text = fmt.Sprintf("%s, %s, of %s", bond.Name, bond.Mode, strings.Join(ports, " and "))
	if bond.Mode != netlink.BOND_MODE_ACTIVE_BACKUP || len(ports) != 2 || active == nil {
		return "", nil, fmt.Errorf("%s, active is number %d; want mode active-backup, two ports, "+
			"and one of them active", text, bond.ActiveSlave)
	}

	return text + "; " + active.Attrs().Name + " is active", active, nil
}
