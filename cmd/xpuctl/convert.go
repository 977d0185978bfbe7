// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/claim/conversion"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/dranet"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/prototypes"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/sriovdra"
	"github.com/opiproject/xpu-device-plugin/pkg/convert"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/sriovdp"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

func convertCommand() *cobra.Command {
	var o convert.Options
	c := &cobra.Command{
		Use:   "convert FILE...",
		Short: "Convert what another program is configured with",
		Long: `Reads what other programs are configured with, finds out which program each object is for, and prints what
does the same here. One file may have objects of several programs:

  sriov-network-device-plugin   its configuration, or a ConfigMap that has it        DevicePools
  sriov-network-operator        SriovNetworkNodePolicies and SriovNetworks           DevicePools, NetworkAttachmentDefinitions
  sriov-cni with Multus         NetworkAttachmentDefinitions                         the same, of type xpu-cni
  DRANET                        claims, templates, classes; a NetworkConfig alone    the same, with an InterfaceConfig
  dra-driver-sriov              the same, with its NetworkAttachmentDefinitions      the same, and XPUNetworks
  prototypes of DRA             devmgmtproto.k8s.io, resource.k8s.io/v1alpha2        resource.k8s.io/v1
  Helm values                   of DRANET, dra-driver-sriov, sriov-network-operator  Helm values of this project's chart

Give objects that belong together at once, such as policies with networks, and claims with classes. Other objects are printed
as they are. What is left out, what differs, and what an administrator must allow is on standard error. What it cannot tell is
named there too and not printed, and the exit code is 1; so is a second object of a name. Helm values are printed alone only: with
objects they give the prefix of resources. FILE may be - for standard input.`,
		Example: `  # Whatever is in a directory:
  xpuctl convert manifests/*.yaml > converted.yaml

  # What a cluster has of sriov-network-operator:
  kubectl get sriovnetworknodepolicies,sriovnetworks -A -o yaml | xpuctl convert -`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, files []string) error {
			if len(files) == 0 {
				return c.Help()
			}
			return convertFiles(c, files, o)
		},
	}

	c.Flags().StringVar(&o.ResourcePrefix, "resource-prefix", "",
		"prefix of resources that have none; by default the one of the program, such as "+
			sriovdp.DefaultPrefix+" for sriov-network-device-plugin")
	c.Flags().StringVar(&o.Key, "key", "",
		"key of the configuration in ConfigMaps of sriov-network-device-plugin; if empty, config.json "+
			"or the only key")
	c.AddCommand(convertSRIOVDPCommand(), convertDRANETCommand(), convertSRIOVDRACommand(),
		convertPrototypesCommand())
	return c
}

// convertFiles converts files together, because objects in one may name objects in another.
func convertFiles(c *cobra.Command, files []string, o convert.Options) error {
	var texts []convert.Text
	for _, file := range files {
		text, err := read(c.InOrStdin(), file)
		if errors.Is(err, fs.ErrNotExist) && !strings.ContainsAny(file, "./") {
			return fmt.Errorf("%q is neither a file nor a program: see xpuctl convert --help", file)
		}
		if err != nil {
			return err
		}
		texts = append(texts, convert.Text{Name: file, Content: text})
	}

	result, err := convert.Texts(texts, o)
	if err != nil {
		return err
	}

	if len(result.Documents)+len(result.Notes)+len(result.Unknown) == 0 {
		return sayEmpty(c, files...)
	}
	if err := printConverted(c, result.Documents, result.Notes); err != nil {
		return err
	}
	for _, what := range result.Unknown {
		terminal.Line(c.ErrOrStderr(), "not converted: %s", what)
	}
	if len(result.Unknown) > 0 {
		return answerNo(c)
	}

	return nil
}

func convertSRIOVDPCommand() *cobra.Command {
	var prefix, key string
	c := &cobra.Command{
		Use:   "sriovdp FILE",
		Short: "Convert a configuration of sriov-network-device-plugin to DevicePools",
		Long: `Reads a configuration of sriov-network-device-plugin, or a ConfigMap that has one, and prints DevicePools
that give nodes the same resources with the same devices. What is different, and what the plugin never told that it
leaves out, is on standard error. FILE may be - for standard input.

Nothing needs to be converted to try it: xpu-agent takes the configuration as it is by --config-file.`,
		Example: `  # A file:
  xpuctl convert sriovdp config.json > devicepools.yaml

  # What a cluster has now:
  kubectl -n kube-system get configmap sriovdp-config -o yaml | xpuctl convert sriovdp - | kubectl apply -f -

  # A ConfigMap with a configuration for each node, of a plugin that ran with -resource-prefix example.com:
  xpuctl convert sriovdp configmap.yaml --key node-1 --resource-prefix example.com`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			content, err := read(c.InOrStdin(), args[0])
			if err != nil {
				return err
			}

			config, err := find(content, key)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}

			devicePools, warnings, err := sriovdp.Convert(config, prefix)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}

			for _, warning := range warnings {
				terminal.Line(c.ErrOrStderr(), "note: %s", warning)
			}

			documents := make([]string, len(devicePools))
			for i, devicePool := range devicePools {
				if documents[i], err = convert.DevicePool(devicePool); err != nil {
					return fmt.Errorf("DevicePool %s: %w", devicePool.Name, err)
				}
			}

			_, err = io.WriteString(terminal.Raw(c.OutOrStdout()), strings.Join(documents, "---\n"))
			return err
		},
	}

	c.Flags().StringVar(&prefix, "resource-prefix", sriovdp.DefaultPrefix,
		"prefix of resources that have no resourcePrefix: what the plugin has as its flag "+
			"-resource-prefix")
	c.Flags().StringVar(&key, "key", "",
		"key of the configuration in the ConfigMap; if empty, config.json or the only key")

	return c
}

func convertDRANETCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "dranet FILE",
		Short: "Convert claims and classes of DRANET",
		Long: `Reads ResourceClaims, ResourceClaimTemplates and DeviceClasses, or one NetworkConfig alone, and prints them
with an InterfaceConfig in the place of each configuration for driver dra.net. What is left out, what differs, and what an
administrator must allow is on standard error. Selectors are not converted: a note names the objects that have some.
Other objects are printed as they are. FILE may be - for standard input.`,
		Example: `  # The templates of a namespace:
  kubectl get resourceclaimtemplates -o yaml | xpuctl convert dranet -

  # A file with a class and a claim:
  xpuctl convert dranet claim.yaml > converted.yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return convertClaims(c, args[0], dranet.Driver())
		},
	}
}

func convertSRIOVDRACommand() *cobra.Command {
	return &cobra.Command{
		Use:   "dra-driver-sriov FILE",
		Short: "Convert claims, classes and networks of dra-driver-sriov",
		Long: `Reads ResourceClaims, ResourceClaimTemplates and DeviceClasses, or one VfConfig alone, and prints them
with an InterfaceConfig in the place of each VfConfig. NetworkAttachmentDefinitions of type sriov that are given too are
printed as XPUNetworks, and what they say of the VF goes into the InterfaceConfigs that name them. What is left out, what
differs, and what an administrator must allow is on standard error. Selectors, SriovResourcePolicies and DeviceAttributes
are not converted: notes name them. Other objects are printed as they are. FILE may be - for standard input.`,
		Example: `  # The templates and networks of a namespace:
  kubectl get resourceclaimtemplates,network-attachment-definitions -o yaml | xpuctl convert dra-driver-sriov -

  # A file with networks, a class and a claim:
  xpuctl convert dra-driver-sriov claim.yaml > converted.yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return convertClaims(c, args[0], sriovdra.Driver())
		},
	}
}

func convertPrototypesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "prototypes FILE",
		Short: "Convert objects of the prototypes of DRA to those of Kubernetes",
		Long: `Reads objects of k8srm-prototype (devmgmtproto.k8s.io/v1alpha1) and dra-evolution (resource.k8s.io/v1alpha2), the
prototypes of the working group Device Management, and prints them as resource.k8s.io/v1: classes, claims, templates, pods, and
pools as ResourceSlices. Give claims together with their classes and pods, because they need the classes' drivers and are claims or
templates as pods name them. What has no counterpart is left out, and named on standard error. An expression or attribute
whose driver is not known stays as it is, for which an API server rejects the object. FILE may be - for standard input.`,
		Example: `  # A class, a claim and a pod:
  cat classes.yaml pod.yaml | xpuctl convert prototypes - > converted.yaml

  # Would it be scheduled on nodes with such pools?
  xpuctl convert prototypes pools.yaml > cluster.yaml
  xpuctl schedule -f nodes.yaml -f cluster.yaml -f converted.yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			content, err := read(c.InOrStdin(), args[0])
			if err != nil {
				return err
			}

			documents, notes, err := prototypes.Convert(content)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			if len(documents)+len(notes) == 0 {
				return sayEmpty(c, args[0])
			}

			return printConverted(c, documents, notes)
		},
	}
}

// convertClaims converts the objects in a file from another driver.
func convertClaims(c *cobra.Command, file string, from conversion.Driver) error {
	content, err := read(c.InOrStdin(), file)
	if err != nil {
		return err
	}

	documents, notes, err := conversion.Convert(content, from)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if len(documents)+len(notes) == 0 {
		return sayEmpty(c, file)
	}

	return printConverted(c, documents, notes)
}

// sayEmpty says that there is nothing to convert, because no output may look like a mistake.
func sayEmpty(c *cobra.Command, files ...string) error {
	verb := "has"
	if len(files) > 1 {
		verb = "have"
	}
	return terminal.Line(c.ErrOrStderr(), "note: %s %s no objects", strings.Join(files, ", "), verb)
}

// printConverted prints documents, and notes on standard error.
func printConverted(c *cobra.Command, documents, notes []string) error {
	for _, note := range notes {
		terminal.Line(c.ErrOrStderr(), "note: %s", note)
	}
	_, err := io.WriteString(terminal.Raw(c.OutOrStdout()), strings.Join(documents, "---\n"))
	return err
}

func read(stdin io.Reader, name string) ([]byte, error) {
	if name == "-" {
		return io.ReadAll(stdin)
	}
	return os.ReadFile(name)
}

// find returns the configuration: the content itself, or the value of the key in a ConfigMap. The
// key may be "" if the ConfigMap has only one key, or config.json.
func find(content []byte, key string) ([]byte, error) {
	if sriovdp.Is(content) {
		if key != "" {
			return nil, errors.New("--key is for ConfigMaps, and this is a configuration itself")
		}
		return content, nil
	}

	var object corev1.ConfigMap
	if err := yaml.Unmarshal(content, &object); err != nil || object.Kind != "ConfigMap" {
		return nil, errors.New("must be JSON with a resourceList, or a ConfigMap that has it")
	}
	if key == "" && len(object.Data) == 1 {
		return []byte(slices.Collect(maps.Values(object.Data))[0]), nil
	}

	key = cmp.Or(key, "config.json")
	config, ok := object.Data[key]
	if !ok {
		return nil, fmt.Errorf("ConfigMap %s: data has no key %q: name one with --key",
			object.Name, key)
	}

	return []byte(config), nil
}
