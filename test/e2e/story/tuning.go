// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// shapeInterfaces starts pods that ask for more of their interfaces than an address.
func (w *World) shapeInterfaces(ctx context.Context) error {
	if err := w.tuneInterface(ctx); err != nil {
		return err
	}
	return w.bondWherePossible(ctx)
}

// tuneInterface starts a pod whose claim asks for more than an address, and checks that its
// interface has it. The baseline compares the features of the driver afterwards.
func (w *World) tuneInterface(ctx context.Context) error {
	const pod, address = "tuned", "10.10.0.70"
	if err := w.createPodWithClaims(ctx, pod, "node1", `"network": "blue",
		"interfaceName": "tuned0", "addresses": ["`+address+`/24"],
		"routes": [{"to": "10.99.0.0/16", "via": "10.10.0.1", "table": 100, "source": "`+address+`"}],
		"rules": [{"priority": 100, "from": "`+address+`/32", "table": 100}],
		"neighbors": [{"address": "10.10.0.1", "mac": "02:00:00:00:00:aa"}],
		"sysctls": {"net.ipv4.conf.IFNAME.arp_ignore": "1"},
		"ethtool": {"features": {"tx-tcp-segmentation": false}}`); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, pod); err != nil {
		return err
	}

	namespace, err := namespaceOf(address)
	if err != nil {
		return err
	}
	state, err := tunedState(namespace)
	if err != nil {
		return fmt.Errorf("pod %s: %w", pod, err)
	}

	const want = "rule 100 to table 100, neighbor 02:00:00:00:00:aa, arp_ignore 1, " +
		"tx-tcp-segmentation off"
	if state != want {
		return fmt.Errorf("pod %s has %s, want %s", pod, state, want)
	}

	w.Detail("%s has %s", pod, state)
	return w.deletePodsAndWait(ctx, pod)
}

// tunedState describes the interface tuned0 in a network namespace.
func tunedState(namespace string) (string, error) {
	ns, err := vnetns.GetFromPath(namespace)
	if err != nil {
		return "", err
	}
	defer ns.Close()

	links, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return "", err
	}
	defer links.Close()

	driver, err := ethtool.Dial(ns)
	if err != nil {
		return "", err
	}
	defer driver.Close()

	link, err := links.LinkByName("tuned0")
	if err != nil {
		return "", err
	}
	index := link.Attrs().Index

	var state []string
	rules, err := links.RuleList(unix.AF_INET)
	if err != nil {
		return "", err
	}
	for _, r := range rules {
		if r.Priority == 100 {
			state = append(state, fmt.Sprintf("rule %d to table %d", r.Priority, r.Table))
		}
	}

	neighbors, err := links.NeighList(index, unix.AF_INET)
	if err != nil {
		return "", err
	}
	for _, n := range neighbors {
		if n.State == unix.NUD_PERMANENT {
			state = append(state, "neighbor "+n.HardwareAddr.String())
		}
	}

	err = netns.In(namespace, func() error {
		text, err := os.ReadFile("/proc/sys/net/ipv4/conf/tuned0/arp_ignore")
		state = append(state, "arp_ignore "+strings.TrimSpace(string(text)))
		return err
	})
	if err != nil {
		return "", err
	}

	features, err := driver.Read(index, "features")
	state = append(state, "tx-tcp-segmentation "+features["tx-tcp-segmentation"])

	return strings.Join(state, ", "), err
}
