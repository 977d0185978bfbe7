// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestExtendedResource attaches a Function to a pod and releases it, by the device plugin and the
// CNI plugin.
func TestExtendedResource(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		vf, other := s.vfs[0], s.vfs[1]
		first, second := newPod(t, "pod1"), newPod(t, "pod2")
		s.start()
		s.wantHealthy(vf, other)

		env, err := s.give(first.name, vf)
		if err != nil || env["PCIDEVICE_XPU_OPIPROJECT_ORG_FAST"] != vf.String() ||
			!strings.Contains(env["PCIDEVICE_XPU_OPIPROJECT_ORG_FAST_INFO"], vf.String()) {
			t.Fatalf("Allocate = %q, %v; want the Function %s in the environment", env, err, vf)
		}

		info, err := os.ReadFile(s.path("devinfo/dp/xpu.opiproject.org-fast-" + vf.String() +
			"-device.json"))
		if err != nil || !strings.Contains(string(info), `"pci-address":"`+vf.String()+`"`) {
			t.Errorf("device-info file is %s, %v; want one of the Function", info, err)
		}

		s.wantPorts()

		if err := s.shim(io.Discard).Status(s.request(first, vf, nil)); err != nil {
			t.Errorf("STATUS: %v", err)
		}

		out := s.mustAdd(first, vf)
		r := decodeResult(t, out)
		if len(r.Interfaces) != 1 || r.Interfaces[0].Name != "net1" || len(r.IPs) != 1 ||
			r.IPs[0].Address.String() != podAddress {
			t.Errorf("ADD printed %s, want net1 with its address", out)
		}
		if again := s.mustAdd(first, vf); again != out {
			t.Errorf("the second ADD printed\n%s, the first\n%s", again, out)
		}

		previous := s.request(first, vf, map[string]any{"prevResult": json.RawMessage(out)})
		if err := s.shim(io.Discard).Check(previous); err != nil {
			t.Errorf("CHECK: %v", err)
		}
		if _, err := os.Stat(s.path("devinfo/cni/" + first.sandbox)); err != nil {
			t.Errorf("device-info of the interface: %v", err)
		}

		s.wantHealthy(vf, other)

		// The netdev is back when DEL returns. But the Function is not free until the xPU does not
		// serve it any more, which also holds for an ADD that comes too early.
		s.opi.Set(func(b *opitest.Behaviour) { b.StuckDelete = true })
		s.del(first, vf)
		s.wantOnHost()
		s.pods.Set()
		s.wantHealthy(other)
		if notes := s.noted(); len(notes) > 0 {
			t.Errorf("the administrator's hook ran before the Port was gone: %+v", notes)
		}

		s.pods.Set(kubelettest.Pod(second.name, resource, vf.String()))
		early := make(chan error, 1)
		go func() { _, err := s.add(second, vf); early <- err }()
		s.restartOPI()
		if err := <-early; err != nil {
			t.Fatalf("ADD of a Function that was being released: %v", err)
		}

		s.wantInPod(second, vf)
		s.del(second, vf)
		s.del(second, vf)
		s.awaitHooks()
		s.wantHealthy(vf, other)
		var want [2]hookInput
		for i, p := range []pod{first, second} {
			want[i].Function.ID, want[i].Port.Network = vf.String(), "lab"
			want[i].Resource, want[i].ContainerID = resource, p.sandbox
			want[i].Pod.Namespace, want[i].Pod.Name, want[i].Pod.UID = "default", p.name, p.name+
				"-uid"
		}

		if diff := cmp.Diff(want[:], s.noted()); diff != "" {
			t.Errorf("what the hook was told: -want +got\n%s", diff)
		}

		s.endClean()
	})
}

// restartOPI ends the OPI agent, which loses its state, and starts an agent that deletes again.
func (s *site) restartOPI() {
	s.t.Helper()
	s.opi.Kill()
	s.opi.Set(func(b *opitest.Behaviour) { b.StuckDelete = false })
	if err := s.opi.Run(); err != nil {
		s.t.Fatal(err)
	}
}

// TestProvisionAtAllocate: the xPU is ready before the pod starts, or the pod gets the reason.
func TestProvisionAtAllocate(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		vf, other := s.vfs[0], s.vfs[1]
		s.declare(byDevicePlugin(v1alpha1.ProvisionAtAllocate))
		s.config.times = times{
			sweep: 50 * time.Millisecond, abandoned: 100 * time.Millisecond, allocate: time.Second,
		}
		s.start()
		s.wantHealthy(vf, other)

		// A pod gets the Function, but never runs, and disappears without a DEL.
		if _, err := s.give("pod1", vf); err != nil {
			t.Fatal(err)
		}

		s.wantPorts(vf)
		if _, err := s.give("pod2", other); err != nil {
			t.Fatal(err)
		}

		s.eventually("what no pod has is released", func() bool { return len(s.opi.Ports()) == 1 })
		s.wantPorts(other)
		s.pods.Set()
		s.eventually("what no pod has is released", func() bool { return len(s.opi.Ports()) == 0 })
		s.wantHealthy(vf, other)

		s.opi.Set(func(b *opitest.Behaviour) {
			b.Realise = func(string) error { return errors.New("no room for a port") }
		})
		_, err := s.give("pod1", vf)
		if err == nil || !strings.Contains(err.Error(), "in network lab") ||
			!strings.Contains(err.Error(), "no room for a port") {
			t.Errorf("Allocate: %v, want what the OPI agent says", err)
		}

		s.awaitHooks()
		s.wantPorts()

		if s.config.Provisioner == ProvisionerDirect {
			s.wantHealthy(vf, other)
		} else {
			s.wantHealthy(other) // for a minute, other Functions are preferred
		}

		s.endClean()
	})
}

// TestXPUAway: Functions whose xPU does not answer are not given to pods. Pods that have such
// Functions keep them.
func TestXPUAway(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		vf, other := s.vfs[0], s.vfs[1]
		p := newPod(t, "pod1")
		s.start()
		s.wantHealthy(vf, other)
		s.pods.Set(kubelettest.Pod(p.name, resource, vf.String()))
		s.mustAdd(p, vf)

		s.opi.Kill()
		s.wantHealthy()
		if err := s.opi.Run(); err != nil { // it has lost its state
			t.Fatal(err)
		}

		s.wantHealthy(vf, other)
		s.eventually("the xPU serves the pod's Port again", func() bool {
			return len(s.opi.Ports()) == 1
		})
		s.wantInPod(p, vf)
		s.del(p, vf)
		s.wantHealthy(vf, other)
		s.endClean()
	})
}

// TestLinkDown: the VFs of a PF without carrier are unhealthy.
func TestLinkDown(t *testing.T) {
	s := newDirectSite(t)
	s.start()
	s.wantHealthy(s.vfs...)
	if err := s.host.SetLink("0000:3b:00.0", false); err != nil {
		t.Fatal(err)
	}

	s.wantHealthy()
	if err := s.host.SetLink("0000:3b:00.0", true); err != nil {
		t.Fatal(err)
	}

	s.wantHealthy(s.vfs...)
	s.endClean()
}

// TestRefusedAdd: the pod gets the error of the OPI agent. DEL releases the Function for a pod that
// is served.
func TestRefusedAdd(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		s.config.times.add = time.Second
		vf := s.vfs[0]
		p := newPod(t, "pod1")
		s.start()
		s.wantHealthy(s.vfs...)
		if _, err := s.give(p.name, vf); err != nil {
			t.Fatal(err)
		}

		s.opi.Set(func(b *opitest.Behaviour) {
			b.Realise = func(string) error { return errors.New("no room for a port") }
		})
		_, err := s.add(p, vf)
		wantError(t, "ADD", err, cniserver.CodeProvision, "no room for a port")
		s.wantOnHost()
		s.opi.Set(func(b *opitest.Behaviour) { b.Realise = nil })
		s.del(p, vf) // as runtimes do

		// Runtimes try again. A busy machine needs more than the second until the xPU has released
		// the port.
		must.Eventually(t, "the Function is served", func() bool {
			_, err = s.add(p, vf)
			return err == nil
		})

		s.mustAdd(p, vf)
		s.wantHealthy(s.vfs...)
		s.del(p, vf)
		s.endClean()
	})
}

// TestBadConfiguration: an agent with an invalid configuration does not start.
func TestBadConfiguration(t *testing.T) {
	for name, test := range map[string]struct{ file, text, want string }{
		"pools": {"pools", `{"resourceList": [{"resourceName": "not/good"}]}`, "resourceList[0]"},
		"DRA without an API server": {"pools",
			`{"apiVersion": "xpu.opiproject.org/v1alpha1", "kind": "DevicePool",
			"metadata": {"name": "fast"}, "spec": {"selectors": [{"vendors": ["15b3"]}]}}`, "spec.publish"},
		"xPUs": {"direct.yaml", "xpus: [{name: card, endpoint: nowhere, insecure: true}]",
			"xpus[0].endpoint"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newDirectSite(t)
			s.write(test.file, test.text)
			err := Run(t.Context(), s.config, prometheus.NewRegistry(), testr.New(t))
			if err == nil || !strings.Contains(err.Error(), s.path(test.file)) ||
				!strings.Contains(err.Error(), test.want) {
				t.Errorf("Run: %v, want an error that names %s and %s",
					err, s.path(test.file), test.want)
			}
		})
	}
}
