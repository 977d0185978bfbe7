// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"net"
	"os"
	"path/filepath"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/component"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/network"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/pki"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

// inside is the API server's URL in the cluster's network namespace and on its nodes.
const inside = "https://" + network.Gateway + ":443"

// issue issues the identities of the control plane and the administrator. api is the API server's
// URL on the machine.
func issue(dir state.Dir, authority *pki.Authority, cluster, api string) error {
	if err := writeAuthority(dir.PKI(), authority); err != nil {
		return err
	}

	requests := map[string]pki.Request{
		"apiserver": {
			CommonName: "kube-apiserver",
			Addresses:  parseIPs("127.0.0.1", network.Gateway, network.ServiceAddress),
			Names: []string{
				"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
				"kubernetes.default.svc.cluster.local",
			},
		},
		"kubelet-client": {
			CommonName: "kube-apiserver-kubelet-client", Organizations: []string{"system:masters"},
		},
		"front-proxy-client": {CommonName: "front-proxy-client"},
	}

	for name, request := range requests {
		identity, err := authority.Issue(request)
		if err != nil {
			return err
		}
		if err := identity.Write(dir.PKI(), name); err != nil {
			return err
		}
	}

	return errors.Join(
		writeKubeconfig(filepath.Join(dir.PKI(), "kube-controller-manager.kubeconfig"), authority,
			cluster, inside,
			pki.Request{CommonName: "system:kube-controller-manager"}),
		writeKubeconfig(filepath.Join(dir.PKI(), "kube-scheduler.kubeconfig"), authority,
			cluster, inside,
			pki.Request{CommonName: "system:kube-scheduler"}),
		writeKubeconfig(filepath.Join(dir.PKI(), "supervisor.kubeconfig"), authority,
			cluster, inside,
			pki.Request{CommonName: "devcluster", Organizations: []string{"system:masters"}}),
		writeKubeconfig(dir.Kubeconfig(), authority, cluster, api,
			pki.Request{CommonName: "admin", Organizations: []string{"system:masters"}}),
	)
}

func writeAuthority(dir string, authority *pki.Authority) error {
	key, err := authority.Key()
	if err != nil {
		return err
	}

	private, public, err := pki.SigningKey()
	if err != nil {
		return err
	}

	for name, content := range map[string][]byte{
		"ca.crt":              authority.Certificate(),
		"ca.key":              key,
		"service-account.key": private,
		"service-account.pub": public,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return err
		}
	}

	return nil
}

// issueNode issues the identities of a node: the kubelet's as client and server, and those of
// Multus and kube-proxy.
func issueNode(dir state.NodeDir, authority *pki.Authority, cluster, node, address string) error {
	if err := os.MkdirAll(dir.PKI(), 0o700); err != nil {
		return err
	}

	request := pki.Request{
		CommonName:    "system:node:" + node,
		Organizations: []string{"system:nodes"},
		Addresses:     parseIPs("127.0.0.1", address),
		Names:         []string{node},
	}

	identity, err := authority.Issue(request)
	if err != nil {
		return err
	}

	kubeconfig, err := authority.Kubeconfig(cluster, inside, identity)
	if err != nil {
		return err
	}

	return errors.Join(
		identity.Write(dir.PKI(), "kubelet"),
		os.WriteFile(filepath.Join(dir.PKI(), "ca.crt"), authority.Certificate(), 0o600),
		os.WriteFile(filepath.Join(dir.PKI(), "kubelet.kubeconfig"), kubeconfig, 0o600),
		writeKubeconfig(filepath.Join(dir.PKI(), "multus.kubeconfig"), authority, cluster, inside,
			pki.Request{CommonName: component.MultusUser}),
		writeKubeconfig(filepath.Join(dir.PKI(), "kube-proxy.kubeconfig"), authority, cluster,
			inside, pki.Request{CommonName: "system:kube-proxy"}),
	)
}

func writeKubeconfig(
	path string, authority *pki.Authority, cluster, server string, request pki.Request,
) error {
	identity, err := authority.Issue(request)
	if err != nil {
		return err
	}

	content, err := authority.Kubeconfig(cluster, server, identity)
	if err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}

func parseIPs(addresses ...string) []net.IP {
	var ips []net.IP
	for _, a := range addresses {
		ips = append(ips, net.ParseIP(a))
	}
	return ips
}
