// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

const (
	nodeName  = "node1"
	namespace = "xpu-system"
	agentUser = "system:serviceaccount:" + namespace + ":xpu-agent"
)

// cluster is an API server with etcd, the project's CRDs and the agent's permissions, without
// controllers. etcd does not sync to disk.
type cluster struct {
	environment *envtest.Environment
	config      *rest.Config
	clientset   *kubernetes.Clientset
	client      client.Client
	dir         string
	node        *corev1.Node
	// agentKubeconfig has a token of the agent's ServiceAccount, bound to the node as in a real
	// cluster.
	agentKubeconfig, controllerKubeconfig string
}

const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
- level: None
`

// startCluster starts the cluster that the benchmarks share, once.
func (b *bench) startCluster(ctx context.Context) (*cluster, error) {
	if b.cluster != nil {
		return b.cluster, nil
	}

	c, err := b.newCluster(ctx, "cluster")
	if err != nil {
		return nil, err
	}

	b.cluster = c
	return c, c.prepare(ctx, b.source)
}

// newCluster starts a separate cluster in its own directory. The caller stops it.
func (b *bench) newCluster(ctx context.Context, name string) (*cluster, error) {
	if err := b.buildAPIServer(ctx); err != nil {
		return nil, err
	}

	c := &cluster{dir: filepath.Join(b.dir, name)}
	if err := os.Mkdir(c.dir, 0o700); err != nil {
		return nil, err
	}

	policy := filepath.Join(c.dir, "audit-policy.yaml")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		return nil, err
	}

	c.environment = &envtest.Environment{
		BinaryAssetsDirectory:    b.assets,
		CRDDirectoryPaths:        []string{filepath.Join(b.source, "deploy", "crds")},
		ErrorIfCRDPathMissing:    true,
		ControlPlaneStartTimeout: time.Minute,
	}

	c.environment.ControlPlane.GetAPIServer().Configure().
		Set("audit-policy-file", policy).
		Set("audit-log-path", c.auditLog()).
		Set("endpoint-reconciler-type", "none").
		Set("advertise-address", "127.0.0.1") // otherwise it looks for a default route

	var err error
	if c.config, err = c.environment.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("API server of %s: %w", b.assets, err),
			c.environment.Stop())
	}
	if err := c.connect(); err != nil {
		return nil, errors.Join(err, c.stop())
	}

	return c, nil
}

// buildAPIServer builds etcd and kube-apiserver in the expected directory. It leaves existing files
// alone, because other processes may use them.
func (b *bench) buildAPIServer(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(b.assets, "kube-apiserver")); err == nil {
		return nil
	}

	build := exec.CommandContext(ctx, filepath.Join(b.bin, "devcluster"), "build",
		"--bin", b.assets)
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("etcd and kube-apiserver: %s: %w:\n%s", build, err, out)
	}
	return nil
}

func (c *cluster) stop() error { return c.environment.Stop() }

func (c *cluster) auditLog() string { return filepath.Join(c.dir, "audit.log") }

// connect creates the clients.
func (c *cluster) connect() (err error) {
	c.config.QPS = -1
	if c.clientset, err = kubernetes.NewForConfig(c.config); err != nil {
		return err
	}

	scheme := runtime.NewScheme()
	if err := errors.Join(clientscheme.AddToScheme(scheme),
		v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}

	c.client, err = client.New(c.config, client.Options{Scheme: scheme})
	return err
}

// prepare creates a node, and the objects of deploy/ for agent and controller.
func (c *cluster) prepare(ctx context.Context, source string) (err error) {
	for _, file := range []string{
		"namespace/namespace.yaml", "agent/rights/rbac.yaml", "agent/rights/policy.yaml",
		"controller/rbac.yaml",
	} {
		if err := c.apply(ctx, filepath.Join(source, "deploy", file)); err != nil {
			return err
		}
	}

	node := &corev1.Node{}
	node.Name = nodeName
	if c.node, err = c.clientset.CoreV1().Nodes().Create(ctx,
		node, metav1.CreateOptions{}); err != nil {
		return err
	}
	if c.agentKubeconfig, err = c.kubeconfig(ctx, namespace, "xpu-agent"); err != nil {
		return err
	}
	if c.controllerKubeconfig, err = c.kubeconfig(ctx, namespace, "xpu-controller"); err != nil {
		return err
	}

	// The API server opens the storage of a kind at the first request, and rejects watches for a
	// second.
	if err := errors.Join(c.client.List(ctx, &v1alpha1.XPUPortList{}),
		c.client.List(ctx, &v1alpha1.DevicePoolList{}),
		c.client.List(ctx, &v1alpha1.XPUNodeList{})); err != nil {
		return err
	}

	return c.awaitRights(ctx)
}

// awaitRights waits until the API server knows the agent's role.
func (c *cluster) awaitRights(ctx context.Context) error {
	config, err := clientcmd.BuildConfigFromFlags("", c.agentKubeconfig)
	if err != nil {
		return err
	}

	agent, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}

	return wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, 30*time.Second,
		true, func(ctx context.Context) (bool, error) {
			_, err := agent.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
			if apierrors.IsForbidden(err) {
				return false, nil
			}
			return err == nil, err
		})
}

// apply creates the objects of a manifest.
func (c *cluster) apply(ctx context.Context, path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()

	decoder := utilyaml.NewYAMLOrJSONDecoder(file, 4096)
	for {
		object := &unstructured.Unstructured{}
		err := decoder.Decode(&object.Object)
		if errors.Is(err, io.EOF) {
			return nil
		}

		if err == nil && len(object.Object) > 0 {
			err = c.client.Create(ctx, object)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
}

// kubeconfig writes a file with a token of the service account, bound to a pod on the node.
func (c *cluster) kubeconfig(ctx context.Context, namespace, account string) (string, error) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{
		NodeName: nodeName, ServiceAccountName: account,
		SecurityContext: &corev1.PodSecurityContext{
			RunAsNonRoot:   ptr.To(true),
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
		Containers: []corev1.Container{{Name: account, Image: account,
			SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: ptr.To(false),
				Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			}}},
	}}

	pod.Name = account
	pod, err := c.clientset.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}

	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(int64(3600)),
		BoundObjectRef: &authenticationv1.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID,
		},
	}}

	token, err := c.clientset.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account,
		request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token of service account %s: %w", account, err)
	}

	path := filepath.Join(c.dir, account+".kubeconfig")
	return path, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{
			"c": {Server: c.config.Host, CertificateAuthorityData: c.config.CAData},
		},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {Token: token.Status.Token}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	}, path)
}

// poolName is the name of the DevicePool with all VFs.
const poolName = "all"

// reset restores the state before any agent, with only the DevicePool.
func (c *cluster) reset(ctx context.Context) error {
	if err := c.deleteSlices(ctx); err != nil {
		return err
	}

	pool := &v1alpha1.DevicePool{Spec: v1alpha1.DevicePoolSpec{
		Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}},
		Allow:     v1alpha1.PrivilegedFields(),
	}}

	pool.Name = poolName
	if err := c.client.Delete(ctx, pool.DeepCopy()); err != nil && !apierrors.IsNotFound(err) {
		return err
	}

	return c.client.Create(ctx, pool)
}

func (c *cluster) deleteSlices(ctx context.Context) error {
	return c.clientset.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{},
		metav1.ListOptions{})
}

func (c *cluster) slices(ctx context.Context) (*resourceapi.ResourceSliceList, error) {
	return c.clientset.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
}

// write is a line of an audit log.
type write struct {
	Verb       string `json:"verb"`
	RequestURI string `json:"requestURI"`
	User       struct {
		Username string `json:"username"`
	} `json:"user"`
	ObjectRef struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	RequestReceivedTimestamp time.Time `json:"requestReceivedTimestamp"`
}

// String returns the verb and resource, such as "patch resourceclaims/status".
func (w write) String() string {
	if w.ObjectRef.Subresource == "" {
		return w.Verb + " " + w.ObjectRef.Resource
	}
	return w.Verb + " " + w.ObjectRef.Resource + "/" + w.ObjectRef.Subresource
}

// writesSince returns the writes in an audit log that were received since begin and for which which
// is true. An audit log is written before the client gets its answer.
func writesSince(path string, begin time.Time, which func(write) bool) (out []write, err error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()

	lines := bufio.NewReader(file)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return out, nil // an incomplete line is later than the requested ones
		}
		if err != nil {
			return nil, err
		}

		var w write
		if err := json.Unmarshal(line, &w); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if strings.Contains(w.RequestURI, "dryRun=") {
			continue // not a write
		}

		if !w.RequestReceivedTimestamp.Before(begin) && which(w) {
			out = append(out, w)
		}
	}
}
