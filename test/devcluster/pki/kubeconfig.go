// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"fmt"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Kubeconfig returns a self-contained kubeconfig, which works wherever it is copied to. server is
// the URL of the API server; cluster is the name that kubectl shows.
func (a *Authority) Kubeconfig(cluster, server string, identity Identity) ([]byte, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters[cluster] = &clientcmdapi.Cluster{
		Server: server, CertificateAuthorityData: a.Certificate(),
	}
	config.AuthInfos[cluster] = &clientcmdapi.AuthInfo{
		ClientCertificateData: identity.Certificate, ClientKeyData: identity.Key,
	}
	config.Contexts[cluster] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: cluster}
	config.CurrentContext = cluster
	content, err := clientcmd.Write(*config)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", cluster, err)
	}

	return content, nil
}
