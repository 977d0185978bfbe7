// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// kept is a checkpoint as kubelet 1.37 writes it.
const kept = `{"Data":{"PodDeviceEntries":[{"PodUID":"7e6a","ContainerName":"setup","ResourceName":"xpu.opiproject.org/fast",` +
	`"DeviceIDs":{"0":["0000:3b:00.2"],"-1":["gpu-1"]},"AllocResp":"CkAK"}],"RegisteredDevices":{"xpu.opiproject.org/fast":["0000:3b:00.2"]}},"Checksum":1}`

const checkpointVF = "0000:3b:00.2"

func TestParseCheckpoint(t *testing.T) {
	want := map[string]Assignment{
		checkpointVF: {Resource: "xpu.opiproject.org/fast", Container: "setup"},
	}
	got, err := parseCheckpoint([]byte(kept), function.ParseID)
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("error %v, -want +got\n%s", err, diff)
	}
	if _, err := parseCheckpoint([]byte(`{"Data":`), function.ParseID); err == nil {
		t.Error("half a checkpoint is taken for one")
	}
}

func FuzzParseCheckpoint(f *testing.F) {
	f.Add([]byte(kept))
	f.Fuzz(func(_ *testing.T, text []byte) { _, _ = parseCheckpoint(text, function.ParseID) })
}

// TestIncompleteAnswer checks that the list of a kubelet that was restarted without an API server
// is an error, because it has static pods only. It also checks that init containers, which are
// never in the list, are found in the checkpoint.
func TestIncompleteAnswer(t *testing.T) {
	dir := must.SocketDir(t)
	kubelet, err := kubelettest.ServePods(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kubelet.Stop)

	client, err := NewClient(Options{
		KubeletDir: dir, Self: Self{Namespace: "default", Name: "xpu-agent"}, Log: testr.New(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })

	kubelet.Set(kubelettest.Pod("static", "x"))
	if assigned, err := client.Assigned(t.Context()); err == nil {
		t.Errorf("Assigned = %v, want an error: the agent's own pod is missing", assigned)
	}

	kubelet.Set(kubelettest.Pod("xpu-agent", "x"))
	if assigned, err := client.Assigned(t.Context()); err != nil || len(assigned) > 0 {
		t.Errorf("Assigned = %v, %v, want nothing", assigned, err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "device-plugins"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, checkpointFile), []byte(kept), 0o600); err != nil {
		t.Fatal(err)
	}

	assigned, err := client.Assigned(t.Context())
	if err != nil || assigned[checkpointVF].Container != "setup" {
		t.Errorf("Assigned = %v, %v, want what the init container has", assigned, err)
	}
	if err := os.WriteFile(filepath.Join(dir, checkpointFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if assigned, err := client.Assigned(t.Context()); err == nil {
		t.Errorf("Assigned = %v with half a checkpoint, want an error", assigned)
	}
}

// TestAuxiliaryDevice checks that a pod has an SF that another device plugin names by the SF's
// auxiliary device.
func TestAuxiliaryDevice(t *testing.T) {
	sf := function.SubfunctionID("0000:3b:00.0", 88)
	c := &Client{options: Options{Auxiliary: func(name string) (function.ID, bool) {
		return sf, name == "mlx5_core.sf.4"
	}}}
	text := `{"Data":{"PodDeviceEntries":[{"ContainerName":"a","ResourceName":"nvidia.com/sf","DeviceIDs":{"0":["mlx5_core.sf.4","mlx5_core.sf.5"]}}]}}`
	kept, err := parseCheckpoint([]byte(text), c.parse)
	if err != nil || len(kept) != 1 || kept[sf.String()].Resource != "nvidia.com/sf" {
		t.Errorf("checkpoint: %v, %v", kept, err)
	}

	listed := c.functions([]*podresourcesapi.PodResources{{Namespace: "default", Name: "p",
		Containers: []*podresourcesapi.ContainerResources{{
			Name: "a", Devices: []*podresourcesapi.ContainerDevices{
				{ResourceName: "nvidia.com/sf", DeviceIds: []string{"mlx5_core.sf.4"}},
			},
		}}}})

	if len(listed[sf]) != 1 || listed[sf][0].Pod != "p" {
		t.Errorf("list: %v", listed)
	}
}
