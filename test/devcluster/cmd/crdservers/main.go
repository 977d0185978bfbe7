// SPDX-License-Identifier: Apache-2.0

// Command crdservers runs many API servers in one process. Each is an API server of
// CustomResourceDefinitions with Leases, stores its objects below a separate prefix in one etcd,
// and authorizes everything. They replace hundreds of complete clusters, which would not fit on one
// machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	"k8s.io/apiextensions-apiserver/pkg/cmd/server/options"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/request/anonymous"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/util/compatibility"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	openapi "k8s.io/kubernetes/pkg/generated/openapi"
	coordinationrest "k8s.io/kubernetes/pkg/registry/coordination/rest"
	"sigs.k8s.io/yaml"
)

// servers are the options of the command.
type servers struct {
	etcd  string
	crds  string
	out   string
	count int

	definitions       []*apiextensionsv1.CustomResourceDefinition
	certFile, keyFile string
	certificate       []byte
}

func main() {
	o := &servers{}
	cmd := &cobra.Command{
		Use:   "crdservers",
		Short: "Run many API servers of CustomResourceDefinitions in one process",
		Long: `crdservers runs API servers that have CustomResourceDefinitions and Leases and nothing else, on 127.0.0.1. For each it writes a
kubeconfig, 0.kubeconfig and so on, into a directory, and the file "ready" there once all of them serve the kinds. Anybody may do anything.`,
		Example: "  crdservers --etcd=http://127.0.0.1:2379 --count=200 --crds=deploy/crds " +
			"--out=/tmp/tenants",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return o.run(ctx)
		},
	}

	cmd.Flags().StringVar(&o.etcd, "etcd", "", "URL of an etcd")
	cmd.Flags().IntVar(&o.count, "count", 1, "how many servers")
	cmd.Flags().StringVar(&o.crds, "crds",
		"", "directory of CustomResourceDefinitions, in files *.yaml")
	cmd.Flags().StringVar(&o.out, "out", "", "directory for the kubeconfigs")

	for _, name := range []string{"etcd", "crds", "out"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flag is defined above
		}
	}

	os.Exit(cli.Run(cmd))
}

func (o *servers) run(ctx context.Context) error {
	if err := o.readCRDs(); err != nil {
		return err
	}
	if err := o.makeCertificate(); err != nil {
		return err
	}

	group, ctx := errgroup.WithContext(ctx)
	var starting errgroup.Group
	starting.SetLimit(32) // starting is mostly waiting

	for i := range o.count {
		server, err := o.newServer(i)
		if err != nil {
			return fmt.Errorf("server %d: %w", i, err)
		}

		group.Go(func() error { return server.GenericAPIServer.PrepareRun().RunWithContext(ctx) })
		starting.Go(func() error {
			if err := o.install(ctx, server); err != nil {
				return fmt.Errorf("server %d: %w", i, err)
			}
			return o.writeKubeconfig(i, server)
		})
	}

	if err := starting.Wait(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.out, "ready"), nil, 0o600); err != nil {
		return err
	}

	return group.Wait()
}

func (o *servers) readCRDs() error {
	files, err := filepath.Glob(filepath.Join(o.crds, "*.yaml"))
	if err != nil {
		return err
	}

	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}

		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.Unmarshal(text, crd); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}

		if crd.Kind == "CustomResourceDefinition" {
			o.definitions = append(o.definitions, crd)
		}
	}

	if len(o.definitions) == 0 {
		return fmt.Errorf("--crds=%s: there are none", o.crds)
	}

	return nil
}

// makeCertificate creates one certificate for all servers.
func (o *servers) makeCertificate() (err error) {
	certificate, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1",
		[]net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		return err
	}

	o.certificate, o.certFile, o.keyFile = certificate, filepath.Join(o.out,
		"tls.crt"), filepath.Join(o.out, "tls.key")
	return errors.Join(os.WriteFile(o.certFile, certificate, 0o600),
		os.WriteFile(o.keyFile, key, 0o600))
}

// noServices resolves services for webhooks, of which there are none.
type noServices struct{}

func (noServices) ResolveEndpoint(namespace, name string, _ int32) (*url.URL, error) {
	return nil, fmt.Errorf("Service %s/%s: there are no Services", namespace, name)
}

func (o *servers) newServer(i int) (*apiserver.CustomResourceDefinitions, error) {
	config := genericapiserver.NewRecommendedConfig(apiserver.Codecs)
	config.EffectiveVersion = compatibility.DefaultBuildEffectiveVersion()
	config.Authentication.Authenticator = anonymous.NewAuthenticator(nil)
	config.Authorization.Authorizer = authorizerfactory.NewAlwaysAllowAuthorizer()
	config.MaxRequestsInFlight, config.MaxMutatingRequestsInFlight = 0, 0
	namer := openapinamer.NewDefinitionNamer(apiserver.Scheme, legacyscheme.Scheme)
	// needed to install an API group
	config.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(openapi.GetOpenAPIDefinitions,
		namer)
	config.SkipOpenAPIInstallation = true
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}

	serving := genericoptions.NewSecureServingOptions().WithLoopback()
	serving.Listener, serving.BindAddress = listener, net.IPv4(127, 0, 0, 1)
	serving.BindPort = listener.Addr().(*net.TCPAddr).Port
	serving.ServerCert.CertKey = genericoptions.CertKey{CertFile: o.certFile, KeyFile: o.keyFile}
	if err := serving.ApplyTo(&config.SecureServing, &config.LoopbackClientConfig); err != nil {
		return nil, err
	}

	config.ExternalAddress = listener.Addr().String()

	storage := storagebackend.NewDefaultConfig(fmt.Sprintf("/%d", i),
		apiserver.Codecs.LegacyCodec(apiextensionsv1.SchemeGroupVersion))
	storage.Transport.ServerList = []string{o.etcd}
	etcd := genericoptions.NewEtcdOptions(storage)
	etcd.SkipHealthEndpoints = true
	if err := etcd.ApplyTo(&config.Config); err != nil {
		return nil, err
	}

	config.MergedResourceConfig = apiserver.DefaultAPIResourceConfigSource()
	completed := (&apiserver.Config{GenericConfig: config, ExtraConfig: apiserver.ExtraConfig{
		CRDRESTOptionsGetter: options.NewCRDRESTOptionsGetter(*etcd, nil, nil),
		ServiceResolver:      noServices{},
		AuthResolverWrapper: webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, nil,
			config.LoopbackClientConfig, nil),
	}}).Complete()

	completed.GenericConfig.EnableDiscovery = true // otherwise an aggregator serves it
	server, err := completed.New(genericapiserver.NewEmptyDelegate())
	if err != nil {
		return nil, err
	}

	return server, installLeases(server, *etcd)
}

func installLeases(
	server *apiserver.CustomResourceDefinitions, etcd genericoptions.EtcdOptions,
) error {
	resources := serverstorage.NewResourceConfig()
	resources.EnableVersions(coordinationv1.SchemeGroupVersion)
	encoding := serverstorage.NewDefaultResourceEncodingConfig(legacyscheme.Scheme)
	factory := serverstorage.NewDefaultStorageFactory(etcd.StorageConfig, "application/json",
		legacyscheme.Codecs, encoding, resources, nil)
	group, err := coordinationrest.RESTStorageProvider{}.NewRESTStorage(resources,
		etcd.CreateRESTOptionsGetter(factory, nil))
	if err != nil {
		return err
	}

	return server.GenericAPIServer.InstallAPIGroup(&group)
}

// install creates the CustomResourceDefinitions, and waits until they are served.
func (o *servers) install(ctx context.Context, server *apiserver.CustomResourceDefinitions) error {
	config := rest.CopyConfig(server.GenericAPIServer.LoopbackClientConfig)
	client, err := clientset.NewForConfig(config)
	if err != nil {
		return err
	}

	crds := client.ApiextensionsV1().CustomResourceDefinitions()
	return wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, time.Minute, true,
		func(ctx context.Context) (bool, error) {
			for _, crd := range o.definitions {
				if _, err := crds.Create(ctx, crd, metav1.CreateOptions{}); err != nil &&
					!apierrors.IsAlreadyExists(err) {
					return false, nil // it does not listen yet
				}
			}

			for _, crd := range o.definitions {
				for _, version := range crd.Spec.Versions {
					path := fmt.Sprintf("/apis/%s/%s/%s", crd.Spec.Group, version.Name,
						crd.Spec.Names.Plural)
					if err := client.RESTClient().Get().AbsPath(path).Do(ctx).Error(); err != nil {
						return false, nil
					}
				}
			}

			return true, nil
		})
}

func (o *servers) writeKubeconfig(i int, server *apiserver.CustomResourceDefinitions) error {
	return clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": {
			Server:                   "https://" + server.GenericAPIServer.ExternalAddress,
			CertificateAuthorityData: o.certificate,
		}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {Token: "anybody"}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	}, filepath.Join(o.out, fmt.Sprintf("%d.kubeconfig", i)))
}
