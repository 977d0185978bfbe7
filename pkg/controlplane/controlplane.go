// SPDX-License-Identifier: Apache-2.0

// Package controlplane runs a Kubernetes control plane without nodes, as processes of the calling
// user on the loopback interface: etcd, kube-apiserver, kube-scheduler, and kube-controller-manager
// with only the controllers that make ResourceClaims from templates and that handle tainted
// devices. It is for experiments, and keeps no data.
package controlplane

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/keyutil"
)

const (
	startTimeout = 2 * time.Minute
	pollPeriod   = 20 * time.Millisecond
)

// programs are the programs that a directory of assets must contain.
var programs = [...]string{"etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager"}

// ControlPlane is a running control plane.
type ControlPlane struct {
	Config     *rest.Config // of an administrator
	Kubeconfig []byte       // for the same
	group      *errgroup.Group
}

// Find returns the first of the directories that contains all programs. The error lists what is
// missing where.
func Find(directories ...string) (string, error) {
	var missing []string
	for _, directory := range directories {
		var lacks []string
		for _, program := range programs {
			if _, err := os.Stat(filepath.Join(directory, program)); err != nil {
				lacks = append(lacks, program)
			}
		}

		if len(lacks) == 0 {
			return directory, nil
		}

		missing = append(missing, fmt.Sprintf("%s lacks %s", directory, strings.Join(lacks, ", ")))
	}

	return "", errors.New(strings.Join(missing, "; "))
}

// Start runs the programs in the directory assets until ctx ends, and returns once pods are
// scheduled. Data and logs (NAME.log) are in dir, which should be removed after
// [ControlPlane.Wait].
func Start(ctx context.Context, assets, dir string) (*ControlPlane, error) {
	c := &ControlPlane{}
	ctx, cancel := context.WithCancel(ctx)
	c.group, ctx = errgroup.WithContext(ctx)
	if err := c.start(ctx, assets, dir); err != nil {
		cancel()
		if ended := c.group.Wait(); ended != nil && !errors.Is(ended, context.Canceled) {
			return nil, ended // the reason
		}
		return nil, err
	}

	c.group.Go(func() error { // cancels the context at the end
		<-ctx.Done()
		cancel()
		return nil
	})

	return c, nil
}

// Wait waits until all programs have ended. It returns nil if ctx has ended, and otherwise an error
// that names the program that ended by itself.
func (c *ControlPlane) Wait() error { return c.group.Wait() }

func (c *ControlPlane) start(ctx context.Context, assets, dir string) error {
	ports, err := freePorts(5)
	if err != nil {
		return err
	}

	token, err := writeKeys(dir)
	if err != nil {
		return err
	}

	run := func(program string, args ...string) {
		c.group.Go(func() error {
			return process(ctx, filepath.Join(assets, program),
				filepath.Join(dir, program+".log"), args)
		})
	}

	run("etcd", etcdArgs(dir, ports)...)
	run("kube-apiserver", apiServerArgs(dir, ports)...)
	starting, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()

	host := fmt.Sprintf("https://127.0.0.1:%d", ports.apiServer)
	insecure := &rest.Config{Host: host, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	// nothing can be verified before the certificate exists
	if err := ready(starting, insecure, "/readyz"); err != nil {
		return fmt.Errorf("kube-apiserver: %w", err)
	}
	if err := c.identify(dir, host, token); err != nil {
		return err
	}

	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(kubeconfig, c.Kubeconfig, 0o600); err != nil {
		return err
	}

	run("kube-scheduler", schedulerArgs(kubeconfig, dir, ports.scheduler)...)
	run("kube-controller-manager",
		controllerManagerArgs(kubeconfig, dir, ports.controllerManager)...)

	for program, port := range map[string]int{
		"kube-scheduler": ports.scheduler, "kube-controller-manager": ports.controllerManager,
	} {
		at := &rest.Config{
			Host:            fmt.Sprintf("https://127.0.0.1:%d", port),
			TLSClientConfig: rest.TLSClientConfig{Insecure: true},
		}
		if err := ready(starting, at, "/healthz"); err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
	}

	return nil
}

// ports are ports of the loopback interface.
type ports struct{ etcd, etcdPeer, apiServer, scheduler, controllerManager int }

func freePorts(n int) (ports, error) {
	numbers := make([]int, n)
	for i := range numbers {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return ports{}, fmt.Errorf("find a free port: %w", err)
		}
		defer listener.Close() // only at the end, so that all ports differ
		numbers[i] = listener.Addr().(*net.TCPAddr).Port
	}

	return ports{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]}, nil
}

func etcdArgs(dir string, p ports) []string {
	client, peer := fmt.Sprintf("http://127.0.0.1:%d", p.etcd), fmt.Sprintf("http://127.0.0.1:%d",
		p.etcdPeer)
	return []string{
		"--data-dir=" + filepath.Join(dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls=" + client, "--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" +
			peer, "--initial-cluster=default=" + peer,
	}
}

func apiServerArgs(dir string, p ports) []string {
	return []string{
		fmt.Sprintf("--etcd-servers=http://127.0.0.1:%d", p.etcd),
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", p.apiServer),
		// no client looks it up in Service kubernetes
		"--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
		"--cert-dir=" + filepath.Join(dir, "certificates"), "--token-auth-file=" +
			filepath.Join(dir, "tokens"),
		"--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24",
		"--allow-privileged=true",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + filepath.Join(dir, "service-account.key"),
		"--service-account-signing-key-file=" + filepath.Join(dir, "service-account.key"),
		// pods would wait for controllers that do not run
		"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
		"--profiling=false",
	}
}

func schedulerArgs(kubeconfig, dir string, port int) []string {
	return []string{
		"--kubeconfig=" + kubeconfig, "--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", port), "--cert-dir=" +
			filepath.Join(dir, "scheduler"),
		"--leader-elect=false", "--profiling=false", "--kube-api-qps=1000", "--kube-api-burst=2000",
	}
}

func controllerManagerArgs(kubeconfig, dir string, port int) []string {
	return []string{
		"--kubeconfig=" + kubeconfig, "--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", port), "--cert-dir=" +
			filepath.Join(dir, "controller-manager"),
		"--controllers=resourceclaim-controller,device-taint-eviction-controller",
		"--leader-elect=false", "--profiling=false", "--kube-api-qps=1000", "--kube-api-burst=2000",
	}
}

// writeKeys writes the token files of the API server, and returns an administrator's token.
func writeKeys(dir string) (token string, err error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return "", err
	}

	private, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		return "", err
	}

	token = rand.Text()
	for name, content := range map[string][]byte{
		"service-account.key": private,
		"tokens":              []byte(token + `,xpuctl,xpuctl,"system:masters"` + "\n"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return "", err
		}
	}

	return token, nil
}

// identify creates the kubeconfig, with the certificate that the API server made for itself.
func (c *ControlPlane) identify(dir, host, token string) error {
	certificate, err := os.ReadFile(filepath.Join(dir, "certificates", "apiserver.crt"))
	if err != nil {
		return err
	}

	const name = "xpuctl"
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = &clientcmdapi.Cluster{
		Server: host, CertificateAuthorityData: certificate,
	}
	config.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: token}
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	config.CurrentContext = name
	if c.Kubeconfig, err = clientcmd.Write(*config); err != nil {
		return err
	}
	if c.Config, err = clientcmd.RESTConfigFromKubeConfig(c.Kubeconfig); err != nil {
		return err
	}

	c.Config.QPS = -1 // there are no other clients
	return nil
}

// ready waits until the server reports that it is ready.
func ready(ctx context.Context, config *rest.Config, path string) error {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}

	var last error
	err = wait.PollUntilContextCancel(ctx, pollPeriod,
		true, func(ctx context.Context) (bool, error) {
			last = get(ctx, client, config.Host+path)
			return last == nil, nil
		})

	if err != nil {
		return fmt.Errorf("%w: %w", err, last)
	}

	return nil
}
