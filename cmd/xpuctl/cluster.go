// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// clusterFlags are kubectl's flags that choose the cluster. Package genericclioptions of
// k8s.io/cli-runtime has the same flags. It is not used because it needs kustomize, which needs
// package plugin. A program that can load plugins keeps every method, which makes xpuctl larger by
// half.
type clusterFlags struct {
	kubeconfig string
	overrides  clientcmd.ConfigOverrides
	userExtra  []string // name=value
}

// addTo adds the flags, without --namespace. Help shows --kubeconfig and --context, and "xpuctl
// options" the others, because kubectl has them too and few people need them.
func (f *clusterFlags) addTo(flags *pflag.FlagSet) {
	all := f.flags()
	all.VisitAll(func(flag *pflag.Flag) {
		flag.Hidden = flag.Name != clientcmd.RecommendedConfigPathFlag &&
			flag.Name != clientcmd.FlagContext
	})
	flags.AddFlagSet(all)
}

// optionsCommand shows the flags that help of other commands leaves out.
func optionsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "options",
		Short: "Show the flags of all commands that ask a cluster",
		Long: `Shows the flags that say which cluster is asked and as whom. All commands that ask a cluster have them, as kubectl has. Their
help shows --kubeconfig and --context only.`,
		Example: "  xpuctl options",
		Args:    cobra.NoArgs,
		Run: func(c *cobra.Command, _ []string) {
			fmt.Fprint(c.OutOrStdout(), (&clusterFlags{}).flags().FlagUsages())
		},
	}
}

// flags returns the flags, without --namespace.
func (f *clusterFlags) flags() *pflag.FlagSet {
	flags := pflag.NewFlagSet("cluster", pflag.ContinueOnError)
	names := clientcmd.RecommendedConfigOverrideFlags("")
	names.ClusterOverrideFlags.APIServer.ShortName = "s"
	names.ContextOverrideFlags.Namespace = clientcmd.FlagInfo{}
	names.AuthOverrideFlags.Username = clientcmd.FlagInfo{}
	names.AuthOverrideFlags.Password = clientcmd.FlagInfo{}
	clientcmd.BindOverrideFlags(&f.overrides, flags, names)

	flags.StringVar(&f.kubeconfig, "kubeconfig", "",
		"Path to the kubeconfig file to use for CLI requests.")
	flags.StringArrayVar(&f.userExtra, "as-user-extra", nil,
		"User extras to impersonate for the operation, this flag can be repeated to specify "+
			"multiple values for the same key.")
	return flags
}

// addNamespaceTo adds --namespace with a default. With "" it is the kubeconfig's.
func (f *clusterFlags) addNamespaceTo(flags *pflag.FlagSet, namespace string) {
	flags.StringVarP(&f.overrides.Context.Namespace, clientcmd.FlagNamespace, "n", namespace,
		"If present, the namespace scope for this CLI request")
}

// isGiven reports whether a flag names another cluster than the current one.
func (f *clusterFlags) isGiven() bool {
	return f.kubeconfig != "" || f.overrides.CurrentContext != ""
}

// isConfigured reports whether flags, $KUBECONFIG, the user's kubeconfig, $KUBERNETES_MASTER or the
// pod in which xpuctl runs name a cluster.
func (f *clusterFlags) isConfigured() bool {
	if f.isGiven() || f.overrides.ClusterInfo.Server != "" {
		return true
	}
	loaded, err := f.load()
	if err != nil {
		return false
	}
	raw, err := loaded.RawConfig()
	if err != nil || len(raw.Contexts) > 0 {
		return true // who asks will see the error
	}
	config, err := loaded.ClientConfig()
	return err != nil || config.Host != defaultServer
}

// namespace returns the namespace of --namespace, or else the kubeconfig's.
func (f *clusterFlags) namespace() (string, error) {
	config, err := f.load()
	if err != nil {
		return "", err
	}
	namespace, _, err := config.Namespace()
	return namespace, err
}

// defaultServer is what client-go asks, outside of pods, if no server is named. No API server has
// listened there since Kubernetes 1.20.
const defaultServer = "http://localhost:8080"

// errNoCluster is returned in place of asking defaultServer.
var errNoCluster = errors.New("no cluster is named: there is no kubeconfig; set KUBECONFIG, or name " +
	"one by --kubeconfig or --server")

// restConfig says how the cluster is reached.
func (f *clusterFlags) restConfig() (*rest.Config, error) {
	loaded, err := f.load()
	if err != nil {
		return nil, err
	}

	config, err := loaded.ClientConfig()
	if err != nil {
		return nil, err
	}
	if config.Host == defaultServer && !f.isConfigured() {
		return nil, errNoCluster
	}

	config.QPS, config.Burst = 50, 300 // as kubectl
	return config, nil
}

// client reads and writes the objects that commands show. ctx bounds how long it asks which kinds
// the cluster serves, which it does with its first request.
func (f *clusterFlags) client(ctx context.Context) (client.WithWatch, error) {
	config, err := f.restConfig()
	if err != nil {
		return nil, err
	}
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	mapper, err := newMapper(ctx, config)
	if err != nil {
		return nil, err
	}
	return client.NewWithWatch(config, client.Options{Scheme: scheme, Mapper: mapper})
}

func (f *clusterFlags) load() (clientcmd.ClientConfig, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.DefaultClientConfig = &clientcmd.DefaultClientConfig
	rules.ExplicitPath = f.kubeconfig

	overrides := f.overrides
	overrides.ClusterDefaults = clientcmd.ClusterDefaults
	overrides.AuthInfo.ImpersonateUserExtra = map[string][]string{}
	for _, extra := range f.userExtra {
		name, value, ok := strings.Cut(extra, "=")
		if !ok {
			return nil, fmt.Errorf("--as-user-extra %q: must be name=value", extra)
		}
		extras := overrides.AuthInfo.ImpersonateUserExtra
		extras[name] = append(extras[name], value)
	}

	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &overrides), nil
}
