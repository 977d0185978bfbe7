// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	ocispec "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// injected returns the device nodes that a runtime gives a container for CDI devices.
func injected(t *testing.T, dir string, names ...string) []string {
	t.Helper()
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}

	container := &ocispec.Spec{}
	if unresolved, err := cache.InjectDevices(container, names...); err != nil {
		t.Fatalf("unresolved %q: %v", unresolved, err)
	}

	var nodes []string
	for _, d := range container.Linux.Devices {
		nodes = append(nodes, d.Path)
	}

	return nodes
}

// nullFunction returns a VF whose UIO device is a node that every machine has, because the runtime
// checks it.
func nullFunction(index int) function.Function {
	return with(vf("3b", index), func(f *function.Function) { f.Driver = "uio" })
}

// nullNodes returns the device nodes of a Function whose node exists on every machine.
func nullNodes() devnode.Set {
	return devnode.Set{
		Nodes: []*specs.DeviceNode{{HostPath: "/dev/null", Path: "/dev/null", Permissions: "rw"}},
	}
}

func TestAllocateByCDI(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	dir := filepath.Join(s.dir, "cdi")
	var err error
	if s.manager.CDI, err = NewCDI(dir); err != nil {
		t.Fatal(err)
	}

	s.manager.Nodes.SysRoot = tree(t,
		"bus/pci/devices/0000:3b:00.2/uio/null/dev", "bus/pci/devices/0000:3b:00.3/uio/zero/dev")
	s.set(poolOf("fast", nullFunction(0), nullFunction(1), vf("3b", 2)))
	stop := s.run()
	s.awaitHealthy("registered", fast, vf0, vf1, vf2)
	const name0 = "xpu.opiproject.org/deviceplugin=xpu.opiproject.org_fast_0000-3b-00-2"
	const name1 = "xpu.opiproject.org/deviceplugin=xpu.opiproject.org_fast_0000-3b-00-3"
	if diff := cmp.Diff([]string{"/dev/zero"}, injected(t, dir, name1)); diff != "" {
		t.Errorf("before the Allocate, as after a reboot: -want +got\n%s", diff)
	}

	got, err := s.kubelet.Allocate(t.Context(), fast, vf0, vf2)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*pluginapi.CDIDevice{{Name: name0}}, got.CdiDevices,
		protocmp.Transform()); diff != "" {
		t.Errorf("CDI devices: -want +got\n%s", diff)
	}
	if len(got.Devices) != 0 || len(got.Envs) != 2 {
		t.Errorf("response is %v, want environment and no nodes beside CDI", got)
	}
	if diff := cmp.Diff([]string{"/dev/null"}, injected(t, dir, name0)); diff != "" {
		t.Errorf("nodes: -want +got\n%s", diff)
	}

	// The driver made another device without a notification.
	old := filepath.Join(s.manager.Nodes.SysRoot, "bus/pci/devices/0000:3b:00.2/uio/null")
	if err := os.Rename(old, filepath.Join(filepath.Dir(old), "full")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.kubelet.Allocate(t.Context(), fast, vf0); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/dev/full", "/dev/zero"},
		injected(t, dir, name0, name1)); diff != "" {
		t.Errorf("nodes after the device changed: -want +got\n%s", diff)
	}

	stop()
	if diff := cmp.Diff([]string{"/dev/zero"}, injected(t, dir, name1)); diff != "" {
		t.Errorf("after the end: -want +got\n%s", diff)
	}
}

// TestCDIFileNotWritten: an Allocate fails if the container would not get its device nodes.
func TestCDIFileNotWritten(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	dir := filepath.Join(s.dir, "cdi")
	var err error
	if s.manager.CDI, err = NewCDI(dir); err != nil {
		t.Fatal(err)
	}

	s.manager.Nodes.SysRoot = tree(t, "bus/pci/devices/0000:3b:00.2/uio/null/dev")
	s.set(poolOf("fast", nullFunction(0)))
	s.run()
	s.awaitHealthy("registered", fast, vf0)
	old := filepath.Join(s.manager.Nodes.SysRoot, "bus/pci/devices/0000:3b:00.2/uio/null")
	// makes another file content necessary
	if err := os.Rename(old, filepath.Join(filepath.Dir(old), "full")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if got, err := s.kubelet.Allocate(t.Context(), fast, vf0); err == nil ||
		!strings.Contains(err.Error(), "CDI file") {
		t.Errorf("Allocate = %v, %v; want an error about the CDI file", got, err)
	}
}

// TestCDILeftovers: a device stays as long as its pool or a pod has the Function, also for a later
// process, because the pod's containers may be created again at any time.
func TestCDILeftovers(t *testing.T) {
	m := newManager(t, must.SocketDir(t), &node{}, testr.New(t))
	dir := t.TempDir()
	nodes := func(f function.Function) content {
		return content{function: f, Set: nullNodes()}
	}

	restart := func() {
		t.Helper()
		var err error
		if m.CDI, err = NewCDI(dir); err != nil {
			t.Fatal(err)
		}
		m.reset()
	}

	restart()
	if err := m.CDI.include(fast,
		[]content{nodes(vf("3b", 0)), nodes(vf("3b", 1)), nodes(vf("3b", 2))}); err != nil {
		t.Fatal(err)
	}

	written, err := os.Stat(filepath.Join(dir, cdiFile(fast)))
	if err != nil {
		t.Fatal(err)
	}

	restart()
	if err := m.CDI.include(fast, []content{nodes(vf("3b", 0))}); err != nil {
		t.Fatal(err)
	}
	if now, err := os.Stat(filepath.Join(dir, cdiFile(fast))); err != nil ||
		!os.SameFile(written, now) {
		t.Errorf("file was written again by a process that has nothing to add, %v", err)
	}

	offering := &server{}
	offering.offer.Store(newOffer(poolOf("fast", vf("3b", 0)), (&node{}).Problems))
	m.servers[fast] = offering
	m.Assigned = assigned{vf1: {Resource: fast}, vf2: {Resource: "intel.com/other"}}.Assigned
	for i, want := range []string{vf0 + vf1 + vf2, vf0 + vf1, vf0 + vf1} {
		m.sweep(t.Context())
		listed := ""
		for _, id := range []string{vf0, vf1, vf2} {
			for _, d := range m.CDI.files[cdiFile(fast)] {
				if strings.HasSuffix(d.Name, strings.NewReplacer(":", "-", ".", "-").Replace(id)) {
					listed += id
				}
			}
		}

		if listed != want {
			t.Errorf("after look %d: %s are listed, want %s", i, listed, want)
		}
	}

	delete(m.servers, fast)
	m.Assigned = assigned{}.Assigned
	m.sweep(t.Context())
	m.sweep(t.Context())
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("the pool and its pods are gone: %v, %v, want no file", entries, err)
	}
}

// TestCDIBeforeTheDriver checks that the file lists a Function only while the pool's driver is bound
// to it, because the nodes come with the driver. After a reboot a container waits until then.
func TestCDIBeforeTheDriver(t *testing.T) {
	m := newManager(t, must.SocketDir(t), &node{}, testr.New(t))
	const device = "bus/pci/devices/0000:3b:00.2/"
	m.Nodes = devnode.Finder{
		SysRoot: tree(t, device+"vendor"), DevRoot: tree(t, "iommu", "vfio/devices/vfio7"),
	}
	var err error
	m.CDI, err = NewCDI(t.TempDir())
	must.Succeed(t, err)

	p := poolOf("fast", with(vf("3b", 0), func(f *function.Function) {
		f.Driver, f.IOMMUGroup = "mlx5_core", "42"
	}))
	p.Spec.Driver = "vfio-pci"
	offering := &server{manager: m, resource: fast, log: m.Log}
	offering.offer.Store(newOffer(pool.Pool{}, nil))

	own := filepath.Join(m.Nodes.SysRoot, device)
	for _, step := range []struct {
		name   string
		driver string
		make   string // of vfio
		want   string
	}{
		{"no driver", "", "", ""},
		{"own driver", "mlx5_core", "", ""},
		{"pool's driver", "vfio-pci", "vfio-dev/vfio7", "/dev/iommu /dev/vfio/devices/vfio7"},
		{"own driver again", "mlx5_core", "", ""},
		{"variant", "mlx5_vfio_pci", "vfio-dev/vfio7", "/dev/iommu /dev/vfio/devices/vfio7"},
	} {
		must.Succeed(t, errors.Join(os.RemoveAll(filepath.Join(own, "driver")),
			os.RemoveAll(filepath.Join(own, "vfio-dev"))))
		if step.driver != "" {
			must.Succeed(t, os.Symlink("../drivers/"+step.driver, filepath.Join(own, "driver")))
		}
		must.Succeed(t, os.MkdirAll(filepath.Join(own, step.make), 0o755))
		offering.update(p)

		var paths []string
		for _, d := range m.CDI.files[cdiFile(fast)] {
			for _, n := range d.ContainerEdits.DeviceNodes {
				paths = append(paths, n.HostPath)
			}
		}
		if got := strings.Join(paths, " "); got != step.want {
			t.Errorf("%s: nodes %q, want %q", step.name, got, step.want)
		}
	}
}

// TestCDIWithoutNodes: Functions with a netdev need no CDI.
func TestCDIWithoutNodes(t *testing.T) {
	dir := t.TempDir()
	files, err := NewCDI(dir)
	if err != nil {
		t.Fatal(err)
	}

	netdev := content{function: vf("3b", 0)}
	user := content{function: vf("3b", 0), Set: nullNodes()}
	for _, step := range []struct {
		contents []content
		want     int
	}{{[]content{netdev}, 0}, {[]content{user}, 1}, {[]content{netdev}, 0}} {
		if err := files.include(fast, step.contents); err != nil {
			t.Fatal(err)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != step.want {
			t.Errorf("files after %+v are %v, %v, want %d", step.contents, entries, err, step.want)
		}
	}
}
