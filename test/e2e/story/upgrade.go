// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// UpgradeSteps start a cluster and upgrade the product in it that many times.
func (w *World) UpgradeSteps(times int) []Step {
	all := w.claimSteps()
	steps := append([]Step{}, all[:4]...) // all steps up to the pools
	return append(steps,
		Step{"Pools for the device plugin beside those for claims", w.declareResources},
		Step{fmt.Sprintf("The product is replaced %d times under 20 pods that start and end all "+
			"the time: no pod fails, no packet is lost", times),
			func(ctx context.Context) error { return w.upgradeUnderPods(ctx, times) }},
	)
}

const (
	churners     = 20 // half with claims, half with the device plugin
	upgradePort  = 4000
	packetPeriod = 2 * time.Millisecond
	churnPause   = 5 * time.Second
)

// upgradeUnderPods replaces every pod of the product repeatedly, while other pods start and end and
// two more exchange packets.
func (w *World) upgradeUnderPods(ctx context.Context, times int) error {
	if err := w.startClaimedPeerPods(ctx); err != nil {
		return err
	}

	if err := poll(ctx, startTime, "the agents have verified their inventories",
		w.inventoriesVerified); err != nil {
		return err
	}

	before, err := w.resourceVersions(ctx)
	if err != nil {
		return err
	}

	packets, err := sendPackets("10.10.0.21", "10.10.0.22")
	if err != nil {
		return err
	}

	churning, stop := context.WithCancel(ctx)
	defer stop()

	var lives atomic.Int64
	pods, failed := errgroup.WithContext(churning)
	for i := range churners {
		pods.Go(func() error { return w.churn(churning, i, &lives) })
	}

	begin, longest := time.Now(), time.Duration(0)
	for i := range times {
		one := time.Now()
		if err := w.upgrade(ctx, i); err != nil {
			return err
		}
		if failed.Err() != nil {
			break
		}
		longest = max(longest, time.Since(one))
	}

	took := time.Since(begin)
	stop()
	if err := pods.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}

	w.Detail("%d upgrades in %s, %s at most; %d pods came and went", times, took.Round(time.Second),
		longest.Round(100*time.Millisecond), lives.Load())
	if err := w.checkNoneLost(packets); err != nil {
		return err
	}

	after, err := w.resourceVersions(ctx)
	if err != nil {
		return err
	}
	if diff := cmp.Diff(before, after); diff != "" {
		return fmt.Errorf("an upgrade wrote what did not change (- before, + after):\n%s", diff)
	}

	return w.deletePodsAndWait(ctx, "steady", "witness")
}

// churn starts and ends pods until ctx ends. No pod may fail.
func (w *World) churn(ctx context.Context, i int, lives *atomic.Int64) error {
	for n := 0; ctx.Err() == nil; n++ {
		if err := w.liveOnce(ctx, i, n); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		lives.Add(1)
		loop.Sleep(ctx, churnPause) // a small machine cannot start more pods at once
	}
	return nil
}

// liveOnce starts and ends pod n of churner i, and checks that nothing is left behind.
func (w *World) liveOnce(ctx context.Context, i, n int) error {
	name, node := fmt.Sprintf("churn-%d-%d", i, n), fmt.Sprintf("node%d", 1+i%2)
	pod := podSpec{name: name, node: node, template: "blue"}.pod()
	if i < churners/2 {
		var err error
		if pod, err = onNetwork("blue", name, node, 100+i).pod(); err != nil {
			return err
		}
	}

	if err := w.live(ctx, pod); err != nil {
		return errors.Join(err, w.deletePod(context.WithoutCancel(ctx), name))
	}

	return nil
}

// live creates a pod, waits until it is ready, and deletes it.
func (w *World) live(ctx context.Context, pod *corev1.Pod) error {
	if err := w.client.Create(ctx, pod); err != nil {
		return err
	}

	var failed error
	err := poll(ctx, startTime, "pod "+pod.Name+" is Ready", func(ctx context.Context) error {
		var now corev1.Pod
		if err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: pod.Name},
			&now); err != nil {
			return err
		}

		if now.Status.Phase == corev1.PodFailed {
			failed = fmt.Errorf("pod %s failed: %s: %s", pod.Name, now.Status.Reason,
				now.Status.Message)
			return nil
		}

		if !podReady(now) {
			return fmt.Errorf("it is %s", now.Status.Phase)
		}

		return nil
	})

	if err = errors.Join(err, failed); err != nil {
		if ctx.Err() == nil {
			err = errors.Join(err, w.explain(ctx, pod.Name))
		}
		return err
	}

	return w.deletePod(ctx, pod.Name)
}

// inventoriesVerified returns an error until each XPUNode has the condition InventoryVerified. An
// agent writes it some seconds after its start.
func (w *World) inventoriesVerified(ctx context.Context) error {
	var nodes v1alpha1.XPUNodeList
	if err := w.client.List(ctx, &nodes); err != nil {
		return err
	}

	for _, node := range nodes.Items {
		if meta.FindStatusCondition(node.Status.Conditions,
			v1alpha1.ConditionInventoryVerified) == nil {
			return fmt.Errorf("XPUNode %s has no condition InventoryVerified", node.Name)
		}
	}

	return nil
}

// resourceVersions returns the versions of objects that need not be written while the product is
// replaced. The lines of an XPUNode's status show what was written.
func (w *World) resourceVersions(ctx context.Context) (map[string][]string, error) {
	versions := map[string][]string{}
	for kind, list := range map[string]client.ObjectList{
		"XPUNode": &v1alpha1.XPUNodeList{}, "ResourceSlice": &resourceapi.ResourceSliceList{},
	} {
		if err := w.client.List(ctx, list); err != nil {
			return nil, err
		}
		if err := addVersions(versions, kind, list); err != nil {
			return nil, err
		}
	}

	for _, name := range []string{"steady", "witness"} {
		claim, _, err := w.claimOf(ctx, name)
		if err != nil {
			return nil, err
		}
		versions["ResourceClaim of "+name] = []string{claim.ResourceVersion}
	}

	return versions, nil
}

// addVersions adds the versions of the objects in a list. The lines of an XPUNode's status follow
// its version.
func addVersions(versions map[string][]string, kind string, list client.ObjectList) error {
	switch list := list.(type) {
	case *v1alpha1.XPUNodeList:
		for _, o := range list.Items {
			status, err := yaml.Marshal(o.Status)
			if err != nil {
				return err
			}
			versions[kind+" "+o.Name] = append([]string{o.ResourceVersion},
				strings.Split(string(status), "\n")...)
		}
	case *resourceapi.ResourceSliceList:
		for _, o := range list.Items {
			versions[kind+" "+o.Name] = []string{o.ResourceVersion}
		}
	}

	return nil
}

// packets are numbered UDP packets that one pod sends to another.
type packets struct {
	from, to *net.UDPConn
	ending   chan struct{}
	done     errgroup.Group
	sent     int
	received map[uint64]bool
}

// sendPackets sends packets between the pods with these addresses until it is stopped.
func sendPackets(from, to string) (*packets, error) {
	sender, err := listenIn(from, 0)
	if err != nil {
		return nil, err
	}

	receiver, err := listenIn(to, upgradePort)
	if err != nil {
		return nil, errors.Join(err, sender.Close())
	}

	p := &packets{
		from: sender, to: receiver, ending: make(chan struct{}), received: map[uint64]bool{},
	}
	p.done.Go(func() error { return p.send(&net.UDPAddr{IP: net.ParseIP(to), Port: upgradePort}) })
	p.done.Go(p.receive)

	return p, nil
}

func (p *packets) send(to *net.UDPAddr) error {
	for tick := time.NewTicker(packetPeriod); ; {
		select {
		case <-p.ending:
			// longer than a packet is under way
			time.AfterFunc(time.Second, func() { p.to.Close() })
			return nil
		case <-tick.C:
		}

		if _, err := p.from.WriteToUDP(binary.BigEndian.AppendUint64(nil, uint64(p.sent)),
			to); err != nil {
			return err
		}

		p.sent++
	}
}

func (p *packets) receive() error {
	for buffer := make([]byte, 16); ; {
		n, _, err := p.to.ReadFromUDP(buffer)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}

		if n == 8 {
			p.received[binary.BigEndian.Uint64(buffer)] = true
		}
	}
}

func (p *packets) stop() (sent, lost int, err error) {
	close(p.ending)
	err = p.done.Wait()
	return p.sent, p.sent - len(p.received), errors.Join(err, p.from.Close())
}

// checkNoneLost stops the packets, and returns an error if one was lost.
func (w *World) checkNoneLost(p *packets) error {
	sent, lost, err := p.stop()
	if err != nil {
		return err
	}

	w.Detail("%d packets, %d lost", sent, lost)
	if lost > 0 {
		return fmt.Errorf("%d of %d packets were lost between two pods", lost, sent)
	}
	return nil
}

// listenIn opens a UDP socket at an address, in the network namespace that has the address.
func listenIn(address string, port int) (conn *net.UDPConn, err error) {
	namespace, err := namespaceOf(address)
	if err != nil {
		return nil, err
	}

	err = netns.In(namespace, func() (err error) {
		conn, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(address), Port: port})
		return err
	})

	return conn, err
}

// namespaceOf returns the network namespace of the pod with an address, found through its
// processes.
func namespaceOf(address string) (string, error) {
	processes, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return "", err
	}

	seen := map[string]bool{}
	for _, path := range processes {
		inode, err := os.Readlink(path)
		if err != nil || seen[inode] {
			continue
		}

		seen[inode] = true
		found := false
		err = netns.In(path, func() error {
			addresses, err := net.InterfaceAddrs()
			for _, a := range addresses {
				found = found || strings.HasPrefix(a.String(), address+"/")
			}
			return err
		})

		if found || err != nil && !errors.Is(err, fs.ErrNotExist) {
			return path, err
		}
	}

	return "", fmt.Errorf("no network namespace has address %s", address)
}
