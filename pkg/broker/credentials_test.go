// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"net/url"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clientcmdv1 "k8s.io/client-go/tools/clientcmd/api/v1"
	inventory "sigs.k8s.io/cluster-inventory-api/apis/v1alpha1"
	"sigs.k8s.io/cluster-inventory-api/pkg/access"
)

// kubeconfigWith returns a kubeconfig with the given fields of its cluster and its user.
func kubeconfigWith(cluster, user string) []byte {
	return []byte(`{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":` +
		`{"cluster":"c","user":"u","namespace":"xpu-system"}}],"clusters":[{"name":"c","cluster":{` + cluster + `}}],` +
		`"users":[{"name":"u","user":{` + user + `}}]}`)
}

const (
	goodServer = `"server":"https://10.0.0.1:6443"`
	goodUser   = `"token":"s3cr3t-token"`
)

// TestKubeconfigOfMember checks that a kubeconfig is used as it says, and that an error names each
// forbidden field and what to use instead.
func TestKubeconfigOfMember(t *testing.T) {
	config, namespace, err := clientConfig(kubeconfigWith(goodServer+`,"tls-server-name":"api"`,
		goodUser))
	if err != nil || config.Host != "https://10.0.0.1:6443" || namespace != "xpu-system" ||
		config.BearerToken != "s3cr3t-token" {
		t.Errorf("config %v, namespace %q, error %v", config, namespace, err)
	}

	for name, test := range map[string]struct{ cluster, user, want string }{
		"http": {
			`"server":"http://10.0.0.1:8080"`, goodUser,
			`cluster "c": server: "http://10.0.0.1:8080" is no URL that begins with https://`,
		},
		"no scheme": {`"server":"10.0.0.1:6443"`, goodUser, `begins with https://`},
		"no server": {``, goodUser, `begins with https://`},
		"user in the server": {
			`"server":"https://u:p@10.0.0.1"`, goodUser, `write https://host:port`,
		},
		"proxy": {
			goodServer + `,"proxy-url":"http://10.0.0.2"`, goodUser,
			`cluster "c": proxy-url may not be used; leave it out`,
		},
		"no verification": {goodServer + `,"insecure-skip-tls-verify":true`, goodUser,
			`use certificate-authority-data`},
		"authority's file": {goodServer + `,"certificate-authority":"/etc/ca"`, goodUser,
			`use certificate-authority-data`},
		"program": {
			goodServer,
			`"exec":{"apiVersion":"client.authentication.k8s.io/v1","command":"/bin/sh"}`,
			`user "u": exec may not be used; use token`,
		},
		"auth provider": {
			goodServer, `"auth-provider":{"name":"oidc"}`,
			`auth-provider may not be used; use token`,
		},
		"token's file": {
			goodServer, `"tokenFile":"/var/run/token"`, `tokenFile may not be used; use token`,
		},
		"certificate's file": {
			goodServer, `"client-certificate":"/x"`, `use client-certificate-data`,
		},
		"key's file": {goodServer, `"client-key":"/x"`, `use client-key-data`},
		"password": {
			goodServer, `"username":"u","password":"s3cr3t-token"`,
			`username may not be used; use token`,
		},
		"only a password": {
			goodServer, `"password":"s3cr3t-token"`, `password may not be used; use token`,
		},
		"impersonation": {
			goodServer, goodUser + `,"as":"admin"`,
			`as may not be used; leave it out, and use credentials of the ServiceAccount`,
		},
		"impersonated UID": {
			goodServer, goodUser + `,"as-uid":"1"`, `as-uid may not be used; leave it out`,
		},
		"impersonated groups": {
			goodServer, goodUser + `,"as-groups":["system:masters"]`,
			`as-groups may not be used; leave it out`,
		},
		"impersonated extra": {
			goodServer, goodUser + `,"as-user-extra":{"a":["b"]}`,
			`as-user-extra may not be used; leave it out`,
		},
		"authority that is no": {goodServer + `,"certificate-authority-data":"!"`, goodUser, ``},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := clientConfig(kubeconfigWith(test.cluster, test.user))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("error %v, want %q", err, test.want)
			}
			if strings.Contains(err.Error(), "s3cr3t") {
				t.Errorf("the error has a secret: %v", err)
			}
		})
	}

	for name, content := range map[string]string{
		"empty": "", "no context": `{"apiVersion":"v1","kind":"Config"}`,
		"context of no cluster": strings.Replace(string(kubeconfigWith(goodServer, goodUser)),
			`"cluster":"c","user"`, `"cluster":"d","user"`, 1),
		"context of no user": strings.Replace(string(kubeconfigWith(goodServer, goodUser)),
			`"user":"u","namespace"`, `"user":"v","namespace"`, 1),
		"no namespace's name": strings.Replace(string(kubeconfigWith(goodServer, goodUser)),
			`"xpu-system"`, `"../secrets"`, 1),
	} {
		if _, _, err := clientConfig([]byte(content)); err == nil {
			t.Errorf("%s: it is taken", name)
		}
	}
}

// TestServerOfClusterProfile checks that the rules for a kubeconfig's server apply to a
// ClusterProfile too, and that the arguments of one profile are not passed on to the next.
func TestServerOfClusterProfile(t *testing.T) {
	programs := access.New([]access.Provider{{
		Name: "file", ProfileSourcedCLIArgsPolicy: access.ProfileSourcedCLIArgsPolicyAppend,
		ExecConfig: &clientcmdapi.ExecConfig{
			APIVersion: "client.authentication.k8s.io/v1", Command: "/bin/cat",
			Args: []string{"token"},
		},
	}})

	profile := func(server clientcmdv1.Cluster) *inventory.ClusterProfile {
		p := &inventory.ClusterProfile{}
		p.Status.AccessProviders = []inventory.AccessProvider{{Name: "file", Cluster: server}}
		return p
	}

	for name, server := range map[string]clientcmdv1.Cluster{
		"http":                     {Server: "http://10.0.0.1"},
		"proxy-url":                {Server: "https://10.0.0.1", ProxyURL: "http://10.0.0.2"},
		"insecure-skip-tls-verify": {Server: "https://10.0.0.1", InsecureSkipTLSVerify: true},
		"certificate-authority":    {Server: "https://10.0.0.1", CertificateAuthority: "/etc/ca"},
	} {
		if _, err := profileConfig(programs, profile(server)); err == nil ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}

	for range 2 {
		config, err := profileConfig(programs,
			profile(clientcmdv1.Cluster{Server: "https://10.0.0.1",
				Extensions: []clientcmdv1.NamedExtension{{
					Name:      "clusterprofiles.multicluster.x-k8s.io/exec/additional-args",
					Extension: runtime.RawExtension{Raw: []byte(`["--of=a"]`)},
				}}}))

		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(config.ExecProvider.Args, " "); got != "token --of=a" {
			t.Errorf("the program gets %q", got)
		}
	}
}

// FuzzClientConfig looks for a kubeconfig that makes the broker run a program, read a file,
// impersonate another user, or talk to a server without verifying it.
func FuzzClientConfig(f *testing.F) {
	f.Add(kubeconfigWith(goodServer, goodUser))
	f.Add(kubeconfigWith(`"server":"http://10.0.0.1"`, goodUser))
	f.Add(kubeconfigWith(goodServer+`,"proxy-url":"http://10.0.0.2"`, `"as":"admin"`))
	f.Add([]byte("apiVersion: v1\nkind: Config\nclusters: &a [*a]\n"))
	f.Add([]byte("current-context: \xff\n"))

	f.Fuzz(func(t *testing.T, content []byte) {
		config, namespace, err := clientConfig(content)
		if err != nil {
			if text := err.Error(); len(text) > 2*maxText {
				t.Errorf("an error of %d bytes", len(text))
			}
			return
		}

		at, err := url.Parse(config.Host)
		if err != nil || at.Scheme != "https" || at.Host == "" || at.User != nil {
			t.Errorf("server %q", config.Host)
		}

		if config.Proxy != nil || config.Insecure || config.CAFile != "" || config.CertFile != "" ||
			config.KeyFile != "" ||
			config.BearerTokenFile != "" || config.ExecProvider != nil ||
			config.AuthProvider != nil || config.Username != "" ||
			config.Password != "" || config.Impersonate.UserName != "" ||
			len(config.Impersonate.Groups) > 0 {
			t.Errorf("config %+v", config)
		}

		if strings.ContainsAny(namespace, "/.") {
			t.Errorf("namespace %q", namespace)
		}
	})
}

// FuzzCut looks for a text that stays too long or contains control characters.
func FuzzCut(f *testing.F) {
	f.Add("x", 10)
	f.Add(strings.Repeat("\xff", 2000), 1024)
	f.Add(strings.Repeat("\u20ac", 500)+"\x1b[2J", 1024)

	f.Fuzz(func(t *testing.T, text string, most int) {
		most = 16 + max(most, -most, 0)%4096
		got := cutTo(text, most)
		if len(got) > most || strings.ContainsAny(got, "\x00\x1b\n\r\u202e\u0085") ||
			strings.ToValidUTF8(got, "") != got {
			t.Errorf("%d bytes at most of %q are %q", most, text, got)
		}
		if cutTo(got, most) != got {
			t.Errorf("%q is cut again: %q", got, cutTo(got, most))
		}
	})
}
