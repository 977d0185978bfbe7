// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// netConf is the network configuration: the fields of sriov-cni, network, mtu and those of
// settings. The shim reads the other fields.
type netConf struct {
	settings
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`
	DeviceID   string `json:"deviceID"`
	Network    string `json:"network"` // an XPUNetwork; "" for the pool's
	MTU        int    `json:"mtu"`     // 0 for the network's, or the netdev's own
	MAC        string `json:"mac"`
	VLAN       *int   `json:"vlan"`
	VLANQoS    *int   `json:"vlanQoS"`
	VLANProto  string `json:"vlanProto"`
	MinTxRate  *int   `json:"min_tx_rate"`
	MaxTxRate  *int   `json:"max_tx_rate"`
	SpoofChk   string `json:"spoofchk"`
	Trust      string `json:"trust"`
	LinkState  string `json:"link_state"`
	IPAM       struct {
		Type string `json:"type"`
		// Routes are CNI routes, for type xpu. Other types have formats of their own.
		Routes json.RawMessage `json:"routes"`
	} `json:"ipam"`

	// Runtime is what the runtime adds for the plugin's capabilities.
	Runtime struct {
		MAC            string   `json:"mac"`
		IPs            []string `json:"ips"`
		GUID           string   `json:"infinibandGUID"`
		DeviceID       string   `json:"deviceID"`
		DeviceInfoFile string   `json:"CNIDeviceInfoFile"`
		DNS            struct {
			Servers  []string `json:"servers"`
			Searches []string `json:"searches"`
			Options  []string `json:"options"`
		} `json:"dns"`
	} `json:"runtimeConfig"`
	DNS        types.DNS        `json:"dns"` // from the runtime, if it passes any
	PrevResult *json.RawMessage `json:"prevResult"`
	// ValidAttachments is nil if the runtime passes no list, and empty if no attachment is valid.
	ValidAttachments []types.GCAttachment `json:"cni.dev/valid-attachments"`
}

// invalid returns the error for a configuration that is not valid.
func (n netConf) invalid(format string, args ...any) error {
	return fail(types.ErrInvalidNetworkConfig, "network configuration %s: %w", short(n.Name),
		fmt.Errorf(format, args...))
}

// cniRequest is a parsed and checked request about an interface.
type cniRequest struct {
	wire.Request
	conf   netConf
	pod    journal.Pod
	device function.ID
	mac    function.MAC
	vf     *function.VFConfig
	wanted function.Interface // only the fields of settings
	prev   *types100.Result
	// ipam is the result of the IPAM plugin, or without one, the addresses that the runtime asks
	// for.
	ipam ipConfig

	// function is the device as the inventory has it; not for CHECK.
	function function.Function
}

// ownKeys are the keys of a network configuration that this project defines, for the agent and for
// the shim.
var ownKeys = append([]string{
	"deviceID", "network", "mtu", "mac", "vlan", "vlanQoS", "vlanProto", "min_tx_rate",
	"max_tx_rate", "spoofchk", "trust",
	"link_state", "timeout",
}, settingKeys...)

// otherKeys are allowed too. They are the keys that CNI defines for every plugin (SPEC.md, section
// 1), keys that Multus adds, keys of sriov-cni that have no effect here, and the node's paths,
// which the shim compares with its own.
var otherKeys = []string{
	"socket", "spoolDir",
	"cniVersion", "cniVersions", "name", "type", "ipam", "dns", "ipMasq", "args", "prevResult",
	"capabilities", "runtimeConfig",
	"disableCheck", "disableGC", "loadOnlyInlinedPlugins", "pciBusID", "resourceName", "logLevel",
	"logFile", "master",
}

// unknownKeys returns the keys of a configuration that are neither defined nor allowed by the
// administrator. They are refused, because with a typo the pod would run without what it asked for.
// Keys are compared without regard to case, like the JSON decoder does.
func unknownKeys(config json.RawMessage, allowed []string) []string {
	var all map[string]json.RawMessage
	_ = json.Unmarshal(config, &all) // decode returns the error
	known := slices.Concat(ownKeys, otherKeys, allowed)
	return slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(key string) bool {
		return strings.HasPrefix(key, "cni.dev/") ||
			slices.ContainsFunc(known, func(k string) bool { return strings.EqualFold(k, key) })
	})
}

func decode(config json.RawMessage) (netConf, error) {
	var n netConf
	err := json.Unmarshal(config, &n)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		kind := wrong.Type.Kind().String()
		return n, fail(types.ErrInvalidNetworkConfig,
			"network configuration: %s: is a %s, must be %s",
			cmp.Or(strings.TrimPrefix(wrong.Field, "settings."), "it"), wrong.Value,
			cmp.Or(jsonKinds[kind], "a "+kind))
	}

	if err != nil {
		return n, fail(types.ErrDecodingFailure, "network configuration: %w", err)
	}

	// a missing version means 0.1.0 in the specification
	n.CNIVersion = cmp.Or(n.CNIVersion, "0.1.0")
	if dns := n.Runtime.DNS; len(dns.Servers)+len(dns.Searches)+len(dns.Options) > 0 {
		n.DNS = types.DNS{Nameservers: dns.Servers, Search: dns.Searches, Options: dns.Options}
	}

	return n, nil
}

// jsonKinds has the JSON names of Go kinds that JSON names differently.
var jsonKinds = map[string]string{
	"int": "a whole number", "struct": "an object", "map": "an object", "slice": "a list",
}

// parser parses requests with the settings of the node.
type parser struct {
	// allowed has unknown keys that network configurations may contain.
	allowed []string
	// auxiliary finds the SF with an auxiliary device of this name, such as "mlx5_core.sf.4". It
	// may be nil.
	auxiliary func(name string) (id function.ID, exists bool)
}

// parse parses a request about an interface. The error names everything that is wrong with the
// configuration.
func (p parser) parse(r wire.Request) (cniRequest, error) {
	n, err := decode(r.Config)
	if err != nil {
		return cniRequest{}, err
	}

	pod, argsMAC, err := parseArgs(r.Args)
	if err == nil {
		err = checkPod(pod)
	}
	if err != nil {
		return cniRequest{}, err
	}

	w := cniRequest{Request: r, conf: n, pod: pod}
	errs := p.configuration(&w, argsMAC)
	ips := errs.ips(n.Runtime.IPs)
	if err := errors.Join(errs...); err != nil {
		return cniRequest{}, n.invalid("%w", err)
	}

	if w.usesAddressBook() {
		w.ipam.addresses = ips
		_, err := w.ipamOutput(nil)
		return w, err
	}

	w.ipam, err = parseIPAM(r.IPAM)
	if w.ipam.result == nil {
		w.ipam.addresses = ips
	}

	return w, err
}

// configuration reads the fields of the network configuration, except the addresses.
func (p parser) configuration(w *cniRequest, argsMAC string) (errs fieldErrors) {
	n := w.conf
	for i, key := range unknownKeys(w.Config, p.allowed) {
		if i == maxUnknown {
			break
		}
		if key == "pkey" { // of ib-sriov-cni
			errs.add("pkey: must be absent: a subnet manager gives partitions to the GUIDs of ports; " +
				"pKeys in the selectors of a DevicePool chooses Functions by them")
			continue
		}
		errs.add("%s: is unknown; known are %s (xpu-agent's --cni-allow-keys lets others stand "+
			"there)",
			short(key), strings.Join(ownKeys, ", "))
	}

	errs.version(n.CNIVersion)
	errs.limits(n, n.IPAM.Routes, w.IPAM)

	if w.Command == wire.Add {
		errs.capabilities(w.Config, n.IPAM.Type, p.allowed)
	}

	w.device = errs.device(cmp.Or(n.DeviceID, n.Runtime.DeviceID), p.auxiliary)
	w.mac = cmp.Or( // all three are checked
		errs.mac("runtimeConfig.mac", n.Runtime.MAC), errs.mac("CNI_ARGS: MAC", argsMAC),
		errs.mac("mac", n.MAC),
	)

	w.vf = errs.vf(n)
	w.wanted = errs.settings(w.Config)
	if n.MTU != 0 && (n.MTU < 68 || n.MTU > math.MaxInt32) {
		errs.add("mtu %d: must be 68 or more, or 0 for the network's MTU", n.MTU)
	}

	if n.PrevResult != nil {
		var err error
		if w.prev, err = cni.DecodeResult(*n.PrevResult, n.CNIVersion); err != nil {
			errs.add("prevResult: %w", err)
		}
	}

	return errs
}

// fieldErrors collects errors that name the field.
type fieldErrors []error

func (m *fieldErrors) add(format string, args ...any) {
	*m = append(*m, fmt.Errorf(format, args...))
}

// auxiliaryName is the name that the kernel gives the auxiliary device of an SF: the module that
// made it, "sf" and a number (Documentation/driver-api/auxiliary_bus.rst).
var auxiliaryName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}\.sf\.[0-9]{1,10}$`)

// device parses the Function's name: a name of the device plugin or the DRA driver, or for an SF,
// the kernel's name.
func (m *fieldErrors) device(text string, auxiliary func(string) (function.ID, bool)) function.ID {
	if text == "" {
		m.add("deviceID: is missing; the NetworkAttachmentDefinition must name the pool's " +
			"resource in its annotation " +
			"k8s.v1.cni.cncf.io/resourceName, and the pod must ask for one of that resource for " +
			"each network")
		return function.ID{}
	}

	if id, err := function.ParseDeviceName(text); err == nil {
		return id
	}
	if _, id, ok := claim.SplitCDIDeviceName(text); ok {
		return id
	}

	if auxiliaryName.MatchString(text) && auxiliary != nil {
		id, exists := auxiliary(text)
		if !exists {
			m.add("deviceID: no SF of this node has the auxiliary device %s: compare it with ls "+
				"/sys/bus/auxiliary/devices", text)
		}
		return id
	}

	id, err := function.ParseID(short(text))
	if err != nil {
		m.add("deviceID: %w", err)
	}

	return id
}

func (m *fieldErrors) mac(field, text string) function.MAC {
	if text == "" {
		return ""
	}

	mac, err := function.ParseMAC(text)
	if mac.PortGUID() != "" {
		m.add("%s %q: %w", field, short(text), function.ErrNoMAC)
		return ""
	}
	if err != nil || (function.Interface{Name: "any", MAC: mac}).Validate() != nil {
		m.add("%s %q: must be a unicast Ethernet address such as 02:00:00:00:00:01", field,
			short(text))
	}

	return mac
}

func (m *fieldErrors) guid(field, text string) function.GUID {
	if text == "" {
		return ""
	}

	guid, err := function.ParseGUID(text)
	if err != nil || !guid.IsUsable() {
		m.add("%s %q: %s", field, short(text), function.MustBeGUID)
		return ""
	}

	return guid
}

func (m *fieldErrors) ips(texts []string) []netip.Prefix {
	var ips []netip.Prefix
	for i, text := range texts[:min(len(texts), maxAddresses)] {
		ip, err := netip.ParsePrefix(text)
		if err != nil {
			m.add("runtimeConfig.ips[%d] %q: must be an address with prefix length such as "+
				"10.1.0.5/24", i, short(text))
			continue
		}
		ips = append(ips, ip)
	}

	return ips
}

// vf returns what the PF shall enforce; nil if the configuration asks for nothing. A VLAN protocol
// or priority without a VLAN has no effect, and is refused unless it is the default.
func (m *fieldErrors) vf(n netConf) *function.VFConfig {
	proto := strings.ToLower(n.VLANProto)
	c := &function.VFConfig{
		VLAN: n.VLAN, MinTxRate: n.MinTxRate, MaxTxRate: n.MaxTxRate,
		LinkState:  strings.ToLower(n.LinkState),
		SpoofCheck: m.onOff("spoofchk", n.SpoofChk), Trust: m.onOff("trust", n.Trust),
	}

	// As in ib-sriov-cni, one GUID is for the node and for the port.
	guid := m.guid("runtimeConfig.infinibandGUID", n.Runtime.GUID)
	c.NodeGUID, c.PortGUID = guid, guid

	switch tagged := n.VLAN != nil && *n.VLAN > 0; {
	case tagged:
		c.QoS, c.Proto = n.VLANQoS, proto
	case n.VLANQoS != nil && *n.VLANQoS != 0:
		m.add("vlanQoS %d: needs a vlan of 1-4094", *n.VLANQoS)
	case proto != "" && proto != function.VLAN8021Q:
		m.add("vlanProto %q: needs a vlan of 1-4094", proto)
	}

	if err := (function.Interface{Name: "any", VF: c}).Validate(); err != nil {
		m.add("%s", asWritten.Replace(err.Error()))
	}

	if *c == (function.VFConfig{}) {
		return nil
	}

	return c
}

// asWritten replaces the field names of an InterfaceConfig in errors by those of the network
// configuration.
var asWritten = strings.NewReplacer(
	"vf.vlanProtocol", "vlanProto", "vf.vlan", "vlan", "vf.qos", "vlanQoS", "vf.trust", "trust",
	"vf.spoofCheck", "spoofchk",
	"vf.minTxRate", "min_tx_rate", "vf.maxTxRate", "max_tx_rate", "vf.linkState", "link_state",
	"vf.nodeGUID, vf.portGUID", "infinibandGUID", "vf.nodeGUID", "infinibandGUID",
	"vf.portGUID", "infinibandGUID",
)

// onOff parses a word that may be on or off, or "" for neither.
func (m *fieldErrors) onOff(field, word string) *bool {
	value, known := map[string]*bool{
		"": nil, "on": new(true), "off": new(false),
	}[strings.ToLower(word)]
	if !known {
		m.add("%s %q: must be one of on, off", field, word)
	}
	return value
}

// parseArgs parses CNI_ARGS: "KEY=value;KEY=value". It ignores unknown keys.
func parseArgs(text string) (pod journal.Pod, mac string, err error) {
	fields := map[string]*string{
		"K8S_POD_NAMESPACE": &pod.Namespace, "K8S_POD_NAME": &pod.Name,
		"K8S_POD_UID": (*string)(&pod.UID), "MAC": &mac,
	}

	for pair := range strings.SplitSeq(text, ";") {
		if pair == "" {
			continue
		}

		key, value, ok := strings.Cut(pair, "=")
		if !ok {
			return pod, mac, fail(types.ErrInvalidEnvironmentVariables,
				"CNI_ARGS: %q: must be KEY=value", short(pair))
		}

		if field := fields[key]; field != nil {
			*field = value
		}
	}

	return pod, mac, nil
}
