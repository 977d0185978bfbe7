// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/qemu/initramfs"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// assets is the directory of the API server's programs, unless KUBEBUILDER_ASSETS names another
// one.
const assets = "bin/kubernetes"

// startAPIServer starts an API server for one guest, with the objects of deploy/.
func startAPIServer() (*kubeapitest.Cluster, error) {
	const variable = "KUBEBUILDER_ASSETS"
	if os.Getenv(variable) == "" {
		if err := os.Setenv(variable, assets); err != nil {
			return nil, err
		}
	}

	if _, err := os.Stat(filepath.Join(os.Getenv(variable), "kube-apiserver")); err != nil {
		return nil, fmt.Errorf("the API server that suites need: %w: make test-qemu builds it", err)
	}

	return kubeapitest.Start("deploy")
}

// addKubeconfigs adds the kubeconfigs by which the guest's programs reach the API server.
func addKubeconfigs(a *initramfs.Archive, c *kubeapitest.Cluster) error {
	for path, config := range map[string]*rest.Config{
		plan.AdminKubeconfig: c.Admin(), plan.AgentKubeconfig: c.Agent(plan.NodeName),
	} {
		content, err := clientcmd.Write(*kubeconfig(config))
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		a.File(path, content, 0o600)
	}
	return nil
}

// kubeconfig returns the kubeconfig for a guest with the meaning of config.
func kubeconfig(config *rest.Config) *clientcmdapi.Config {
	const name = "host"
	out := clientcmdapi.NewConfig()
	out.Clusters[name] = &clientcmdapi.Cluster{
		Server: "https://" + plan.APIAddress, TLSServerName: plan.APIServerName,
		CertificateAuthorityData: config.CAData,
	}

	out.AuthInfos[name] = &clientcmdapi.AuthInfo{
		ClientCertificateData: config.CertData, ClientKeyData: config.KeyData,
		Impersonate: config.Impersonate.UserName, ImpersonateGroups: config.Impersonate.Groups,
		ImpersonateUserExtra: config.Impersonate.Extra,
	}

	out.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	out.CurrentContext = name
	return out
}

// pipe is the argument with which QEMU runs this program for each connection of a guest to the API
// server.
const pipe = "pipe"

// forward returns the command line for pipe.
func forward(config *rest.Config) ([]string, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}

	server, err := url.Parse(config.Host)
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	return []string{program, pipe, server.Host}, nil
}

// runPipe copies between a connection to the address and the standard input and output, until the
// server ends the connection.
func runPipe(ctx context.Context, address string) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()

	go func() {
		_, _ = io.Copy(conn, os.Stdin)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()

	_, err = io.Copy(os.Stdout, conn)
	return err
}
