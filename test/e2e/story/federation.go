// SPDX-License-Identifier: Apache-2.0

package story

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// Federation is an infra cluster whose nodes are xPUs, and two tenant clusters with their hosts.
type Federation struct {
	// Infra, A and B are the clusters.
	Infra, A, B *World
}

// Steps returns the story of several clusters.
func (f *Federation) Steps() []Step {
	return []Step{
		{"Three real clusters: two of tenants, with two hosts and one, and one of infra whose " +
			"nodes are their xPUs", f.bringUp},
		{"A simulated SmartNIC in each host, whose representors are in a node of infra",
			f.insertCards},
		{
			"Infra: opi-bridge on every node, xpu-controller, the broker; an XPU appears for " +
				"each node", f.installInfra,
		},
		{"Tenants: agents and xpu-controller; each joins with a token, and nobody types a card",
			f.installTenants},
		{"The same pools, networks, names and numbers in both tenants", f.declare},
		{"Pods claim VFs; the xPU in the other cluster is ready before they run", f.runPods},
		{"Packets between the pods of a tenant, and none to the other, which has the same " +
			"addresses", f.exchange},
		{"The broker is killed, and a pod comes", f.killBroker},
		{"A tenant leaves: the xPUs let its ports go, and the other notices nothing", f.leave},
		{"Pods are deleted, and everything is as it was", f.deletePods},
	}
}

func (f *Federation) tenants() map[string]*World { return map[string]*World{"a": f.A, "b": f.B} }

// bringUp starts the clusters. Each node of a tenant belongs to a node of infra.
func (f *Federation) bringUp(ctx context.Context) error {
	f.A.pods, f.A.connectivityChecks = pods, connectivityChecks
	f.B.pods = []podSpec{{"blue-1", "node1", "blue", "blue"}, {"blue-2", "node1", "blue", "blue"},
		{"red-1", "node1", "red", "red"}}
	f.B.connectivityChecks = []connectivityCheck{{"blue-1", "blue-2", true},
		{"red-1", "blue-2", false}}
	for _, cluster := range []struct {
		*World
		nodes int
	}{{f.A, 2}, {f.B, 1}, {f.Infra, 3}} {
		if err := cluster.bringUpNodes(ctx, cluster.nodes); err != nil {
			return err
		}
	}

	return nil
}

// insertCards gives each host its card, and tells the xPU the card's serial number, because the xPU
// has no devlink.
func (f *Federation) insertCards(ctx context.Context) error {
	behind := f.Infra.cluster.Nodes
	for _, tenant := range slices.Sorted(maps.Keys(f.tenants())) {
		w := f.tenants()[tenant]
		for _, host := range w.cluster.Nodes {
			dpu := behind[0]
			behind = behind[1:]
			serial := fmt.Sprintf("MT-%s-%s", tenant, host.Name)
			if err := f.insertCard(ctx, w, host, dpu, serial); err != nil {
				return err
			}
			w.Detail("tenant %s: card %s in %s, its xPU is %s of infra", tenant, serial,
				host.Name, dpu.Name)
		}
	}

	return nil
}

func (f *Federation) insertCard(_ context.Context, w *World, host, dpu Node, serial string) error {
	root := filepath.Join(host.Root, "var/lib/simhost")
	config := filepath.Join(dpu.Root, "etc/opi-bridge")
	if err := errors.Join(os.MkdirAll(root, 0o755), os.MkdirAll(config, 0o755)); err != nil {
		return err
	}

	told := fmt.Sprintf("c1pf0,serial=%[1]s\nc1pf1,serial=%[1]s\n", serial)
	if err := os.WriteFile(filepath.Join(config, "host-pfs"), []byte(told), 0o600); err != nil {
		return err
	}

	out, err := w.start("simhost-"+host.Name, "", filepath.Join(w.Bin, "simhost"), "--root",
		root, "--host-netns", host.NetNS, "--xpu-netns", dpu.NetNS,
		"--pfs", "2", "--vfs", strconv.Itoa(vfsOfPF), "--serial", serial, "--controller", "1")
	if err != nil {
		return err
	}
	if _, err := bufio.NewReader(out).ReadBytes('\n'); err != nil {
		return fmt.Errorf("simhost of %s ended: see %s", host.Name, w.log("simhost-"+host.Name))
	}

	x := &xpu{node: host, address: dpu.IP, netNS: dpu.NetNS}
	if x.ns, err = vnetns.GetFromPath(x.netNS); err != nil {
		return err
	}

	x.links, err = netlink.NewHandleAt(x.ns, unix.NETLINK_ROUTE)
	w.xpus = append(w.xpus, x)

	return err
}

// installInfra installs an infra cluster, and waits until each xPU has registered itself.
func (f *Federation) installInfra(ctx context.Context) error {
	w := f.Infra
	var err error
	if w.authority, err = newAuthority(); err != nil {
		return err
	}

	server, err := w.authority.issue("opi-bridge", "")
	if err != nil {
		return err
	}
	if err := w.installChart(ctx, "infra", "xpu", "xpu-controller", "opi-bridge"); err != nil {
		return err
	}
	if err := errors.Join(w.giveIdentity(ctx, "xpu-controller"),
		w.client.Create(ctx, server.secret("opi-bridge-tls"))); err != nil {
		return err
	}
	if _, err := w.Cluster.Kubectl(ctx, "label", "nodes", "--all",
		"xpu.opiproject.org/opi-bridge="); err != nil {
		return err
	}

	const brokers = 2
	if err := errors.Join(w.waitForPods(ctx, namespace, controllers+len(w.cluster.Nodes)),
		w.waitForPods(ctx, "xpu-tenants", brokers)); err != nil {
		return err
	}

	return poll(ctx, 30*time.Second, "an XPU for each xPU", func(ctx context.Context) error {
		var xpus v1alpha1.XPUList
		if err := w.client.List(ctx, &xpus); err != nil {
			return err
		}

		for _, x := range xpus.Items {
			if ready := v1alpha1.ReadyOf(
				x.Status.Conditions,
			); ready.Reason != v1alpha1.ReasonConnected {
				return fmt.Errorf("XPU %s: %s: %s", x.Name, ready.Reason, ready.Message)
			}
		}

		if len(xpus.Items) != len(w.cluster.Nodes) {
			return fmt.Errorf("there are %d", len(xpus.Items))
		}

		return nil
	})
}

// installTenants installs and joins the tenants, and waits until the XPU of each node is known
// there.
func (f *Federation) installTenants(ctx context.Context) error {
	xpus := map[string][]string{"a": {"node1", "node2"}, "b": {"node3"}}
	vlans := map[string]v1alpha1.VLANRange{
		"a": {First: 1000, Last: 1099}, "b": {First: 2000, Last: 2099},
	}
	for name, w := range f.tenants() {
		if err := w.installChart(ctx, "tenant", "host", "xpu-agent", "xpu-controller"); err != nil {
			return err
		}
		if err := w.waitForProduct(ctx); err != nil {
			return err
		}
		if err := f.giveToken(ctx, name, w); err != nil {
			return err
		}

		tenant := &v1alpha1.XPUTenant{Spec: v1alpha1.XPUTenantSpec{
			Member: v1alpha1.TenantMember{SecretName: name},
			XPUs:   v1alpha1.TenantXPUs{Names: xpus[name]},
			VLANs:  vlans[name], VNIs: &v1alpha1.VNIRange{
				First: 10 * vlans[name].First, Last: 10 * vlans[name].Last,
			},
			MaxPorts: ptr.To[int32](100), DeletionPolicy: v1alpha1.DeletionDelete,
		}}

		tenant.Name = name
		if err := f.Infra.client.Create(ctx, tenant); err != nil {
			return err
		}
		if err := f.joined(ctx, tenant); err != nil {
			return err
		}
		if err := w.waitForXPUs(ctx, len(xpus[name])); err != nil {
			return err
		}
	}

	return nil
}

// giveToken creates the Secret with which the broker reaches a tenant's cluster, with a token of
// its ServiceAccount there.
func (f *Federation) giveToken(ctx context.Context, name string, w *World) error {
	account := &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "xpu-broker"},
	}
	request := &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](24 * 3600)},
	}
	if err := w.client.SubResource("token").Create(ctx, account, request); err != nil {
		return err
	}

	admin, err := clientcmd.BuildConfigFromFlags("", w.cluster.Kubeconfig)
	if err != nil {
		return err
	}

	server, err := f.reach(admin.Host)
	if err != nil {
		return err
	}

	config := clientcmdapi.NewConfig()
	config.Clusters["member"] = &clientcmdapi.Cluster{
		Server: server, CertificateAuthorityData: admin.CAData,
	}
	config.AuthInfos["xpu-broker"] = &clientcmdapi.AuthInfo{Token: request.Status.Token}
	config.Contexts["member"] = &clientcmdapi.Context{
		Cluster: "member", AuthInfo: "xpu-broker", Namespace: namespace,
	}
	config.CurrentContext = "member"
	data, err := clientcmd.Write(*config)
	if err != nil {
		return err
	}

	secret := &corev1.Secret{Data: map[string][]byte{"kubeconfig": data}}
	secret.Namespace, secret.Name = "xpu-tenants", name
	secret.Labels = map[string]string{"sigs.k8s.io/multicluster-runtime-kubeconfig": "true"}

	return f.Infra.client.Create(ctx, secret)
}

// reach forwards connections from the infra cluster to an API server on this machine, because the
// clusters have the same addresses and thus no route between them. It returns the address in the
// infra cluster.
func (f *Federation) reach(host string) (string, error) {
	target, err := url.Parse(host)
	if err != nil {
		return "", err
	}

	var listener net.Listener
	err = netns.In(f.Infra.cluster.NetNS, func() (err error) {
		listener, err = net.Listen("tcp", "10.77.0.1:0")
		return err
	})
	if err != nil {
		return "", err
	}

	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}

			there, err := net.Dial("tcp", target.Host)
			if err != nil {
				_ = conn.Close()
				continue
			}

			go forward(there, conn)
			go forward(conn, there)
		}
	}()

	return "https://" + listener.Addr().String(), nil
}

func forward(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_ = to.Close()
	_ = from.Close()
}

func (f *Federation) joined(ctx context.Context, tenant *v1alpha1.XPUTenant) error {
	return poll(ctx, 30*time.Second, "XPUTenant "+tenant.Name+" is synced",
		func(ctx context.Context) error {
			if err := f.Infra.client.Get(ctx, client.ObjectKeyFromObject(tenant),
				tenant); err != nil {
				return err
			}
			if !meta.IsStatusConditionTrue(tenant.Status.Conditions, v1alpha1.ConditionSynced) {
				return fmt.Errorf("it is not: %+v", tenant.Status.Conditions)
			}
			return nil
		})
}

// waitForXPUs waits until the tenant knows which XPUs serve its nodes.
func (w *World) waitForXPUs(ctx context.Context, want int) error {
	var xpus v1alpha1.XPUList
	err := poll(ctx, 30*time.Second, "the XPUs of the nodes are known",
		func(ctx context.Context) error {
			if err := w.client.List(ctx, &xpus); err != nil {
				return err
			}
			if len(xpus.Items) != want {
				return fmt.Errorf("%d are", len(xpus.Items))
			}

			for _, x := range xpus.Items {
				if ready := v1alpha1.ReadyOf(
					x.Status.Conditions,
				); ready.Reason != v1alpha1.ReasonConnected || x.Node() == "" {
					return fmt.Errorf("XPU %s on node %q: %s: %s", x.Name, x.Node(), ready.Reason,
						ready.Message)
				}
			}

			return nil
		})

	for _, x := range xpus.Items {
		w.Detail("%s: XPU %s is the card %s of %s", w.Cluster.Name, x.Name,
			x.Status.Serial, x.Node())
	}

	return err
}

// onBoth calls do for both tenants in parallel.
func (f *Federation) onBoth(ctx context.Context, do func(context.Context, *World) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for name, w := range f.tenants() {
		group.Go(func() error {
			if err := do(ctx, w); err != nil {
				return fmt.Errorf("tenant %s: %w", name, err)
			}
			return nil
		})
	}

	return group.Wait()
}

func (f *Federation) declare(ctx context.Context) error {
	return f.onBoth(ctx, func(ctx context.Context, w *World) error {
		return w.declarePools(ctx, vfsOfPF*len(w.cluster.Nodes))
	})
}

func (f *Federation) runPods(ctx context.Context) error {
	return f.onBoth(ctx, func(ctx context.Context, w *World) error { return w.runPods(ctx) })
}

// exchange also checks that the tenants' segments differ although everything else is the same.
func (f *Federation) exchange(ctx context.Context) error {
	if err := f.onBoth(ctx, func(ctx context.Context, w *World) error {
		return w.exchange(ctx)
	}); err != nil {
		return err
	}

	// No pod of b has this address, so that only a's pod could answer.
	_, device, err := f.A.claimOf(ctx, "blue-3")
	if err != nil {
		return err
	}

	address, _, _ := strings.Cut(device.NetworkData.IPs[0], "/")
	if err := f.B.checkConnectivity(ctx, connectivityCheck{"blue-1", "blue-3 of tenant a", false},
		address); err != nil {
		return err
	}

	var networks v1alpha1.XPUNetworkList
	if err := f.Infra.client.List(ctx, &networks); err != nil {
		return err
	}

	seen := map[int32]string{}
	for _, network := range networks.Items {
		if other := seen[network.Spec.VLAN]; other != "" {
			return fmt.Errorf("XPUNetworks %s and %s have VLAN %d", network.Name,
				other, network.Spec.VLAN)
		}
		seen[network.Spec.VLAN] = network.Name
		f.Infra.Detail("infra: XPUNetwork %s has VLAN %d, VNI %d", network.Name, network.Spec.VLAN,
			ptr.Deref(network.Spec.VNI, 0))
	}

	return nil
}

// killBroker kills both replicas of the broker at once, and creates a pod that needs the next one.
func (f *Federation) killBroker(ctx context.Context) error {
	late := podSpec{"late", "node1", "blue", "blue"}
	if _, err := f.Infra.Cluster.Kubectl(ctx, "-n", "xpu-tenants", "delete", "pods", "--all",
		"--force", "--grace-period=0"); err != nil {
		return err
	}
	if err := f.A.client.Create(ctx, late.pod()); err != nil {
		return err
	}

	begin := time.Now()
	err := poll(ctx, 90*time.Second, "the pod runs all the same", func(ctx context.Context) error {
		var pod corev1.Pod
		if err := f.A.client.Get(ctx, client.ObjectKeyFromObject(late.pod()), &pod); err != nil {
			return err
		}
		if !podReady(pod) {
			return fmt.Errorf("it is %s", pod.Status.Phase)
		}
		return nil
	})

	if err != nil {
		return errors.Join(err, f.A.explain(ctx, late.name))
	}

	f.A.Detail("pod late is Ready %s after the broker was killed",
		time.Since(begin).Round(100*time.Millisecond))
	f.A.pods = append(slices.Clone(f.A.pods), late)
	return f.A.exchange(ctx)
}

// leave deletes the XPUTenant of b.
func (f *Federation) leave(ctx context.Context) error {
	tenant := &v1alpha1.XPUTenant{ObjectMeta: metav1.ObjectMeta{Name: "b"}}
	if err := f.Infra.client.Delete(ctx, tenant); err != nil {
		return err
	}

	err := poll(ctx, 60*time.Second, "nothing of tenant b is left",
		func(ctx context.Context) error {
			of := client.MatchingLabels{v1alpha1.LabelTenant: "b"}
			for _, list := range []client.ObjectList{
				&v1alpha1.XPUPortList{}, &v1alpha1.XPUNetworkList{}, &v1alpha1.XPUNodeList{},
			} {
				if err := f.Infra.client.List(ctx, list, of); err != nil {
					return err
				}
				if n := meta.LenList(list); n > 0 {
					return fmt.Errorf("%d %T", n, list)
				}
			}

			if err := f.Infra.client.Get(ctx, client.ObjectKeyFromObject(tenant),
				tenant); client.IgnoreNotFound(err) != nil || err == nil {
				return fmt.Errorf("XPUTenant b is still there: %w", err)
			}

			return nil
		})

	if err != nil {
		return err
	}

	var ports v1alpha1.XPUPortList
	if err := f.B.client.List(ctx, &ports); err != nil {
		return err
	}

	for _, port := range ports.Items {
		if ready := v1alpha1.ReadyOf(
			port.Status.Conditions,
		); ready.Reason != v1alpha1.ReasonLeaving {
			return fmt.Errorf("XPUPort %s of tenant b is %s, want Leaving", port.Name, ready.Reason)
		}
	}

	f.B.Detail("tenant b has %d XPUPorts that nobody serves, and is told so", len(ports.Items))
	return f.A.exchange(ctx)
}

func (f *Federation) deletePods(ctx context.Context) error { return f.A.deletePods(ctx) }

// End stops everything that the story started.
func (f *Federation) End(ctx context.Context) error {
	return errors.Join(f.A.End(ctx), f.B.End(ctx), f.Infra.End(ctx))
}

// Diagnose returns information about the clusters.
func (f *Federation) Diagnose(ctx context.Context) string {
	var all string
	for _, w := range []*World{f.Infra, f.A, f.B} {
		all += "== " + w.Cluster.Name + "\n" + w.Diagnose(ctx) + "\n"
	}
	return all
}

// NewFederation returns a federation whose clusters have names that begin with the world's name.
func NewFederation(of World) *Federation {
	cluster := func(name string) *World {
		w := of
		w.Cluster.Name = of.Cluster.Name + "-" + name
		return &w
	}
	return &Federation{Infra: cluster("infra"), A: cluster("a"), B: cluster("b")}
}
