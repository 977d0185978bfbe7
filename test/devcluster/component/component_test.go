// SPDX-License-Identifier: Apache-2.0

package component

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var node = Node{Name: "node1", Address: "10.77.0.11", PodSubnet: "10.88.1.0/24",
	CgroupRoot: "/devcluster-x/node1", PauseImage: "devcluster.local/pause:1"}

func TestKubeletConfig(t *testing.T) {
	files, err := node.Files()
	if err != nil {
		t.Fatal(err)
	}

	var config map[string]any
	if err := yaml.UnmarshalStrict(files[KubeletConfig], &config); err != nil {
		t.Fatalf("%v\n%s", err, files[KubeletConfig])
	}

	for field, want := range map[string]any{
		"address":                  "10.77.0.11",
		"cgroupRoot":               "/devcluster-x/node1",
		"failCgroupV1":             false,
		"resolvConf":               "",
		"containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
	} {
		if config[field] != want {
			t.Errorf("%s: got %v, want %v", field, config[field], want)
		}
	}
}

func TestPodNetwork(t *testing.T) {
	files, err := node.Files()
	if err != nil {
		t.Fatal(err)
	}

	var config struct {
		Plugins []struct {
			IPAM struct{ Ranges [][]struct{ Subnet string } }
		}
	}

	if err := json.Unmarshal(files[PodNetwork], &config); err != nil {
		t.Fatal(err)
	}
	if got := config.Plugins[0].IPAM.Ranges[0][0].Subnet; got != node.PodSubnet {
		t.Errorf("subnet %s, want %s", got, node.PodSubnet)
	}
}

func TestMultusDelegatesToThePodNetwork(t *testing.T) {
	files, err := node.Files()
	if err != nil {
		t.Fatal(err)
	}
	if config, ok := files[Multus]; ok {
		t.Errorf("a node without Multus has %s", config)
	}

	with := node
	with.Multus = true
	if files, err = with.Files(); err != nil {
		t.Fatal(err)
	}

	var config struct {
		Kubeconfig string
		Delegates  []json.RawMessage
	}
	if err := json.Unmarshal(files[Multus], &config); err != nil {
		t.Fatalf("%v\n%s", err, files[Multus])
	}
	if config.Kubeconfig != MultusKubeconfig || len(config.Delegates) != 1 {
		t.Fatalf("got %s", files[Multus])
	}

	if got, want := string(config.Delegates[0]), strings.TrimSpace(
		string(files[PodNetwork]),
	); got != want {
		t.Errorf("the delegate is\n%s\nwant\n%s", got, want)
	}
}

func TestContainerdConfig(t *testing.T) {
	files, err := node.Files()
	if err != nil {
		t.Fatal(err)
	}

	got := string(files[containerdConfig])
	for _, want := range []string{
		`sandbox_image = "devcluster.local/pause:1"`,
		`BinaryName = "/run/devcluster/runtime/usr/sbin/runc"`,
		`socket_path = "/var/run/nri/nri.sock"`,
		`cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
}

func TestCRIOConfig(t *testing.T) {
	other := node
	other.CRIO = true
	files, err := other.Files()
	if err != nil {
		t.Fatal(err)
	}
	if files[containerdConfig] != nil {
		t.Error("containerd is configured too")
	}

	for path, wants := range map[string][]string{
		crioConfig: {
			`listen = "/run/crio/crio.sock"`, `pause_image = "devcluster.local/pause:1"`,
			`runtime_path = "/run/devcluster/runtime/usr/bin/restrict"`,
			`nri_listen = "/var/run/nri/nri.sock"`, `cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]`,
		},
		KubeletConfig:   {"containerRuntimeEndpoint: unix:///run/crio/crio.sock"},
		storageConfig:   {`graphroot = "/var/lib/containers/storage"`},
		signaturePolicy: {"insecureAcceptAnything"},
	} {
		for _, want := range wants {
			if !strings.Contains(string(files[path]), want) {
				t.Errorf("%s: no %s in\n%s", path, want, files[path])
			}
		}
	}
}

func TestAuditPolicyIsTheCallersOwn(t *testing.T) {
	AuditPolicy()[0] = '!'
	var policy struct{ Kind string }
	if err := yaml.Unmarshal(AuditPolicy(), &policy); err != nil || policy.Kind != "Policy" {
		t.Errorf("kind %q, %v", policy.Kind, err)
	}
}

// TestGangs: an older Kubernetes refuses to start with a feature gate that it does not know.
func TestGangs(t *testing.T) {
	for version, want := range map[string]bool{
		"v1.34.5": false, "v1.36.9": false, "v1.37.0": true, "v1.38.0-beta.0": true, "": false,
	} {
		plane := ControlPlane{Gangs: HasGangs(version)}
		for _, command := range []Command{
			plane.APIServer(), plane.ControllerManager(), plane.Scheduler(),
		} {
			if got := slices.Contains(command.Args, "--feature-gates=GenericWorkload=true"); got != want {
				t.Errorf("%s of %q: GenericWorkload %t, want %t", command.Name, version, got, want)
			}
		}
	}
}

func TestCommands(t *testing.T) {
	plane := ControlPlane{PKI: "/pki", Config: "/config", Data: "/data", Log: "/log"}
	for _, test := range []struct {
		command Command
		path    string
		arg     string
	}{
		{plane.Etcd(), "/run/devcluster/kubernetes/etcd", "--data-dir=/data/etcd"},
		{plane.APIServer(), "/run/devcluster/kubernetes/kube-apiserver",
			"--authorization-mode=Node,RBAC"},
		{plane.APIServer(), "/run/devcluster/kubernetes/kube-apiserver",
			"--audit-log-path=/log/audit.log"},
		{plane.ControllerManager(), "/run/devcluster/kubernetes/kube-controller-manager",
			"--root-ca-file=/pki/ca.crt"},
		{plane.Scheduler(), "/run/devcluster/kubernetes/kube-scheduler",
			"--kubeconfig=/pki/kube-scheduler.kubeconfig"},
		{node.ContainerRuntime(), "/run/devcluster/runtime/usr/bin/containerd",
			"--config=/etc/containerd/config.toml"},
		{node.Kubelet(), "/run/devcluster/kubernetes/kubelet", "--node-ip=10.77.0.11"},
	} {
		if test.command.Path != test.path || !slices.Contains(test.command.Args, test.arg) {
			t.Errorf("%s: %s %q lacks %s", test.command.Name, test.command.Path,
				test.command.Args, test.arg)
		}
	}
}
