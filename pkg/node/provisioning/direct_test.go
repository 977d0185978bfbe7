// SPDX-License-Identifier: Apache-2.0

package provisioning_test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning/provisioningtest"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestDirect(t *testing.T) {
	provisioningtest.Suite(t,
		func(
			t *testing.T, agent *opitest.Agent, records *journal.Journal,
		) provisioning.Provisioner {
			return startDirect(t, directConfig(agent), records)
		})
}

// directConfig returns a configuration with the objects of the suite.
func directConfig(agent *opitest.Agent) *provisioning.Config {
	return &provisioning.Config{
		XPUs: []provisioning.XPU{{
			Name: provisioningtest.XPU, Endpoint: agent.Config().Endpoint,
			PFs: []pci.Address{provisioningtest.PF}, Insecure: true,
		}},
		Networks: map[string]provisioning.Network{
			provisioningtest.Blue: {VLAN: provisioningtest.BlueVLAN, MTU: provisioningtest.BlueMTU,
				AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll}},
			provisioningtest.Green: {
				VLAN:              provisioningtest.GreenVLAN,
				AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll},
			},
		},
		Pools: map[string]string{provisioningtest.Pool: provisioningtest.Blue},
	}
}

func startDirect(
	t *testing.T, config *provisioning.Config, records *journal.Journal,
) *provisioning.Direct {
	t.Helper()
	direct, err := provisioning.NewDirect(config, records, provisioning.DirectOptions{
		Installation: opitest.Installation, FailedGrace: 50 * time.Millisecond,
		Changed: func() {}, Debounce: 100 * time.Millisecond, Registry: prometheus.NewRegistry(),
		Log: testr.New(t),
	})

	if err != nil {
		t.Fatal(err)
	}

	inBackground(t, "Direct", direct.Run)
	return direct
}

// TestDirectWithoutXPUs checks that a node without xPUs has nothing to request and nothing to
// release.
func TestDirectWithoutXPUs(t *testing.T) {
	direct := startDirect(t, &provisioning.Config{}, provisioningtest.NewJournal(t))
	if message := direct.Away(vf(0)); message != "" {
		t.Errorf("Away = %q", message)
	}
	if err := direct.Deprovision(t.Context(), blue(vf(0))); err != nil {
		t.Errorf("Deprovision: %v", err)
	}
	if _, err := direct.Provision(t.Context(), blue(vf(0))); err == nil ||
		!strings.Contains(err.Error(), "no xPU of the configuration has PF 0000:3b:00.0") {
		t.Errorf("Provision: error %v, want one that names the PF", err)
	}
}

// TestDirectOptions checks that an agent whose dialect supports it learns the addresses of pods,
// and reports the MTU for a network that sets none.
func TestDirectOptions(t *testing.T) {
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.Options, b.MTU = true, 1450 })
	records := provisioningtest.NewJournal(t)
	direct := startDirect(t, directConfig(agent), records)
	a := blue(vf(0))
	a.Port.Network = provisioningtest.Green
	a.Interface.Addresses = []netip.Prefix{netip.MustParsePrefix("10.1.0.2/24")}
	done, err := direct.Provision(t.Context(), a)
	if err != nil || done.MTU != 1450 {
		t.Errorf("Provision = %+v, %v; want the MTU that the agent says", done, err)
	}
	if got := agent.Addresses(agent.Ports()[0]); !slices.Equal(got, []string{"10.1.0.2"}) {
		t.Errorf("the agent was told %q", got)
	}
}

// TestDirectDebounce checks that Away does not report an agent that is back at once, and that
// Changed is called for an agent that is not.
func TestDirectDebounce(t *testing.T) {
	agent := opitest.Start(t)
	var changes atomic.Int64
	registry := prometheus.NewRegistry()
	const debounce = 500 * time.Millisecond
	direct, err := provisioning.NewDirect(directConfig(agent), provisioningtest.NewJournal(t),
		provisioning.DirectOptions{
			Installation: opitest.Installation, FailedGrace: 50 * time.Millisecond,
			Changed: func() {
				changes.Add(1)
			}, Debounce: debounce, Registry: registry, Log: testr.New(t),
		})

	if err != nil {
		t.Fatal(err)
	}

	connected := func(want string) bool {
		return testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP xpu_direct_connected 1 while there is a connection to the OPI agent of an xPU, else 0, by xPU.
# TYPE xpu_direct_connected gauge
xpu_direct_connected{xpu="card"} `+want+"\n"), "xpu_direct_connected") == nil
	}

	if !connected("0") {
		t.Error("the metric of an xPU that was never reached is not 0")
	}

	inBackground(t, "Direct", direct.Run)
	must.Eventually(t, "connected", func() bool { return connected("1") && changes.Load() > 0 })
	told := changes.Load()
	before := time.Now()
	agent.Stop()
	must.Eventually(t, "not connected", func() bool { return connected("0") })
	if message := direct.Away(vf(0)); message != "" && time.Since(before) < debounce {
		t.Errorf("Away = %q after %s already", message, time.Since(before))
	}

	// Changed is called when the connection is lost, when the debounce ends, and when the reason is
	// known.
	must.Eventually(t, "it is told, with the reason", func() bool {
		return changes.Load() >= told+3 &&
			strings.Contains(direct.Away(vf(0)), "connection refused")
	})

	if after := time.Since(before); after < debounce {
		t.Errorf("it was told after %s", after)
	}
}

// TestDirectAfterRestart checks that the Ports of the journal are served again when the node's
// agent starts, except for Ports that are being released and Ports of another xPU.
func TestDirectAfterRestart(t *testing.T) {
	agent := opitest.Start(t)
	records := provisioningtest.NewJournal(t)
	record := func(address string, change func(*journal.Attachment)) {
		a := attached(function.Function{
			ID: function.ID{Address: pci.Address(address)}, PF: provisioningtest.PF,
		})
		a.Port.MAC = "02:00:00:00:00:01"
		change(&a)
		must.Succeed(t, records.Put(a))
	}

	record("0000:3b:02.0", func(*journal.Attachment) {})
	record("0000:3b:02.1", func(a *journal.Attachment) { a.State = journal.Releasing })
	record("0000:3b:02.2", func(a *journal.Attachment) { a.Port = nil })
	record("0000:5e:02.0", func(a *journal.Attachment) { a.PF = "0000:5e:00.0" })
	record("0000:3b:02.3", func(a *journal.Attachment) {
		a.Port = &journal.Port{Network: "removed", MAC: "02:00:00:00:00:02"}
	})
	record("0000:3b:02.4", func(a *journal.Attachment) {
		a.Port = &journal.Port{Network: provisioningtest.Green, MAC: "02:00:00:00:00:03"}
	})
	startDirect(t, directConfig(agent), records)
	want := []string{"vf-0000-3b-02-0", "vf-0000-3b-02-4"}
	must.Eventually(t, "the Ports are back", func() bool {
		return slices.Equal(agent.Ports(), want)
	})
	agent.Kill()
	must.Succeed(t, records.Delete(function.ID{Address: "0000:3b:02.0"}))
	if err := agent.Run(); err != nil {
		t.Fatal(err)
	}

	must.Eventually(t, "the Port is back", func() bool {
		return slices.Equal(agent.Ports(), want[1:])
	})
}

// TestDirectNetworkConflict checks that no Port joins a network whose VLAN at the agent differs
// from the configuration.
func TestDirectNetworkConflict(t *testing.T) {
	agent := opitest.Start(t)
	client := dial(t, agent)
	if err := client.EnsureNetwork(t.Context(),
		opi.Network{
			ID: opitest.Installation.NetworkID(provisioningtest.Blue), VLAN: 999,
		}); err != nil {
		t.Fatal(err)
	}

	direct := startDirect(t, directConfig(agent), provisioningtest.NewJournal(t))
	_, err := direct.Provision(within(t, time.Second), blue(vf(0)))
	if err == nil || !strings.Contains(err.Error(), "the agent has it with VLAN 999, not 100") {
		t.Errorf("error %v, want one with both VLANs", err)
	}
	if ports := agent.Ports(); len(ports) > 0 {
		t.Errorf("the agent has %q, want none in the wrong segment", ports)
	}
}

// TestDirectNetworkPending checks that a network that does not come up does not delay Ports in
// another network.
func TestDirectNetworkPending(t *testing.T) {
	agent := opitest.Start(t)
	client := dial(t, agent)
	config := directConfig(agent)
	agent.Set(func(b *opitest.Behaviour) { b.UpDelay = time.Hour })

	for n := range 8 {
		name := fmt.Sprintf("pending-%d", n)
		config.Networks[name] = provisioning.Network{VLAN: int32(1000 + n)}
		pending := opi.Network{ID: opitest.Installation.NetworkID(name), VLAN: uint16(1000 + n)}
		for !slices.Contains(agent.Networks(), pending.ID) {
			if err := client.EnsureNetwork(within(t, 20*time.Millisecond), pending); err == nil {
				t.Fatalf("network %s came up", name)
			}
		}
	}

	agent.Set(func(b *opitest.Behaviour) { b.UpDelay = 0 })
	f := vf(0)
	records := provisioningtest.NewJournal(t)
	must.Succeed(t, records.Put(attached(f)))
	startDirect(t, config, records)
	must.Eventually(t, "the Port is back", func() bool { return len(agent.Ports()) == 1 })
}

func dial(t *testing.T, agent *opitest.Agent) *opi.Client {
	t.Helper()
	client, err := opi.Dial(agent.Config())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// TestDirectTLS checks that the files may come late and be renewed, and that the error names them
// while they are missing.
func TestDirectTLS(t *testing.T) {
	ca := opitest.NewAuthority(t)
	agent := opitest.Start(t)
	agent.Stop()
	cert, key := ca.Issue(t, "127.0.0.1")
	server, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}

	var clients atomic.Value
	required := &tls.Config{
		Certificates: []tls.Certificate{server}, ClientCAs: ca.Pool(),
		ClientAuth: tls.RequireAndVerifyClientCert,
		VerifyPeerCertificate: func(_ [][]byte, chains [][]*x509.Certificate) error {
			clients.Store(chains[0][0].Subject.CommonName)
			return nil
		},
	}

	if err := agent.RunTLS(required); err != nil {
		t.Fatal(err)
	}

	dir := t.TempDir()
	config := directConfig(agent)
	config.XPUs[0].Insecure = false
	config.XPUs[0].TLS = &provisioning.TLSFiles{
		CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key"),
		CAFile: filepath.Join(dir, "ca.crt"),
	}

	write := func(by *opitest.Authority, name string) {
		cert, key := by.Issue(t, name)
		for file, text := range map[string][]byte{
			"tls.crt": cert, "tls.key": key, "ca.crt": by.PEM(),
		} {
			if err := os.WriteFile(filepath.Join(dir, file), text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}

	direct := startDirect(t, config, provisioningtest.NewJournal(t))
	must.Eventually(t, "the missing files are named", func() bool {
		return strings.Contains(direct.Away(vf(0)), config.XPUs[0].TLS.KeyFile+": no such file")
	})
	write(opitest.NewAuthority(t), "stranger")
	must.Eventually(t, "what is wrong now is said", func() bool {
		return strings.Contains(direct.Away(vf(0)), "unknown authority")
	})
	write(ca, "first")
	if _, err := direct.Provision(within(t, 20*time.Second), blue(vf(0))); err != nil {
		t.Fatal(err)
	}
	if got := clients.Load(); got != "first" {
		t.Errorf("the agent knows the client as %v", got)
	}

	agent.Stop()
	write(ca, "second")
	if err := agent.RunTLS(required); err != nil {
		t.Fatal(err)
	}

	must.Eventually(t, "the renewed certificate is used", func() bool {
		return clients.Load() == "second"
	})
}

// TestNamespaces checks that a network is for pods of the namespaces that it allows. A pod that is
// not known has no namespace.
func TestNamespaces(t *testing.T) {
	config := directConfig(opitest.Start(t))
	network := config.Networks[provisioningtest.Blue]
	network.AllowedNamespaces = v1alpha1.AllowedNamespaces{
		From: v1alpha1.NamespacesFromSelector,
		Selector: &metav1.LabelSelector{
			MatchLabels: map[string]string{"kubernetes.io/metadata.name": "lab"},
		},
	}

	config.Networks[provisioningtest.Blue] = network
	direct := startDirect(t, config, provisioningtest.NewJournal(t))
	for namespace, allowed := range map[string]bool{"lab": true, "other": false, "": false} {
		a := blue(vf(0))
		a.Pod.Namespace = namespace
		_, err := direct.Provision(t.Context(), a)
		if want := fmt.Sprintf("allowedNamespaces of the configuration does not have namespace %q",
			namespace); allowed != (err == nil) ||
			err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("namespace %q: error %v", namespace, err)
		}
	}
}

// TestDirectUnverified checks the ports of a VF at agents that report nothing, and that know the VF
// by its number and its permanent MAC address.
func TestDirectUnverified(t *testing.T) {
	const own function.MAC = "00:11:22:33:44:01"
	for _, plugin := range []opitest.Plugin{opitest.NetSec, opitest.Marvell, opitest.IPU} {
		t.Run(string(plugin), func(t *testing.T) {
			agent := opitest.StartDPUOperator(t, plugin)
			config := directConfig(opitest.Start(t))
			config.XPUs[0].Endpoint, config.XPUs[0].Dialect = agent.Config().Endpoint, "dpu-operator"
			records := provisioningtest.NewJournal(t)
			known := own
			direct, err := provisioning.NewDirect(config, records, provisioning.DirectOptions{
				Installation: opitest.Installation, OwnMAC: func(function.ID) function.MAC {
					return known
				},
				Changed: func() {}, Registry: prometheus.NewRegistry(), Log: testr.New(t),
			})
			must.Succeed(t, err)
			inBackground(t, "Direct", direct.Run)
			if !direct.NeedsOwnMAC(provisioningtest.PF) || direct.NeedsOwnMAC("0000:5e:00.0") {
				t.Error("only the configured xPU needs permanent addresses")
			}

			f := function.Function{
				ID: vf(1).ID, PF: provisioningtest.PF, Kind: function.VF, Index: 1,
			}
			a := blue(f)
			a.Port.ID = direct.PortID(f)
			_, err = direct.Provision(t.Context(), a)
			wantRefusal(t, err, "leave mac out")
			known = ""
			_, err = direct.Provision(t.Context(), a)
			wantRefusal(t, err, "is not known")
			known, a.Port.MAC = own, own

			_, err = direct.Provision(t.Context(), a)
			must.Succeed(t, err)
			want := map[string]string{"host0-1": fmt.Sprint(provisioningtest.BlueVLAN)}
			if got := agent.Ports(); !maps.Equal(got, want) {
				t.Errorf("ports %v, want %v", got, want)
			}

			must.Succeed(t, direct.Deprovision(t.Context(), a))
			if got := agent.Ports(); len(got) > 0 {
				t.Errorf("ports %v are left", got)
			}

			sf := blue(vf(1))
			sf.Function = function.SubfunctionID(provisioningtest.PF, 88)
			sf.Port.ID, sf.Port.MAC = direct.PortID(function.Function{
				ID: sf.Function, PF: provisioningtest.PF, Kind: function.SF,
			}), own
			_, err = direct.Provision(t.Context(), sf)
			wantRefusal(t, err, "use VFs only")
		})
	}
}

// TestDirectNames checks that a Port gets the name of the Function at the eswitch once the agent has
// said which PFs of its host it serves, and that it keeps that name.
func TestDirectNames(t *testing.T) {
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.HostPFs = []string{"host-pf c1pf0 serial MT1"} })
	serial := "MT2"
	direct, err := provisioning.NewDirect(directConfig(agent), provisioningtest.NewJournal(t),
		provisioning.DirectOptions{
			Installation: opitest.Installation, Changed: func() {},
			Card: func(pci.Address) function.Card {
				return function.Card{Serial: serial}
			},
			Registry: prometheus.NewRegistry(), Log: testr.New(t),
		})
	must.Succeed(t, err)

	f := function.Function{ID: vf(1).ID, PF: provisioningtest.PF, Kind: function.VF, Index: 1}
	if id := direct.PortID(f); id != "" {
		t.Errorf("the id is %q before the agent said anything", id)
	}
	inBackground(t, "Direct", direct.Run)
	must.Eventually(t, "the agent was asked", func() bool {
		return agent.Calls("GetInventory") > 0
	})
	if id := direct.PortID(f); id != "" {
		t.Errorf("the id is %q at another card", id)
	}

	serial = "MT1"
	must.Eventually(t, "the name of the eswitch", func() bool {
		return direct.PortID(f) == "c1pf0vf1"
	})
	sf := function.Function{
		ID: function.SubfunctionID(provisioningtest.PF, 88), PF: provisioningtest.PF,
		Kind: function.SF, Index: 88,
	}
	if id := direct.PortID(sf); id != "c1pf0sf88" {
		t.Errorf("the SF has the id %q", id)
	}

	a := blue(f)
	a.Port.ID = direct.PortID(f)
	_, err = direct.Provision(t.Context(), a)
	must.Succeed(t, err)
	if got := agent.Ports(); !slices.Equal(got, []string{"c1pf0vf1"}) {
		t.Errorf("ports %q", got)
	}

	serial = ""
	must.Succeed(t, direct.Deprovision(t.Context(), a))
	if got := agent.Ports(); len(got) > 0 {
		t.Errorf("ports %q are left", got)
	}
}

// wantRefusal fails the test unless the error has the text.
func wantRefusal(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want one with %q", err, text)
	}
}
