// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// soon is how long a test waits for an event that must come.
const soon = 20 * time.Second

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, to, path string) {
	t.Helper()
	if err := os.Symlink(to, path); err != nil {
		t.Fatal(err)
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func names(t *testing.T, d interface {
	DevicePools(context.Context) ([]v1alpha1.DevicePool, error)
}) string {
	t.Helper()
	devicePools, err := d.DevicePools(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	var out []string
	for _, p := range devicePools {
		out = append(out, p.Name)
	}
	return strings.Join(out, " ")
}

// until waits for a change after which holds returns true.
func until(t *testing.T, what string, changes <-chan struct{}, holds func() bool) {
	t.Helper()
	limit := time.After(soon)
	for !holds() {
		select {
		case <-changes:
		case <-limit:
			t.Fatalf("%s: did not come", what)
		}
	}
}

// problem returns why the file's current content is not used; nil if it is.
func problem(f *File) error {
	return f.last.Load().problem
}

// follow opens a file and runs it until the test ends. Every change and every log line is a value
// in changes.
func follow(
	t *testing.T, path string,
) (f *File, registry *prometheus.Registry, changes <-chan struct{}) {
	t.Helper()
	news := make(chan struct{}, 1)
	notify := func() {
		select {
		case news <- struct{}{}:
		default:
		}
	}

	registry = prometheus.NewRegistry()
	log := funcr.New(func(_, line string) { t.Log(line); notify() }, funcr.Options{})
	f, err := OpenFile(FileOptions{
		Path: path, ResourcePrefix: "example.com", Changed: notify, Registry: registry, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})

	t.Cleanup(running.Wait)
	t.Cleanup(cancel)

	return f, registry, news
}

// TestFileChanges changes the file in all the ways in which people and the kubelet do.
func TestFileChanges(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pools")
	write(t, path, fast)
	f, registry, changes := follow(t, path)
	if got := names(t, f); got != "fast" {
		t.Fatalf("DevicePools are %q, want fast", got)
	}

	has := func(want string) func() bool {
		return func() bool {
			return names(t, f) == want && problem(f) == nil
		}
	}

	write(t, path, slow)
	until(t, "written in place", changes, has("slow"))

	write(t, path+".new", fast+"---\n"+slow)
	rename(t, path+".new", path)
	until(t, "renamed over", changes, has("fast slow"))

	refused := func(what, want string) {
		t.Helper()
		until(t, what, changes, func() bool {
			return problem(f) != nil &&
				strings.Contains(problem(f).Error(), want)
		})
		if got := names(t, f); got != "fast slow" {
			t.Errorf("%s: DevicePools are %q, want those of before", what, got)
		}
	}

	write(t, path, strings.Replace(fast, "0-3", "3-0", 1))
	refused("bad content", path+`: document 1: DevicePool fast: spec.selectors[0].pfNames[0]`)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}

	refused("removed", "no such file")
	metric := func(name string) float64 {
		t.Helper()
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}

		for _, family := range families {
			if m := family.GetMetric()[0]; family.GetName() == name {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}

		t.Fatalf("no metric %s", name)
		return 0
	}

	// There may be more errors, because the test may be suspended while a file is half written.
	if errs, good := metric("xpu_config_errors_total"), metric(
		"xpu_config_last_load_successful",
	); errs < 2 || good != 0 {
		t.Errorf("%v errors, last successful %v, want 2 and 0", errs, good)
	}

	write(t, path, fast)
	until(t, "back", changes, has("fast"))
	if good := metric("xpu_config_last_load_successful"); good != 1 {
		t.Errorf("last successful %v, want 1", good)
	}
}

// TestConfigMap changes files as the kubelet does in a ConfigMap's volume: files are links to
// ..data/, which is a link to a directory, and is replaced by a link to another directory.
func TestConfigMap(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	version := func(name, content string) {
		t.Helper()
		if err := os.Mkdir(at(name), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, at(name+"/pools"), content)
	}

	version("..1", fast)
	link(t, "..1", at("..data"))
	link(t, "..data/pools", at("pools"))
	f, _, changes := follow(t, at("pools"))

	version("..2", slow)
	link(t, "..2", at("..data_tmp"))
	rename(t, at("..data_tmp"), at("..data"))
	if err := os.RemoveAll(at("..1")); err != nil {
		t.Fatal(err)
	}

	until(t, "another version", changes, func() bool { return names(t, f) == "slow" })
}

func TestOpenFile(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad")
	write(t, bad, `{"resourceList": [{"resourceName": "a"}]}`)

	for path, want := range map[string]string{
		filepath.Join(dir, "none"): "no such file",
		bad:                        "configuration " + bad + ": resourceList[0].selectors",
	} {
		if _, err := OpenFile(FileOptions{Path: path, Log: logr.Discard()}); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("OpenFile(%s): %v, want %q in it", path, err, want)
		}
	}
}

// api stands for an API server.
type api struct {
	devicePools []v1alpha1.DevicePool
	labels      map[string]string
	err         error
}

func (a *api) DevicePools(context.Context) ([]v1alpha1.DevicePool, error) {
	return a.devicePools, a.err
}

func (a *api) NodeLabels(context.Context) (map[string]string, error) { return a.labels, a.err }

// TestNodeSelector: nodeSelectors in the file are ignored, because the file is for its node.
func TestNodeSelector(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pools")
	write(t, path, fast+"  nodeSelector: {rack: '7'}\n")
	f, err := OpenFile(FileOptions{Path: path, Log: logr.Discard()})
	if err != nil {
		t.Fatal(err)
	}

	devicePools, err := f.DevicePools(t.Context())
	if err != nil || len(devicePools) != 1 || len(devicePools[0].Spec.NodeSelector) > 0 {
		t.Errorf("DevicePools %+v, %v, want one without nodeSelector", devicePools, err)
	}
}

// TestAdapt: the program that opens the file can complete its DevicePools, or refuse them.
func TestAdapt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pools")
	write(t, path, fast)
	open := func(adapt func(*v1alpha1.DevicePool) error) (*File, error) {
		return OpenFile(FileOptions{Path: path, Adapt: adapt, Log: logr.Discard()})
	}
	f, err := open(func(p *v1alpha1.DevicePool) error { p.Spec.Network = "lab"; return nil })
	if err != nil {
		t.Fatal(err)
	}
	if devicePools, err := f.DevicePools(t.Context()); err != nil ||
		devicePools[0].Spec.Network != "lab" {
		t.Errorf("DevicePools %+v, %v, want one with network lab", devicePools, err)
	}

	_, err = open(func(*v1alpha1.DevicePool) error { return errors.New("spec.publish: is DRA") })
	if want := "configuration " + path + ": DevicePool fast: spec.publish: is DRA"; err == nil ||
		err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

// TestNoFile: without a file, only the API server has declarations.
func TestNoFile(t *testing.T) {
	var none *File
	if err := none.Run(t.Context()); err != nil {
		t.Errorf("Run = %v", err)
	}
	if got := names(t, none); got != "" {
		t.Errorf("DevicePools are %q, want none", got)
	}

	a := &api{devicePools: []v1alpha1.DevicePool{{}}}
	a.devicePools[0].Name = "wide"
	if got := names(t, &Merged{Declarations: a, File: none, Log: logr.Discard()}); got != "wide" {
		t.Errorf("DevicePools are %q, want wide", got)
	}
}

// TestBusyDirectory: a change is noticed although another file in the directory changes all the
// time.
func TestBusyDirectory(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pools")
	write(t, path, fast)
	f, _, changes := follow(t, path)
	write(t, path, slow)
	until(t, "written in silence", changes, func() bool { return names(t, f) == "slow" })

	var busy sync.WaitGroup
	defer busy.Wait()

	ctx, stop := context.WithCancel(t.Context())
	defer stop()

	busy.Go(func() {
		for ctx.Err() == nil {
			if err := os.WriteFile(filepath.Join(dir, "log"), []byte("line"), 0o600); err != nil {
				t.Error(err)
			}
			time.Sleep(quiet / 10)
		}
	})

	write(t, path, fast)
	until(t, "written in a busy directory", changes, func() bool { return names(t, f) == "fast" })
}

func TestMerged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pools")
	write(t, path, fast)
	f, err := OpenFile(FileOptions{Path: path, Log: logr.Discard()})
	if err != nil {
		t.Fatal(err)
	}

	named := func(name string) v1alpha1.DevicePool {
		p := v1alpha1.DevicePool{}
		p.Name = name
		return p
	}

	a := &api{devicePools: []v1alpha1.DevicePool{named("fast"), named("wide")},
		labels: map[string]string{"rack": "7"}}
	var lines []string
	log := funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{})
	m := &Merged{Declarations: a, File: f, Log: log}
	for range 2 {
		if got := names(t, m); got != "fast wide" {
			t.Errorf("DevicePools are %q, want fast wide", got)
		}
	}

	if devicePools, err := m.DevicePools(t.Context()); err != nil ||
		len(devicePools[0].Spec.Selectors) != 1 {
		t.Errorf("DevicePools are %+v, %v, want the file's fast", devicePools, err)
	}
	if len(lines) != 1 || !strings.Contains(lines[0], `"devicePool"="fast"`) {
		t.Errorf("log lines %q, want one about fast", lines)
	}
	if labels, err := m.NodeLabels(t.Context()); err != nil || labels["rack"] != "7" {
		t.Errorf("labels %v, %v", labels, err)
	}

	a.err = errors.New("cache is not synced")
	if _, err := m.DevicePools(t.Context()); !errors.Is(err, a.err) {
		t.Errorf("error %v, want the API server's", err)
	}
}
