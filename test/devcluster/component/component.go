// SPDX-License-Identifier: Apache-2.0

// Package component defines how each program of a cluster is started: its flags, configuration
// files and their paths.
//
// Paths are as the program sees them: in the cluster's mount namespace for the control plane, in
// the node's for the container runtime and the kubelet.
package component

import (
	"bytes"
	_ "embed"
	"path/filepath"
	"text/template"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/network"
)

// Paths of the programs, in the cluster's and in every node's mount namespace.
const (
	Kubernetes = "/run/devcluster/kubernetes"
	Runtime    = "/run/devcluster/runtime"
	Plugins    = "/run/devcluster/plugins"
)

// Path is the PATH of everything on a node. The node's own programs come first.
const Path = Kubernetes + ":" + Runtime + "/usr/sbin:" + Runtime + "/usr/bin"

const etcdURL = "http://127.0.0.1:2379"

// Command is a program with its arguments.
type Command struct {
	Name string // name for logs and people
	Path string
	Args []string
}

// ControlPlane lists the directories of a control plane.
type ControlPlane struct {
	PKI    string // certificates from package cluster
	Config string // contains AuditPolicy as audit-policy.yaml
	Data   string // etcd
	Log    string // receives audit.log
	Gangs  bool   // serves PodGroups, which Kubernetes has since 1.37
}

// gangs returns the flags by which a program knows PodGroups.
func (c ControlPlane) gangs() []string {
	if !c.Gangs {
		return nil
	}
	return []string{"--feature-gates=GenericWorkload=true"}
}

// HasGangs reports whether this version of Kubernetes, such as v1.37.1, has PodGroups of
// scheduling.k8s.io/v1beta1.
func HasGangs(kubernetes string) bool {
	v, err := version.ParseGeneric(kubernetes)
	return err == nil && v.AtLeast(version.MajorMinor(1, 37))
}

// Etcd stores the cluster's state. It does not sync to disk, because a development cluster does not
// survive a crash of its machine.
func (c ControlPlane) Etcd() Command {
	const peer = "http://127.0.0.1:2380"
	return kubernetes("etcd",
		"--name=devcluster",
		"--data-dir="+filepath.Join(c.Data, "etcd"),
		"--listen-client-urls="+etcdURL,
		"--advertise-client-urls="+etcdURL,
		"--listen-peer-urls="+peer,
		"--initial-advertise-peer-urls="+peer,
		"--initial-cluster=devcluster="+peer,
		"--unsafe-no-fsync",
		"--log-level=warn",
	)
}

// APIServer serves at network.Gateway and, for pods, at network.ServiceAddress.
func (c ControlPlane) APIServer() Command {
	flags := c.gangs()
	if c.Gangs {
		flags = append(flags, "--runtime-config=scheduling.k8s.io/v1beta1=true")
	}
	return kubernetes("kube-apiserver", append(flags,
		"--etcd-servers="+etcdURL,
		"--bind-address=0.0.0.0",
		"--advertise-address="+network.Gateway,
		"--secure-port=443",
		"--tls-cert-file="+c.pki("apiserver.crt"),
		"--tls-private-key-file="+c.pki("apiserver.key"),
		"--client-ca-file="+c.pki("ca.crt"),
		"--kubelet-client-certificate="+c.pki("kubelet-client.crt"),
		"--kubelet-client-key="+c.pki("kubelet-client.key"),
		"--kubelet-certificate-authority="+c.pki("ca.crt"),
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file="+c.pki("service-account.key"),
		"--service-account-key-file="+c.pki("service-account.pub"),
		"--requestheader-client-ca-file="+c.pki("ca.crt"),
		"--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file="+c.pki("front-proxy-client.crt"),
		"--proxy-client-key-file="+c.pki("front-proxy-client.key"),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--service-cluster-ip-range="+network.ServiceSubnet,
		"--audit-policy-file="+filepath.Join(c.Config, "audit-policy.yaml"),
		"--audit-log-path="+filepath.Join(c.Log, "audit.log"),
		"--audit-log-maxsize=0",
		"--profiling=false",
	)...)
}

// ControllerManager uses a separate identity for each controller, so its client limits are raised:
// with the default of 20 requests per second, the start alone takes 5 s. It gives a silent node 20
// s instead of 50, which covers two lease renewals of the kubelet and keeps tests of lost nodes
// short.
func (c ControlPlane) ControllerManager() Command {
	kubeconfig := c.pki("kube-controller-manager.kubeconfig")
	return kubernetes("kube-controller-manager", append(c.gangs(),
		"--kubeconfig="+kubeconfig,
		"--authentication-kubeconfig="+kubeconfig,
		"--authorization-kubeconfig="+kubeconfig,
		"--bind-address=127.0.0.1",
		"--leader-elect=false",
		"--use-service-account-credentials=true",
		"--kube-api-qps=1000",
		"--kube-api-burst=2000",
		"--service-account-private-key-file="+c.pki("service-account.key"),
		"--root-ca-file="+c.pki("ca.crt"),
		"--cluster-signing-cert-file="+c.pki("ca.crt"),
		"--cluster-signing-key-file="+c.pki("ca.key"),
		"--allocate-node-cidrs=false",
		"--node-monitor-grace-period=20s",
		"--profiling=false",
	)...)
}

// Scheduler is the default scheduler.
func (c ControlPlane) Scheduler() Command {
	kubeconfig := c.pki("kube-scheduler.kubeconfig")
	return kubernetes("kube-scheduler", append(c.gangs(),
		"--kubeconfig="+kubeconfig,
		"--authentication-kubeconfig="+kubeconfig,
		"--authorization-kubeconfig="+kubeconfig,
		"--bind-address=127.0.0.1",
		"--leader-elect=false",
		"--profiling=false",
	)...)
}

func (c ControlPlane) pki(name string) string { return filepath.Join(c.PKI, name) }

// Health endpoints of the control plane, in the cluster's network namespace.
const (
	APIServerReady          = "https://" + network.Gateway + ":443/readyz"
	ControllerManagerHealth = "https://127.0.0.1:10257/healthz"
	SchedulerHealth         = "https://127.0.0.1:10259/healthz"
)

// Health endpoints of a node, in its network namespace.
const (
	KubeletHealth   = "http://127.0.0.1:10248/healthz"
	KubeProxyHealth = "http://" + kubeProxyHealth + "/healthz"
	kubeProxyHealth = "127.0.0.1:10256"
)

// Files of a node.
const (
	KubeletConfig     = "/etc/kubernetes/kubelet.yaml"
	KubeletKubeconfig = "/etc/kubernetes/kubelet.kubeconfig"
	ProxyKubeconfig   = "/etc/kubernetes/kube-proxy.kubeconfig"
	NodePKI           = "/etc/kubernetes/pki"
	PodNetwork        = "/etc/cni/net.d/10-pods.conflist"
	// Multus sorts before PodNetwork, because the runtime uses the first file.
	Multus           = "/etc/cni/net.d/00-multus.conf"
	MultusKubeconfig = "/etc/cni/net.d/multus.d/multus.kubeconfig"
	MachineID        = "/etc/machine-id"
)

// Node has the parameters of a node's configuration.
type Node struct {
	Name       string
	Address    string // IPv4
	PodSubnet  string // CIDR
	CgroupRoot string
	PauseImage string
	Multus     bool // adds the networks that pods' annotations name to PodNetwork
	KubeProxy  bool // routes the addresses of Services to pods
	CRIO       bool // uses CRI-O instead of containerd
}

// Kubelet runs pods.
func (n Node) Kubelet() Command {
	return kubernetes("kubelet",
		"--config="+KubeletConfig,
		"--kubeconfig="+KubeletKubeconfig,
		"--hostname-override="+n.Name,
		"--node-ip="+n.Address,
		"--root-dir=/var/lib/kubelet",
		"--v=2",
	)
}

// Proxy runs kube-proxy. It calls nft, which must be in the machine's PATH. The settings of
// connection tracking are the machine's, and stay unchanged.
func (n Node) Proxy() Command {
	return kubernetes("kube-proxy",
		"--kubeconfig="+ProxyKubeconfig,
		"--hostname-override="+n.Name,
		"--proxy-mode=nftables",
		"--healthz-bind-address="+kubeProxyHealth,
		"--metrics-bind-address=127.0.0.1:10249",
		"--conntrack-max-per-core=0",
		"--conntrack-tcp-timeout-established=0",
		"--conntrack-tcp-timeout-close-wait=0",
	)
}

//go:embed templates/audit-policy.yaml
var auditPolicy []byte

// AuditPolicy returns a policy that records who wrote what.
func AuditPolicy() []byte { return bytes.Clone(auditPolicy) }

//go:embed templates/kubelet.yaml
var kubeletTemplate string

//go:embed templates/pods.conflist
var podNetworkTemplate string

// multusTemplate has the pod network inline. A clusterNetwork may also be a file, but of a file with
// a list of plugins Multus 4.3.0 remembers only some fields for the DEL, so that addresses are not
// released. CRI-O calls CHECK after each ADD if the version has it, and Multus then checks its own
// default network, even for a pod that named another one.
//
//go:embed templates/multus.conf
var multusTemplate string

//go:embed templates/multus.yaml
var multusObjects []byte

// MultusObjects returns the API objects for Multus: its resource and its permissions.
func MultusObjects() []byte { return bytes.Clone(multusObjects) }

// MultusUser is the user name of Multus at the API server.
const MultusUser = "multus"

// Files renders the node's configuration files by path.
func (n Node) Files() (map[string][]byte, error) {
	files := map[string][]byte{}
	templates := n.runtimeTemplates()
	templates[KubeletConfig], templates[PodNetwork] = kubeletTemplate, podNetworkTemplate
	if n.Multus {
		templates[Multus] = multusTemplate
	}

	set := template.New("").Option("missingkey=error")
	for path, text := range templates {
		if _, err := set.New(path).Parse(text); err != nil {
			return nil, err
		}
	}

	for path := range templates {
		var out bytes.Buffer
		if err := set.ExecuteTemplate(&out, path, struct {
			Node
			Runtime, PKI, Socket, MultusKubeconfig string
		}{n, Runtime, NodePKI, n.RuntimeSocket(), MultusKubeconfig}); err != nil {
			return nil, err
		}
		files[path] = out.Bytes()
	}

	return files, nil
}

func kubernetes(name string, args ...string) Command {
	return Command{Name: name, Path: filepath.Join(Kubernetes, name), Args: args}
}
