// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// TestRDMAExample checks that the commands of examples/rdma.yaml measure bandwidth and latency between
// the VFs of two claims, and that the VFs are as before afterwards. The RDMA devices are of siw, which
// is iWARP in software. They are made in the pods, because the kernel removes such a device when its
// netdev moves. Therefore the test gives the commands the variable that the agent gives them for an
// RDMA device of a card.
func TestRDMAExample(t *testing.T) {
	card.InGuest(t, "igb")
	pf := card.PFs(t)[0]
	c := newClaims(t, t.TempDir(), v1alpha1.DevicePoolSpec{}, func(string) {})
	carrier(t, pf)

	example := readExample(t, "examples/rdma.yaml")
	server := measuring(t, c, "rdma-server", pf, 0, example.parameters(t, "rdma-server-nic"))
	client := measuring(t, c, "rdma-client", pf, 1, claimtest.FromClaim(`"addresses": ["10.10.0.81/24"]`))

	serving := server.start(t, example.command(t, "rdma-server"))
	output := client.start(t, example.command(t, "rdma-client")).end(t)
	bandwidth := result(t, output, "BW average[MiB/sec]", 3)
	latency := result(t, output, "t_avg[usec]", 2)
	if bandwidth <= 0 || latency <= 0 {
		t.Errorf("bandwidth %g MiB/s, latency %g us: want more than 0", bandwidth, latency)
	}
	t.Logf("bandwidth %g MiB/s, latency %g us", bandwidth, latency)
	serving.end(t)

	for _, pod := range []measuringPod{server, client} {
		must.Succeed(t, c.unprepare(t.Context(), pod.claim))
		now, err := c.engine.Snapshot(t.Context(), pod.device)
		must.Succeed(t, err)
		if left := netdev.Diff(pod.before, now); len(left) > 0 {
			t.Errorf("the VF of %s is not what it was: %q", pod.rdma, left)
		}
		must.Eventually(t, "the kernel has removed "+pod.rdma, func() bool {
			_, err := os.Lstat("/sys/class/infiniband/" + pod.rdma)
			return os.IsNotExist(err)
		})
	}
	if records := c.journal.All(); len(records) > 0 {
		t.Errorf("the journal still has %+v", records)
	}
}

// manifests are the objects of an example, by kind and name.
type manifests map[string][]byte

func readExample(t *testing.T, file string) manifests {
	t.Helper()
	content, err := os.ReadFile(file)
	must.Succeed(t, err)

	all := manifests{}
	for _, document := range bytes.Split(content, []byte("\n---\n")) {
		var object struct {
			Kind     string
			Metadata struct{ Name string }
		}
		must.Succeed(t, yaml.Unmarshal(document, &object))
		all[object.Kind+" "+object.Metadata.Name] = document
	}
	return all
}

// parameters returns the parameters of a ResourceClaimTemplate.
func (m manifests) parameters(t *testing.T, name string) claimtest.Option {
	t.Helper()
	var template resourceapi.ResourceClaimTemplate
	must.Succeed(t, yaml.UnmarshalStrict(m["ResourceClaimTemplate "+name], &template))
	config := template.Spec.Spec.Devices.Config
	if len(config) != 1 || config[0].Opaque == nil {
		t.Fatalf("%s has %+v, want parameters of this driver", name, config)
	}
	return claimtest.Config(resourceapi.AllocationConfigSourceClaim,
		string(config[0].Opaque.Parameters.Raw))
}

// command returns the command line of a Pod with one container, for the guest's shell.
func (m manifests) command(t *testing.T, name string) []string {
	t.Helper()
	var pod corev1.Pod
	must.Succeed(t, yaml.UnmarshalStrict(m["Pod "+name], &pod))
	if len(pod.Spec.Containers) != 1 || !slices.Equal(pod.Spec.Containers[0].Command,
		[]string{"sh", "-c"}) {
		t.Fatalf("%s has containers %+v, want one with a command of sh", name, pod.Spec.Containers)
	}
	return append([]string{"/usr/bin/dash", "-c"}, pod.Spec.Containers[0].Args...)
}

// measuringPod is a pod that has a VF of a claim, and an RDMA device over its netdev.
type measuringPod struct {
	*netns.Namespace
	rdma   string // name of the RDMA device
	claim  *resourceapi.ResourceClaim
	device netdev.Device
	before netdev.Snapshot
}

// measuring attaches a VF to a pod by a claim, and makes the RDMA device.
func measuring(
	t *testing.T, c *claims, name string, pf pci.Address, index int, config claimtest.Option,
) measuringPod {
	t.Helper()
	vf := card.VF(t, pf, index)
	p := measuringPod{Namespace: netns.New(t), rdma: name, device: deviceOf(t, pf, index)}
	var err error
	p.before, err = c.engine.Snapshot(t.Context(), p.device)
	must.Succeed(t, err)

	p.claim = claimtest.Allocated(name, config, claimtest.ReservedFor(name),
		claimtest.Result("nic", "guest/"+pf.DeviceName()+"/rdma", vf.DeviceName()))
	_, err = c.prepare(p.claim)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = c.unprepare(context.Background(), p.claim) })

	_, err = c.lifecycle.Attach(t.Context(), function.ID{Address: vf}, lifecycle.Sandbox{
		ID: name, NetNS: p.Path(),
		Pod: journal.Pod{Namespace: "default", Name: name, UID: p.claim.Status.ReservedFor[0].UID},
	})
	must.Succeed(t, err)

	// siw reads the carrier when the device is made, and never again.
	must.Eventually(t, name+" has a carrier", func() bool {
		link, err := p.Handle().LinkByName("net1")
		must.Succeed(t, err)
		return link.Attrs().RawFlags&unix.IFF_LOWER_UP != 0
	})
	must.Succeed(t, p.Do(func() error { return netlink.RdmaLinkAdd(name, "siw", "net1") }))

	return p
}

// program is a running command of a pod.
type program struct {
	command *exec.Cmd
	output  *bytes.Buffer
}

// start starts a command in the pod, until the test ends.
func (p measuringPod) start(t *testing.T, command []string) program {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // the client tries for ever
	t.Cleanup(cancel)
	running := program{exec.CommandContext(ctx, command[0], command[1:]...), &bytes.Buffer{}}
	running.command.Env = append(os.Environ(), "XPU_RDMA_NIC="+p.rdma)
	running.command.Stdout, running.command.Stderr = running.output, running.output
	running.command.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	running.command.Cancel = func() error {
		return unix.Kill(-running.command.Process.Pid, unix.SIGKILL) // the shell and its programs
	}

	must.Succeed(t, p.Do(running.command.Start))
	t.Cleanup(func() {
		_ = running.command.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", p.rdma, running.output)
		}
	})

	return running
}

// end waits for the end of the command, and returns its output.
func (p program) end(t *testing.T) string {
	t.Helper()
	if err := p.command.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, p.output)
	}
	return p.output.String()
}

// result returns a number of perftest's output: the field of the row below the title.
func result(t *testing.T, output, title string, field int) float64 {
	t.Helper()
	_, below, _ := strings.Cut(output, title)
	_, below, _ = strings.Cut(below, "\n")
	row, _, _ := strings.Cut(below, "\n")
	fields := strings.Fields(row)
	if len(fields) <= field {
		t.Fatalf("no %s in:\n%s", title, output)
	}
	number, err := strconv.ParseFloat(fields[field], 64)
	must.Succeed(t, err)
	return number
}
