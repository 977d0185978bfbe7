// SPDX-License-Identifier: Apache-2.0

package images

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// An emulator runs programs of images for arm64 by QEMU's user mode. It has neither devlink nor
// generic netlink, so opi-bridge and xpu-agent only get as far as their flags.
type emulator struct {
	t       testing.TB
	program string
	engine  *engine
}

func newEmulator(t testing.TB) *emulator {
	t.Helper()
	return &emulator{t: t, program: program(t, "qemu-aarch64", "qemu-user"), engine: newEngine(t)}
}

// command returns a command that runs a program of an image.
func (e *emulator) command(image, program string, args ...string) *exec.Cmd {
	e.t.Helper()
	_, mount := e.engine.look("oci-archive:"+archive(e.t, image), "arm64")
	return exec.CommandContext(e.t.Context(), e.program,
		append([]string{filepath.Join(mount, program)}, args...)...)
}

func TestArm64ProgramsStart(t *testing.T) {
	e := newEmulator(t)
	for _, name := range names {
		version, err := e.command(name, name, "--version").CombinedOutput()
		if want := name + " version v"; err != nil || !strings.HasPrefix(string(version), want) {
			t.Errorf("%s --version: %q, %v, want %q", name, version, err, want)
		}
	}
}

// TestArm64Schedule checks a computation of xpuctl.
func TestArm64Schedule(t *testing.T) {
	scenario := filepath.Join(root, "test", "scenarios", "net-three-rails.yaml")
	args := []string{
		"schedule", "-f", filepath.Join(root, "test", "scenarios", "capacity", "ports.yaml"),
		"-f", scenario,
	}

	cmd := newEmulator(t).command("xpuctl", "xpuctl", args...)
	out, err := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(string(out), "rails") {
		t.Errorf("exit code %d, %v, want 1, as the pod fits nowhere:\n%s", code, err, out)
	}
}

// TestArm64CNI checks that the CNI plugin asks an agent, over its socket, and prints the answer.
func TestArm64CNI(t *testing.T) {
	e := newEmulator(t)
	socket := filepath.Join(must.SocketDir(t), "cni.sock")
	listener, err := net.Listen("unix", socket)
	must.Succeed(t, err)
	defer listener.Close()

	asked := make(chan wire.Request, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()

		var request wire.Request
		if err := json.NewDecoder(conn).Decode(&request); err != nil {
			t.Error(err)
		}

		reply := wire.Reply{
			Version: wire.Version,
			Result:  json.RawMessage(`{"cniVersion":"1.0.0","interfaces":[{"name":"net1"}]}`),
		}
		if err := json.NewEncoder(conn).Encode(reply); err != nil {
			t.Error(err)
		}

		asked <- request
	}()

	cmd := e.command("xpu-agent", "xpu-cni")
	paths := cni.PathsFile(cmd.Args[1])
	must.Succeed(t, os.WriteFile(paths, fmt.Appendf(nil, `{"socket":%q}`, socket), 0o644))
	defer os.Remove(paths)

	cmd.Env = append(os.Environ(), "CNI_COMMAND=ADD", "CNI_CONTAINERID=c1",
		"CNI_NETNS="+netns.New(t).Path(), "CNI_IFNAME=net1", "CNI_PATH=/nonexistent")
	cmd.Stdin = strings.NewReader(
		`{"cniVersion":"1.0.0","name":"n","type":"xpu-cni","deviceID":"0000:3b:02.1"}`,
	)
	out, err := cmd.Output()
	if err != nil || !strings.Contains(string(out), `"net1"`) {
		t.Fatalf("%v: %s", err, out)
	}
	if request := <-asked; request.Command != wire.Add || request.ContainerID != "c1" ||
		request.IfName != "net1" {
		t.Errorf("the agent was asked for %+v", request)
	}
}

// TestArm64Controller checks that the controller gets ready at a real API server, and ends when a
// signal asks it to.
func TestArm64Controller(t *testing.T) {
	e := newEmulator(t)
	needs.Kubernetes(t)

	environment := &envtest.Environment{
		CRDDirectoryPaths:        []string{filepath.Join(root, "deploy", "crds")},
		ErrorIfCRDPathMissing:    true,
		ControlPlaneStartTimeout: time.Minute,
	}

	_, err := environment.Start()
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, environment.Stop()) })

	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	must.Succeed(t, os.WriteFile(kubeconfig, environment.KubeConfig, 0o600))
	probes := freeAddress(t)
	cmd := e.command("xpu-controller", "xpu-controller", "--kubeconfig", kubeconfig,
		"--namespace", "default",
		"--leader-elect", "--metrics-bind-address", "0", "--health-probe-bind-address", probes)
	var logs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &logs, &logs
	must.Succeed(t, cmd.Start())

	must.Eventually(t, "the controller is ready", func() bool {
		response, err := http.Get("http://" + probes + "/readyz")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK
	})

	must.Succeed(t, cmd.Process.Signal(syscall.SIGTERM))
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, &logs)
	}
}

func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer l.Close()
	return l.Addr().String()
}
