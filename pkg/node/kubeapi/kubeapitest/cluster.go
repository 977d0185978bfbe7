// SPDX-License-Identifier: Apache-2.0

// Package kubeapitest runs an API server for tests. It has the CRDs, the agents' role and the
// admission policies of deploy/, as a cluster has.
package kubeapitest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// Cluster is an API server with etcd, for tests.
type Cluster struct {
	admin       *rest.Config
	environment *envtest.Environment
}

// Start starts an API server with the objects of the deploy directory. It returns nil if
// KUBEBUILDER_ASSETS does not name the directory of kube-apiserver and etcd; [Cluster.Need] then
// skips the tests. flags are additional flags of kube-apiserver, without dashes:
// {"emulated-version", "1.34"}.
func Start(deploy string, flags ...[2]string) (*Cluster, error) {
	return start(deploy, &envtest.Environment{
		CRDDirectoryPaths: []string{filepath.Join(deploy, "crds")}, ErrorIfCRDPathMissing: true,
	}, flags)
}

// StartWithoutCRDs does the same as [Start] for a cluster from which the project's CRDs were
// removed, or whose API server does not know them yet. The roles and policies exist.
func StartWithoutCRDs(deploy string, flags ...[2]string) (*Cluster, error) {
	return start(deploy, &envtest.Environment{}, flags)
}

func start(deploy string, environment *envtest.Environment, flags [][2]string) (*Cluster, error) {
	if !needs.HasKubernetes() {
		return nil, nil
	}

	environment.ControlPlaneStartTimeout = time.Minute
	for _, flag := range flags {
		environment.ControlPlane.GetAPIServer().Configure().Append(flag[0], flag[1])
	}

	config, err := environment.Start()
	if err != nil {
		return nil, fmt.Errorf("API server for tests: %w", err)
	}

	config.QPS = -1
	c := &Cluster{admin: config, environment: environment}
	if err := c.setUp(deploy); err != nil {
		return nil, errors.Join(fmt.Errorf("API server for tests: %w", err), c.Stop())
	}

	return c, nil
}

// Restart stops the API server and starts it again with the same data. It returns when the API
// server reports that it is ready, which is before it has read all policies and CRDs. Because the
// API server has new certificates, the caller must create new clients.
func (c *Cluster) Restart() error {
	server := c.environment.ControlPlane.APIServer
	if err := server.Stop(); err != nil {
		return fmt.Errorf("stop the API server: %w", err)
	}
	if err := server.Start(); err != nil {
		return fmt.Errorf("start the API server again: %w", err)
	}

	admin, err := c.environment.AddUser(envtest.User{
		Name: "admin", Groups: []string{"system:masters"},
	}, &rest.Config{QPS: -1})
	if err != nil {
		return fmt.Errorf("administrator of the API server: %w", err)
	}

	c.admin = admin.Config()
	return nil
}

// Main runs the tests of a package with an API server of [Start]. It first calls use with the API
// server, or with nil if the API server's program is missing. Main is for TestMain, and returns the
// code to exit with. flags are those of [Start].
func Main(m *testing.M, deploy string, use func(*Cluster), flags ...[2]string) int {
	c, err := Start(deploy, flags...)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}

	use(c)
	code := m.Run()
	if err := c.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}

	return code
}

// Stop ends the API server. It does nothing if there is no API server.
func (c *Cluster) Stop() error {
	if c == nil {
		return nil
	}
	return c.environment.Stop()
}

// Need skips the test if there is no API server.
func (c *Cluster) Need(t testing.TB) {
	t.Helper()
	needs.Kubernetes(t)
}

// Admin returns the configuration of a user who may do everything.
func (c *Cluster) Admin() *rest.Config { return rest.CopyConfig(c.admin) }

// AgentNamespace is the namespace of the agents.
const AgentNamespace = "xpu-system"

// Agent returns the configuration of the agent on a node: its ServiceAccount with a token that is
// bound to a pod on the node.
func (c *Cluster) Agent(node string) *rest.Config { return c.AgentIn(AgentNamespace, node) }

// AgentIn returns the configuration of the agent on a node of an installation in this namespace.
func (c *Cluster) AgentIn(namespace, node string) *rest.Config {
	config := c.Admin()
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + namespace + ":xpu-agent",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace,
			"system:authenticated"},
	}

	if node != "" {
		config.Impersonate.Extra = map[string][]string{
			"authentication.kubernetes.io/node-name": {node},
		}
	}

	return config
}

// Controller returns the configuration of xpu-controller, which has its ServiceAccount.
func (c *Cluster) Controller() *rest.Config {
	config := c.Admin()
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + AgentNamespace + ":xpu-controller",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + AgentNamespace,
			"system:authenticated"},
	}
	return config
}

// Client returns a client that knows the kinds of this project and of Kubernetes.
func Client(config *rest.Config) (client.Client, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme),
		v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: scheme})
}

func (c *Cluster) setUp(deploy string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	admin, err := Client(c.admin)
	if err != nil {
		return err
	}

	for _, file := range []string{
		"namespace/namespace.yaml", "agent/rights/rbac.yaml", "agent/rights/policy.yaml",
		"controller/rbac.yaml", "controller/policy.yaml", "controller/taint-rules.yaml",
		"claims/policy.yaml",
	} {
		if err := apply(ctx, admin, filepath.Join(deploy, file)); err != nil {
			return err
		}
	}

	return c.waitForPolicies(ctx)
}

func apply(ctx context.Context, admin client.Client, path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()

	for decoder := yaml.NewYAMLOrJSONDecoder(file, 4096); ; {
		var object unstructured.Unstructured
		if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}

		if err := admin.Create(ctx, &object); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
}

// waitForPolicies returns once all policies are enforced, which takes the API server a moment.
func (c *Cluster) waitForPolicies(ctx context.Context) error {
	stranger, err := Client(c.Agent("")) // which all policies refuse
	if err != nil {
		return err
	}

	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "waiting-for-policies"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: v1alpha1.GroupName, NodeName: new("some-node"),
			Pool: resourceapi.ResourcePool{Name: "some-node", ResourceSliceCount: 1},
		},
	}

	port := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: AgentNamespace, Name: "waiting-for-policies"},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: "some-node", Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:00.2"},
			XPU: "card", Network: "lab", MAC: "02:00:00:00:00:01",
		},
	}

	node := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "waiting-for-policies"}}
	hasCRDs := len(c.environment.CRDDirectoryPaths) > 0
	err = wait.PollUntilContextCancel(ctx, 50*time.Millisecond,
		true, func(ctx context.Context) (bool, error) {
			creation := stranger.Create(ctx, slice.DeepCopy(), client.DryRunAll)
			if !hasCRDs {
				return DeniedByPolicy(creation), nil
			}
			ports := stranger.Create(ctx, port.DeepCopy(), client.DryRunAll)
			nodes := stranger.Create(ctx, node.DeepCopy(), client.DryRunAll)
			return DeniedByPolicy(creation) && DeniedByPolicy(ports) && DeniedByPolicy(nodes), nil
		})

	if err != nil {
		return fmt.Errorf("admission policies are not enforced: %w", err)
	}

	return nil
}

// DeniedByPolicy reports whether an admission policy, and not the role or the API, refused a
// request.
func DeniedByPolicy(err error) bool {
	return err != nil && strings.Contains(err.Error(), "ValidatingAdmissionPolicy")
}
