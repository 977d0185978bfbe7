// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientauthenticationv1 "k8s.io/client-go/pkg/apis/clientauthentication/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clientcmdv1 "k8s.io/client-go/tools/clientcmd/api/v1"
	"k8s.io/utils/ptr"
	inventory "sigs.k8s.io/cluster-inventory-api/apis/v1alpha1"
	"sigs.k8s.io/cluster-inventory-api/pkg/access"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestClusterProfile checks a member named by a ClusterProfile, with a token from a program.
func TestClusterProfile(t *testing.T) {
	w := newWorld(t)
	w.stopBroker()

	_, err := envtest.InstallCRDs(w.infra.Config,
		envtest.CRDInstallOptions{CRDs: []*apiextensionsv1.CustomResourceDefinition{{
			ObjectMeta: metav1.ObjectMeta{Name: "clusterprofiles.multicluster.x-k8s.io",
				Annotations: map[string]string{
					"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/cluster-inventory-api",
				}},
			Spec: apiextensionsv1.CustomResourceDefinitionSpec{
				Group: "multicluster.x-k8s.io", Scope: apiextensionsv1.NamespaceScoped,
				Names: apiextensionsv1.CustomResourceDefinitionNames{
					Plural: "clusterprofiles", Singular: "clusterprofile", Kind: "ClusterProfile",
					ListKind: "ClusterProfileList",
				},
				Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
					Name: "v1alpha1", Served: true, Storage: true,
					Subresources: &apiextensionsv1.CustomResourceSubresources{
						Status: &apiextensionsv1.CustomResourceSubresourceStatus{},
					},
					Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
						Type: "object", XPreserveUnknownFields: ptr.To(true),
					}},
				}},
			},
		}}})

	if err != nil {
		t.Fatal(err)
	}

	admin, err := client.New(w.infra.Config, client.Options{Scheme: brokerScheme(t)})
	if err != nil {
		t.Fatal(err)
	}

	profile := &inventory.ClusterProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenantsNamespace, Name: "a"},
		Spec: inventory.ClusterProfileSpec{
			ClusterManager: inventory.ClusterManager{Name: "us"},
		},
	}

	if err := admin.Create(t.Context(), profile); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = admin.Delete(t.Context(), profile) })

	profile.Status.AccessProviders = []inventory.AccessProvider{{
		Name: "file", Cluster: clientcmdv1.Cluster{
			Server: w.a.Config.Host, CertificateAuthorityData: w.a.Config.CAData,
		},
	}}

	if err := admin.Status().Update(t.Context(), profile); err != nil {
		t.Fatal(err)
	}

	rights, err := w.a.configFor(t.Context(), systemNamespace, "xpu-broker")
	if err != nil {
		t.Fatal(err)
	}

	token, err := json.Marshal(&clientauthenticationv1.ExecCredential{
		TypeMeta: metav1.TypeMeta{
			APIVersion: "client.authentication.k8s.io/v1", Kind: "ExecCredential",
		},
		Status: &clientauthenticationv1.ExecCredentialStatus{Token: rights.BearerToken},
	})

	if err != nil {
		t.Fatal(err)
	}

	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, token, 0o600); err != nil {
		t.Fatal(err)
	}

	tenant := w.joins(w.a, func(spec *v1alpha1.XPUTenantSpec) {
		spec.Member = v1alpha1.TenantMember{ClusterProfile: "a"}
	})
	t.Run("without a program", func(t *testing.T) {
		stop := w.infra.startBroker("infra-1", nil)
		defer stop()
		w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonMemberNotFound)
	})

	w.infra.startBrokerWith(Options{Identity: "infra-1",
		ProfileAccess: access.New([]access.Provider{{
			Name: "file", ExecConfig: &clientcmdapi.ExecConfig{
				APIVersion: "client.authentication.k8s.io/v1", Command: "/bin/cat",
				Args: []string{path},
			},
		}})}, nil)

	w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonConnected)
	w.infra.tenantIs(tenant, v1alpha1.ConditionSynced, v1alpha1.ReasonSynced)
}
