// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	inventory "sigs.k8s.io/cluster-inventory-api/apis/v1alpha1"
	"sigs.k8s.io/cluster-inventory-api/pkg/access"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/multicluster-runtime/providers/kubeconfig"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// credentials are the means to reach a tenant's cluster.
type credentials struct {
	origin  string // for messages: "Secret xpu-tenants/a"
	content []byte // changes whenever the connection must be made again
	// config also returns the namespace of the Lease, or "" for the default.
	config func() (*rest.Config, string, error)
}

// credentialsFor returns the credentials of a tenant's cluster. If the tenant has none, problem
// says what is missing.
func (m *Members) credentialsFor(
	ctx context.Context, tenant *v1alpha1.XPUTenant,
) (_ credentials, problem string, err error) {
	if name := tenant.Spec.Member.ClusterProfile; name != "" {
		return m.profileCredentials(ctx, client.ObjectKey{Namespace: m.Namespace, Name: name})
	}

	key := client.ObjectKey{Namespace: m.Namespace, Name: tenant.Spec.Member.SecretName}
	var secret corev1.Secret
	exists, err := getIfExists(ctx, m.infra, key, &secret)
	if err != nil {
		return credentials{}, "", err
	}

	content := secret.Data[kubeconfig.DefaultKubeconfigSecretKey]
	if !exists || len(content) == 0 {
		return credentials{}, fmt.Sprintf("there is no Secret %s with a kubeconfig in its key %s "+
				"and the label %s: \"true\"; create it",
				key, kubeconfig.DefaultKubeconfigSecretKey,
				kubeconfig.DefaultKubeconfigSecretLabel),
			nil
	}

	return credentials{
		origin: "the kubeconfig of Secret " + key.String(), content: content,
		config: func() (*rest.Config, string, error) { return clientConfig(content) },
	}, "", nil
}

// profileCredentials returns the credentials of a ClusterProfile. A program named on the broker's
// command line provides them (KEP-5339).
func (m *Members) profileCredentials(
	ctx context.Context, key client.ObjectKey,
) (_ credentials, problem string, err error) {
	if m.ProfileAccess == nil {
		return credentials{}, "the broker was started without --clusterprofile-provider-file, so " +
			"that it can use no ClusterProfiles", nil
	}

	var profile inventory.ClusterProfile
	exists, err := getIfExists(ctx, m.infra, key, &profile)
	if err != nil {
		return credentials{}, "", err
	}
	if !exists {
		return credentials{},
			fmt.Sprintf("there is no ClusterProfile %s; create it, or name another one", key), nil
	}

	content, err := json.Marshal([]any{
		profile.Status.CredentialProviders, profile.Status.AccessProviders,
	})
	return credentials{
		origin: "ClusterProfile " + key.String(), content: content,
		config: func() (*rest.Config, string, error) {
			config, err := profileConfig(m.ProfileAccess, &profile)
			return config, "", err
		},
	}, "", err
}

// profileConfig builds a client configuration from a ClusterProfile. Only the given programs are
// run.
func profileConfig(
	programs *access.Config, profile *inventory.ClusterProfile,
) (*rest.Config, error) {
	for _, provider := range slices.Concat(profile.Status.CredentialProviders,
		profile.Status.AccessProviders) {
		server := provider.Cluster
		err := checkServer(server.Server, server.ProxyURL, server.CertificateAuthority,
			server.InsecureSkipTLSVerify)
		if err != nil {
			return nil, fmt.Errorf("access provider %q: %w", cutName(provider.Name), err)
		}
	}

	// BuildConfigFromCP appends the profile's arguments to the arguments of the provider, so each
	// profile gets a copy of its own.
	own := access.New(slices.Clone(programs.Providers))
	for i := range own.Providers {
		own.Providers[i].ExecConfig = own.Providers[i].ExecConfig.DeepCopy()
	}

	return own.BuildConfigFromCP(profile)
}

// clientConfig returns the client configuration and the namespace of a kubeconfig's current
// context.
//
// It rejects a kubeconfig that makes the broker run programs or read files, because anyone who may
// write the Secret could then do so. It also rejects proxies, redirection and servers whose
// identity TLS does not prove.
func clientConfig(content []byte) (*rest.Config, string, error) {
	raw, err := clientcmd.Load(bytes.Clone(content))
	if err != nil {
		return nil, "", brief(err)
	}

	for _, name := range slices.Sorted(maps.Keys(raw.AuthInfos)) {
		if err := checkUser(raw.AuthInfos[name]); err != nil {
			return nil, "", fmt.Errorf("user %q: %w", cutName(name), err)
		}
	}

	for _, name := range slices.Sorted(maps.Keys(raw.Clusters)) {
		server := raw.Clusters[name]
		err := checkServer(server.Server, server.ProxyURL, server.CertificateAuthority,
			server.InsecureSkipTLSVerify)
		if err != nil {
			return nil, "", fmt.Errorf("cluster %q: %w", cutName(name), err)
		}
	}

	config, err := clientcmd.NewNonInteractiveClientConfig(*raw, raw.CurrentContext,
		&clientcmd.ConfigOverrides{}, nil).ClientConfig()
	if err != nil {
		return nil, "", brief(err)
	}

	at := raw.Contexts[raw.CurrentContext]
	if at == nil || raw.Clusters[at.Cluster] == nil || raw.AuthInfos[at.AuthInfo] == nil {
		return nil, "", errors.New("current-context: it must name a context, and that a cluster " +
			"and a user which are there")
	}

	if problems := validation.IsDNS1123Label(at.Namespace); at.Namespace != "" &&
		len(problems) > 0 {
		return nil, "", fmt.Errorf("context %q: namespace %q is no name of a namespace",
			cutName(raw.CurrentContext), cutName(at.Namespace))
	}

	return config, at.Namespace, nil
}

// checkUser accepts only credentials inside the kubeconfig: a token or a certificate.
func checkUser(user *clientcmdapi.AuthInfo) error {
	const own = "use token, or client-certificate-data with client-key-data"
	for _, field := range []struct {
		name    string
		present bool
		instead string
	}{
		{"exec", user.Exec != nil, own},
		{"auth-provider", user.AuthProvider != nil, own},
		{"tokenFile", user.TokenFile != "", "use token: the broker reads no files for a tenant"},
		{"client-certificate", user.ClientCertificate != "",
			"use client-certificate-data: the broker reads no files for a tenant"},
		{"client-key", user.ClientKey != "",
			"use client-key-data: the broker reads no files for a tenant"},
		{"username", user.Username != "", own},
		{"password", user.Password != "", own},
		{"as", user.Impersonate != "", "leave it out, and use credentials of the ServiceAccount " +
			"xpu-broker itself"},
		{"as-uid", user.ImpersonateUID != "", "leave it out"},
		{"as-groups", len(user.ImpersonateGroups) > 0, "leave it out"},
		{"as-user-extra", len(user.ImpersonateUserExtra) > 0, "leave it out"},
	} {
		if field.present {
			return fmt.Errorf("%s may not be used; %s", field.name, field.instead)
		}
	}

	return nil
}

// checkServer accepts only a server that is reached directly and whose identity TLS proves.
func checkServer(server, proxy, authority string, insecure bool) error {
	at, err := url.Parse(server)
	switch {
	case proxy != "":
		return errors.New("proxy-url may not be used; leave it out, and have the broker reach " +
			"the server directly")
	case insecure:
		return errors.New("insecure-skip-tls-verify may not be used, because whoever is in " +
			"between would get the token; use " +
			"certificate-authority-data")
	case authority != "":
		return errors.New("certificate-authority may not be used: the broker reads no files for " +
			"a tenant; use certificate-authority-data")
	case err != nil || at.Host == "" || at.Scheme != "https":
		return fmt.Errorf("server: %q is no URL that begins with https://, and without TLS the "+
			"token can be read on the way", cutName(server))
	case at.User != nil || at.RawQuery != "" || at.Fragment != "":
		return errors.New("server: it may not have a user, a query or a fragment; write " +
			"https://host:port")
	}

	return nil
}
