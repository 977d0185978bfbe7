// SPDX-License-Identifier: Apache-2.0

package provisioning

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

// Config configures a [Direct] with the settings that XPUs, XPUNetworks and DevicePools declare at
// an API server. It does not change after it has been checked.
type Config struct {
	// Installation distinguishes the objects of this node at the OPI agents from the objects of
	// other nodes and clusters. It is any text that no other installation uses. After a change of
	// Installation, the existing ports at the agents do not belong to this node any more. The
	// default is made of the names of the node and of the machine's firmware
	// (/sys/class/dmi/id/product_uuid).
	Installation string `json:"installation,omitempty"`
	// XPUs are the cards of the node.
	XPUs []XPU `json:"xpus"`
	// Networks are the L2 segments that Ports can join, by name.
	Networks map[string]Network `json:"networks"`
	// Pools maps the name of each pool to the pool's default network.
	Pools map[string]string `json:"pools"`
}

// XPU is a card and the OPI agent that serves it.
type XPU struct {
	Name string `json:"name"`
	// Endpoint is the OPI agent's address, "host:port".
	Endpoint string `json:"endpoint"`
	// Dialect is the OPI agent's dialect; empty means "evpn-gw".
	Dialect string `json:"dialect,omitempty"`
	// VTEP is the address of the xPU from which networks with a VNI are sent by VXLAN; empty means
	// that the OPI agent chooses it.
	VTEP string `json:"vtep,omitempty"`
	// PFs are the PCI addresses of the card's PFs, "dddd:bb:dd.f". Empty means every PF that no
	// other card names.
	PFs []pci.Address `json:"pfs,omitempty"`
	// TLS names the files for mutual TLS with the OPI agent.
	TLS *TLSFiles `json:"tls,omitempty"`
	// Insecure allows a connection without TLS.
	Insecure bool `json:"insecure,omitempty"`
}

// TLSFiles are the paths of PEM files, which are read again for each connection.
type TLSFiles struct {
	// CertFile and KeyFile are this client's certificate and its key.
	CertFile string `json:"certFile"`
	KeyFile  string `json:"keyFile"`
	// CAFile has the certificates of the authorities that may have signed the OPI agent's
	// certificate.
	CAFile string `json:"caFile"`
	// ServerName is the name in the OPI agent's certificate, if it is not the host of the endpoint.
	ServerName string `json:"serverName,omitempty"`
}

// Network is an L2 segment. The fields have the meaning of the same fields of an XPUNetwork.
type Network struct {
	// VLAN is the VLAN of the segment on the xPU, 1-4094. Each network needs a different VLAN.
	VLAN int32 `json:"vlan"`
	// AllowedNamespaces are the namespaces whose pods may join. A selector can only use the label
	// kubernetes.io/metadata.name, because other labels are not known without an API server.
	AllowedNamespaces v1alpha1.AllowedNamespaces `json:"allowedNamespaces"`
	// VNI joins the segment across xPUs by VXLAN, 1-16777215. Without a VNI the segment ends at the
	// xPU.
	VNI *int32 `json:"vni,omitempty"`
	// MTU is the MTU of the pods' interfaces in bytes, 1280-9216. The default 0 sets no MTU, except
	// for a network with a VNI on an xPU that reports the MTU between the xPUs. There it means this
	// MTU minus the overhead of VXLAN.
	MTU int32 `json:"mtu,omitempty"`
	// SourceFilter says which source addresses the frames of an interface may have, if the xPU's
	// agent filters them: Addresses (default), MAC or None.
	SourceFilter v1alpha1.SourceFilter `json:"sourceFilter,omitempty"`
	// Routed must not be set: only xpu-controller knows the networks' subnets.
	Routed *v1alpha1.RoutedNetwork `json:"routed,omitempty"`
}

// LoadConfig reads a file of YAML or JSON. An error names the file and each field that is wrong.
func LoadConfig(path string) (*Config, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("configuration of direct mode: %w", err)
	}

	config, err := ParseConfig(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return config, nil
}

// ParseConfig reads YAML or JSON. Unknown and duplicate fields are errors.
func ParseConfig(text []byte) (*Config, error) {
	object, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return nil, err
	}

	config := &Config{}
	unknown, err := json.UnmarshalStrict(object, config)
	if err := errors.Join(append(unknown, err)...); err != nil {
		return nil, err
	}
	if err := config.check().ToAggregate(); err != nil {
		return nil, err
	}

	return config, nil
}

// check returns all errors, and converts PCI addresses to their canonical form.
func (c *Config) check() field.ErrorList {
	var wrong findings
	wrong.inXPUs(c.XPUs)
	wrong.inNetworks(c.Networks)
	for _, pool := range slices.Sorted(maps.Keys(c.Pools)) {
		_, known := c.Networks[c.Pools[pool]]
		wrong.require(known, field.NotFound(field.NewPath("pools").Key(pool), c.Pools[pool]))
	}
	return field.ErrorList(wrong)
}

// findings are the errors of a [Config].
type findings field.ErrorList

// require adds the error otherwise unless ok.
func (w *findings) require(ok bool, otherwise *field.Error) {
	if !ok {
		*w = append(*w, otherwise)
	}
}

func (w *findings) inXPUs(xpus []XPU) {
	names, pfs := map[string]bool{}, map[pci.Address]bool{}
	everyPF := false
	for i := range xpus {
		xpu, at := &xpus[i], field.NewPath("xpus").Index(i)
		w.inXPU(xpu, at)
		w.require(!names[xpu.Name], field.Duplicate(at.Child("name"), xpu.Name))
		names[xpu.Name] = true
		w.require(len(xpu.PFs) > 0 || !everyPF,
			field.Required(at.Child("pfs"), "only one xPU may leave its PFs away"))
		everyPF = everyPF || len(xpu.PFs) == 0

		for j, pf := range xpu.PFs {
			w.require(!pfs[pf], field.Duplicate(at.Child("pfs").Index(j), pf))
			pfs[pf] = true
		}
	}
}

func (w *findings) inXPU(x *XPU, at *field.Path) {
	w.require(x.Name != "",
		field.Required(at.Child("name"), "logs and messages call the xPU by it"))
	err := opi.CheckEndpoint(x.Endpoint)
	w.require(err == nil,
		field.Invalid(at.Child("endpoint"), x.Endpoint,
			"must be host:port, such as 10.1.0.1:50151"))
	_, err = dialects.Named(x.Dialect)
	w.require(err == nil, field.NotSupported(at.Child("dialect"), x.Dialect, dialects.Names()))

	for j, text := range x.PFs {
		pf, err := pci.Parse(string(text))
		w.require(err == nil,
			field.Invalid(at.Child("pfs").Index(j),
				text, "must be an address such as 0000:3b:00.0"))
		x.PFs[j] = cmp.Or(pf, text)
	}

	_, err = netip.ParseAddr(x.VTEP)
	w.require(x.VTEP == "" || err == nil, field.Invalid(at.Child("vtep"), x.VTEP,
		"must be an address such as 198.51.100.1"))

	const choice = "set tls, or insecure: true if the way to the OPI agent is protected otherwise"
	w.require((x.TLS == nil) == x.Insecure, field.Invalid(at.Child("tls"), x.TLS != nil, choice))

	if x.TLS != nil {
		const want = "must be the path of a PEM file"
		w.require(x.TLS.CertFile != "", field.Required(at.Child("tls", "certFile"), want))
		w.require(x.TLS.KeyFile != "", field.Required(at.Child("tls", "keyFile"), want))
		w.require(x.TLS.CAFile != "", field.Required(at.Child("tls", "caFile"), want))
	}
}

func (w *findings) inNetworks(networks map[string]Network) {
	vlans, vnis := map[int32]string{}, map[int32]string{}
	for _, name := range slices.Sorted(maps.Keys(networks)) {
		n, at := networks[name], field.NewPath("networks").Key(name)
		for _, problem := range validation.IsDNS1123Subdomain(name) {
			w.require(false, field.Invalid(at, name, problem))
		}

		w.require(n.VLAN >= 1 && n.VLAN <= 4094,
			field.Invalid(at.Child("vlan"), n.VLAN, "must be 1-4094"))
		w.require(n.MTU == 0 || n.MTU >= 1280 && n.MTU <= 9216,
			field.Invalid(at.Child("mtu"), n.MTU, "must be 1280-9216"))
		filters := []v1alpha1.SourceFilter{
			"", v1alpha1.SourceFilterAddresses, v1alpha1.SourceFilterMAC, v1alpha1.SourceFilterNone,
		}
		w.require(slices.Contains(filters, n.SourceFilter),
			field.NotSupported(at.Child("sourceFilter"), n.SourceFilter, filters[1:]))
		w.require(n.Routed == nil, field.Forbidden(at.Child("routed"), "gateways in the xPU need "+
			"xpu-controller, which has the networks' subnets; leave it out in direct mode"))
		w.unique(vlans, n.VLAN, name, at.Child("vlan"))
		w.inNamespaces(n.AllowedNamespaces, at.Child("allowedNamespaces"))

		if n.VNI != nil {
			const choice = "must be 1-16777215; without it the segment ends at the xPU"
			w.require(*n.VNI >= 1 && *n.VNI <= 1<<24-1,
				field.Invalid(at.Child("vni"), *n.VNI, choice))
			w.unique(vnis, *n.VNI, name, at.Child("vni"))
		}
	}
}

func (w *findings) inNamespaces(allowed v1alpha1.AllowedNamespaces, at *field.Path) {
	all := []v1alpha1.FromNamespaces{
		v1alpha1.NamespacesFromAll, v1alpha1.NamespacesFromSelector, v1alpha1.NamespacesFromNone,
	}
	w.require(allowed.From != "",
		field.Required(at.Child("from"),
			"which namespaces' pods may join is for the administrator to decide"))
	w.require(allowed.From == "" || slices.Contains(all, allowed.From),
		field.NotSupported(at.Child("from"), allowed.From, all))
	selects := allowed.From == v1alpha1.NamespacesFromSelector
	w.require(selects == (allowed.Selector != nil),
		field.Invalid(at.Child("selector"), allowed.Selector,
			"is for from: Selector, and only for that"))
	if !selects || allowed.Selector == nil {
		return
	}

	_, err := allowed.Allows(nil)
	w.require(err == nil, field.Invalid(at.Child("selector"), allowed.Selector, fmt.Sprint(err)))

	for key := range allowed.Selector.MatchLabels {
		w.require(key == corev1.LabelMetadataName,
			field.Invalid(at.Child("selector", "matchLabels"), key, onlyNames))
	}

	for i, r := range allowed.Selector.MatchExpressions {
		w.require(r.Key == corev1.LabelMetadataName,
			field.Invalid(at.Child("selector", "matchExpressions").Index(i), r.Key, onlyNames))
	}
}

const onlyNames = "must be " + corev1.LabelMetadataName + ": other labels are not known without " +
	"an API server"

// allows reports whether a pod of the namespace may join the network. The namespace is "" if no pod
// is known.
func (n Network) allows(namespace string) bool {
	if namespace == "" {
		return n.AllowedNamespaces.From == v1alpha1.NamespacesFromAll
	}
	ok, _ := n.AllowedNamespaces.Allows(map[string]string{corev1.LabelMetadataName: namespace})
	return ok
}

// unique records the VLAN or VNI of a network, and adds an error if another network has it already.
func (w *findings) unique(taken map[int32]string, id int32, network string, at *field.Path) {
	other, exists := taken[id]
	w.require(!exists, field.Invalid(at, id, "belongs to network "+other))
	taken[id] = network
}

// load reads the files and returns the configuration of TLS.
func (t *TLSFiles) load() (*tls.Config, error) {
	cert, certErr := os.ReadFile(t.CertFile)
	key, keyErr := os.ReadFile(t.KeyFile)
	ca, caErr := os.ReadFile(t.CAFile)
	if err := errors.Join(certErr, keyErr, caErr); err != nil {
		return nil, err
	}
	return opi.TLSConfig(cert, key, ca, t.ServerName)
}
