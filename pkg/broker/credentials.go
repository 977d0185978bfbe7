package broker

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	inventory "sigs.k8s.io/cluster-inventory-api/apis/v1alpha1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/multicluster-runtime/providers/kubeconfig"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// credentials are how a tenant's cluster is reached.
type credentials struct {
	origin  string // for messages: "Secret xpu-tenants/a"
	content []byte // which changes with everything that a connection depends on
	// config returns also the namespace of the Lease, "" for the default.
	config func() (*rest.Config, string, error)
}

// credentials returns those of a tenant's cluster, or says why there are none.
func (m *Members) credentials(ctx context.Context, tenant *v1alpha1.XPUTenant) (_ credentials, problem string, err error) {
	if name := tenant.Spec.Member.ClusterProfile; name != "" {
		return m.ofProfile(ctx, client.ObjectKey{Namespace: m.Namespace, Name: name})
	}
	key := client.ObjectKey{Namespace: m.Namespace, Name: tenant.Spec.Member.SecretName}
	var secret corev1.Secret
	exists, err := found(ctx, m.infra, key, &secret)
	if err != nil {
		return credentials{}, "", err
	}
	content := secret.Data[kubeconfig.DefaultKubeconfigSecretKey]
	if !exists || len(content) == 0 {
		return credentials{}, fmt.Sprintf("there is no Secret %s with a kubeconfig in its key %s and the label %s: \"true\"; create it",
			key, kubeconfig.DefaultKubeconfigSecretKey, kubeconfig.DefaultKubeconfigSecretLabel), nil
	}
	return credentials{
		origin: "the kubeconfig of Secret " + key.String(), content: content,
		config: func() (*rest.Config, string, error) { return clientConfig(content) },
	}, "", nil
}

// ofProfile returns those of a ClusterProfile, which a program gives that the broker's command line names (KEP-5339).
func (m *Members) ofProfile(ctx context.Context, key client.ObjectKey) (_ credentials, problem string, err error) {
	if m.ProfileAccess == nil {
		return credentials{}, "the broker was started without --clusterprofile-provider-file, so that it can use no ClusterProfiles", nil
	}
	var profile inventory.ClusterProfile
	exists, err := found(ctx, m.infra, key, &profile)
	if err != nil {
		return credentials{}, "", err
	}
	if !exists {
		return credentials{}, fmt.Sprintf("there is no ClusterProfile %s; create it, or name another one", key), nil
	}
	content, err := json.Marshal(profile.Status.AccessProviders)
	return credentials{
		origin: "ClusterProfile " + key.String(), content: content,
		config: func() (*rest.Config, string, error) {
			config, err := m.ProfileAccess.BuildConfigFromCP(&profile)
			return config, "", err
		},
	}, "", err
}

// clientConfig is what a kubeconfig says, with the namespace of its context. It must not have this process run programs or read its files:
// whoever may write a Secret could do so.
func clientConfig(content []byte) (*rest.Config, string, error) {
	loaded, err := clientcmd.NewClientConfigFromBytes(bytes.Clone(content))
	if err != nil {
		return nil, "", err
	}
	raw, err := loaded.RawConfig()
	if err != nil {
		return nil, "", err
	}
	for name, user := range raw.AuthInfos {
		if user.Exec != nil || user.AuthProvider != nil || user.TokenFile != "" || user.ClientCertificate != "" || user.ClientKey != "" {
			return nil, "", fmt.Errorf("user %q: only token, client-certificate-data and client-key-data may be used", name)
		}
	}
	for name, server := range raw.Clusters {
		if server.CertificateAuthority != "" {
			return nil, "", fmt.Errorf("cluster %q: use certificate-authority-data in place of certificate-authority", name)
		}
	}
	config, err := loaded.ClientConfig()
	if err != nil {
		return nil, "", err
	}
	namespace := ""
	if at := raw.Contexts[raw.CurrentContext]; at != nil {
		namespace = at.Namespace
	}
	return config, namespace, nil
}
