package provisioning

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

// Config is what [Direct] knows of the world: what XPUs, XPUNetworks and DevicePools say where there is an API server.
// It is never changed once it is checked.
type Config struct {
	// XPUs are the cards of the node.
	XPUs []XPU `json:"xpus"`
	// Networks are the L2 segments that Ports can join, by name.
	Networks map[string]Network `json:"networks"`
	// Pools are the networks of Functions for which nobody names one, by the name of their pool.
	Pools map[string]string `json:"pools"`
}

// XPU is a card and the OPI agent that serves it.
type XPU struct {
	Name string `json:"name"`
	// Endpoint is the OPI agent's address, "host:port".
	Endpoint string `json:"endpoint"`
	// Dialect is the OPI agent's, "evpn-gw" if empty.
	Dialect string `json:"dialect,omitempty"`
	// PFs are the PCI addresses of the card's PFs, "dddd:bb:dd.f". Empty means every PF that no other card names.
	PFs []pci.Address `json:"pfs,omitempty"`
	// TLS is how the OPI agent and this one know each other (mutual TLS).
	TLS *TLSFiles `json:"tls,omitempty"`
	// Insecure allows a connection without TLS.
	Insecure bool `json:"insecure,omitempty"`
}

// TLSFiles are PEM files. They are read anew for each connection.
type TLSFiles struct {
	// CertFile and KeyFile are this client's certificate and its key.
	CertFile string `json:"certFile"`
	KeyFile  string `json:"keyFile"`
	// CAFile has the certificates of the authorities that may have signed the OPI agent's.
	CAFile string `json:"caFile"`
	// ServerName is the name in the OPI agent's certificate, if it is not the host of the endpoint.
	ServerName string `json:"serverName,omitempty"`
}

// Network is an L2 segment. The fields are those of an XPUNetwork.
type Network struct {
	// VLAN is the segment's on the xPU, 1-4094. No two networks may share one.
	VLAN int32 `json:"vlan"`
	// VNI joins the segment across xPUs by VXLAN, 1-16777215; nil ends it at the xPU.
	VNI *int32 `json:"vni,omitempty"`
	// MTU is that of the pods' interfaces in bytes, 1280-9216; 0 sets none.
	MTU int32 `json:"mtu,omitempty"`
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

// ParseConfig reads YAML or JSON. Fields that are not known, and fields that are there twice, are errors.
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

// check says all that is wrong, and brings PCI addresses in their canonical form.
func (c *Config) check() field.ErrorList {
	return slices.Concat(
		c.checkXPUs(field.NewPath("xpus")), c.checkNetworks(field.NewPath("networks")), c.checkPools(field.NewPath("pools")),
	)
}

func (c *Config) checkXPUs(path *field.Path) (wrong field.ErrorList) {
	names, pfs := map[string]bool{}, map[pci.Address]bool{}
	everyPF := false
	for i := range c.XPUs {
		xpu, at := &c.XPUs[i], path.Index(i)
		wrong = append(wrong, xpu.check(at)...)
		if names[xpu.Name] {
			wrong = append(wrong, field.Duplicate(at.Child("name"), xpu.Name))
		}
		names[xpu.Name] = true
		if len(xpu.PFs) == 0 {
			if everyPF {
				wrong = append(wrong, field.Required(at.Child("pfs"), "only one xPU may leave its PFs away"))
			}
			everyPF = true
		}
		for j, pf := range xpu.PFs {
			if pfs[pf] {
				wrong = append(wrong, field.Duplicate(at.Child("pfs").Index(j), pf))
			}
			pfs[pf] = true
		}
	}
	return wrong
}

func (x *XPU) check(at *field.Path) (wrong field.ErrorList) {
	if x.Name == "" {
		wrong = append(wrong, field.Required(at.Child("name"), "logs and messages call the xPU by it"))
	}
	if err := opi.CheckEndpoint(x.Endpoint); err != nil {
		wrong = append(wrong, field.Invalid(at.Child("endpoint"), x.Endpoint, "must be host:port, such as 10.1.0.1:50151"))
	}
	if _, err := dialects.Named(x.Dialect); err != nil {
		wrong = append(wrong, field.NotSupported(at.Child("dialect"), x.Dialect, dialects.Names()))
	}
	for j, text := range x.PFs {
		pf, err := pci.Parse(string(text))
		if err != nil {
			wrong = append(wrong, field.Invalid(at.Child("pfs").Index(j), text, "must be an address such as 0000:3b:00.0"))
			continue
		}
		x.PFs[j] = pf
	}
	if (x.TLS != nil) == x.Insecure {
		const choice = "set tls, or insecure: true if the way to the OPI agent is protected otherwise"
		wrong = append(wrong, field.Invalid(at.Child("tls"), x.TLS != nil, choice))
	}
	if x.TLS != nil {
		wrong = append(wrong, x.TLS.check(at.Child("tls"))...)
	}
	return wrong
}

func (t *TLSFiles) check(at *field.Path) (wrong field.ErrorList) {
	for _, file := range []struct{ name, path string }{
		{"certFile", t.CertFile}, {"keyFile", t.KeyFile}, {"caFile", t.CAFile},
	} {
		if file.path == "" {
			wrong = append(wrong, field.Required(at.Child(file.name), "must be the path of a PEM file"))
		}
	}
	return wrong
}

// load reads the files.
func (t *TLSFiles) load() (*tls.Config, error) {
	cert, certErr := os.ReadFile(t.CertFile)
	key, keyErr := os.ReadFile(t.KeyFile)
	ca, caErr := os.ReadFile(t.CAFile)
	if err := errors.Join(certErr, keyErr, caErr); err != nil {
		return nil, err
	}
	return opi.TLSConfig(cert, key, ca, t.ServerName)
}

func (c *Config) checkNetworks(path *field.Path) (wrong field.ErrorList) {
	vlans, vnis := map[int32]string{}, map[int32]string{}
	for _, name := range slices.Sorted(maps.Keys(c.Networks)) {
		network, at := c.Networks[name], path.Key(name)
		for _, problem := range validation.IsDNS1123Subdomain(name) {
			wrong = append(wrong, field.Invalid(at, name, problem))
		}
		wrong = append(wrong, network.check(at)...)
		if other, taken := vlans[network.VLAN]; taken {
			wrong = append(wrong, field.Invalid(at.Child("vlan"), network.VLAN, "is that of network "+other))
		}
		vlans[network.VLAN] = name
		if network.VNI == nil {
			continue
		}
		if other, taken := vnis[*network.VNI]; taken {
			wrong = append(wrong, field.Invalid(at.Child("vni"), *network.VNI, "is that of network "+other))
		}
		vnis[*network.VNI] = name
	}
	return wrong
}

func (n Network) check(at *field.Path) (wrong field.ErrorList) {
	if n.VLAN < 1 || n.VLAN > 4094 {
		wrong = append(wrong, field.Invalid(at.Child("vlan"), n.VLAN, "must be 1-4094"))
	}
	if n.VNI != nil && (*n.VNI < 1 || *n.VNI > 1<<24-1) {
		const choice = "must be 1-16777215; without it the segment ends at the xPU"
		wrong = append(wrong, field.Invalid(at.Child("vni"), *n.VNI, choice))
	}
	if n.MTU != 0 && (n.MTU < 1280 || n.MTU > 9216) {
		wrong = append(wrong, field.Invalid(at.Child("mtu"), n.MTU, "must be 1280-9216"))
	}
	return wrong
}

func (n Network) opi(name string) opi.Network {
	out := opi.Network{ID: opi.NetworkID(name), VLAN: uint16(n.VLAN)}
	if n.VNI != nil {
		out.VNI = ptr.To(uint32(*n.VNI))
	}
	return out
}

func (c *Config) checkPools(path *field.Path) (wrong field.ErrorList) {
	for _, pool := range slices.Sorted(maps.Keys(c.Pools)) {
		if _, known := c.Networks[c.Pools[pool]]; !known {
			wrong = append(wrong, field.NotFound(path.Key(pool), c.Pools[pool]))
		}
	}
	return wrong
}
