// SPDX-License-Identifier: Apache-2.0

// Package convert finds out which program's configuration a text is, and converts it to what this
// project understands. The packages that it uses know the other programs. One text may have objects
// of several programs.
package convert

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/conversion"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/dranet"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/prototypes"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/sriovdra"
	"github.com/opiproject/xpu-device-plugin/pkg/convert/sriovoperator"
	"github.com/opiproject/xpu-device-plugin/pkg/convert/values"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/sriovdp"
)

// Options are what a text does not say of itself.
type Options struct {
	// ResourcePrefix is for resources without one; "" means each program's own default.
	ResourcePrefix string
	// Key is the key of the configuration in ConfigMaps of sriov-network-device-plugin; "" means
	// config.json or the only key.
	Key string
}

// Result is what a text was converted to.
type Result struct {
	// Documents are YAML, in the order of what they were made of.
	Documents []string
	// Notes say what is left out, what differs, and what an administrator must allow.
	Notes []string
	// Unknown names what was not recognized, with the reason. It is not in Documents.
	Unknown []string
}

// Text converts YAML or JSON documents and lists. Objects of Kubernetes and of this project that
// need no conversion come back as they are.
func Text(text []byte, o Options) (Result, error) {
	if sriovdp.Is(text) {
		c := &converter{Options: o}
		err := c.sriovdpConfig(text)
		return c.Result, err
	}

	objects, err := conversion.Objects(text)
	if err != nil {
		return Result{}, err
	}

	c, err := newConverter(objects, o)
	if err != nil {
		return Result{}, err
	}
	for i, object := range objects {
		where := describe(object, i)
		if err := c.convert(object, where); err != nil {
			return Result{}, fmt.Errorf("%s: %w", where, err)
		}
	}

	err = c.finish()
	return c.Result, err
}

// describe returns the name of an object for messages.
func describe(object map[string]any, index int) string {
	kind, name := stringOf(object, "kind"), stringOf(object, "metadata", "name")
	if kind != "" && name != "" {
		return kind + " " + name
	}
	if kind != "" {
		return fmt.Sprintf("%s in document %d", kind, index+1)
	}
	return fmt.Sprintf("document %d", index+1)
}

// converter converts one text.
type converter struct {
	Options
	Result
	objects []map[string]any

	// dra converts claims, of which one may have parameters for several drivers.
	dra []conversion.Driver
	// named are the NetworkAttachmentDefinitions that VfConfigs name, as namespace/name; those of a
	// DeviceClass have no namespace.
	named map[string]bool
	// prototypes are given together to their converter, for which there is a place in Documents.
	prototypes     []map[string]any
	prototypesAt   int
	operatorPrefix string
	mtu            map[string]int // of policies, by resource
	pools          []v1alpha1.DevicePool
	poolsAt        int
}

func newConverter(objects []map[string]any, o Options) (*converter, error) {
	c := &converter{Options: o, objects: objects, named: map[string]bool{}, mtu: map[string]int{},
		prototypesAt: -1, poolsAt: -1, operatorPrefix: o.ResourcePrefix}
	for _, object := range objects {
		c.learn(object)
	}
	if c.operatorPrefix == "" {
		c.operatorPrefix = sriovoperator.DefaultPrefix
	}

	c.dra = []conversion.Driver{dranet.Driver(), sriovdra.Driver()}
	for _, object := range objects {
		if recognize(object) == attachment && c.isForClaims(object) {
			if err := c.dra[1].Read(object); err != nil {
				return nil, fmt.Errorf("%s: %w", describe(object, 0), err)
			}
		}
	}

	return c, nil
}

// isForClaims reports whether a VfConfig names a NetworkAttachmentDefinition.
func (c *converter) isForClaims(object map[string]any) bool {
	namespace, name := stringOf(object, "metadata", "namespace"), stringOf(object, "metadata", "name")
	return c.named[namespace+"/"+name] || c.named["/"+name]
}

// learn keeps what other objects have to know of this one.
func (c *converter) learn(object map[string]any) {
	switch recognize(object) {
	case operatorPolicy:
		size, _, _ := unstructured.NestedFieldNoCopy(object, "spec", "mtu")
		if mtu, isNumber := size.(float64); isNumber {
			c.mtu[stringOf(object, "spec", "resourceName")] = int(mtu)
		}
	case helmValues:
		prefix := stringOf(object, "operator", "resourcePrefix")
		if c.operatorPrefix == "" && prefix != "" {
			c.operatorPrefix = prefix
		}
	case claims, parametersAlone:
		for _, name := range vfConfigNetworks(object) {
			c.named[name] = true
		}
	}
}

func (c *converter) add(document string) { c.Documents = append(c.Documents, document) }

func (c *converter) note(where string, notes ...string) {
	for _, note := range notes {
		c.Notes = append(c.Notes, where+": "+note)
	}
}

func (c *converter) unknown(where, reason string) {
	c.Unknown = append(c.Unknown, where+": "+reason)
}

// keep adds an object as it is.
func (c *converter) keep(object map[string]any) error {
	text, err := yaml.Marshal(object)
	c.add(string(text))
	return err
}

func (c *converter) convert(object map[string]any, where string) error {
	text, err := yaml.Marshal(object)
	if err != nil {
		return err
	}

	switch recognize(object) {
	case kept:
		return c.keep(object)
	case sriovdpConfig:
		return c.sriovdpConfig(text)
	case configMap:
		return c.configMap(object, where)
	case operatorPolicy:
		return c.policy(text, where)
	case operatorNetwork:
		return c.network(object, text, where)
	case withoutCounterpart:
		c.note(where, "is left out, because it has no counterpart: see docs/how-to/"+
			"move-from-sriov-network-operator.md")
		return nil
	case attachment:
		return c.attachment(object, where)
	case claims, parametersAlone, sriovDRAObject:
		return c.claims(text)
	case prototype:
		c.prototype(object)
		return nil
	case pod:
		if c.hasPrototypes() {
			c.prototype(object)
			return nil
		}
		return c.keep(object)
	case helmValues:
		return c.values(object, where)
	default:
		c.unknown(where, unknownReason(object))
		return nil
	}
}

// finish converts what is converted together.
func (c *converter) finish() error {
	var made []string
	pools, notes := sriovoperator.Merge(c.pools)
	c.Notes = append(c.Notes, notes...)
	for _, pool := range pools {
		text, err := DevicePool(pool)
		if err != nil {
			return err
		}
		made = append(made, text)
	}
	c.insert(c.poolsAt, made)
	if c.prototypesAt > c.poolsAt && c.poolsAt >= 0 {
		c.prototypesAt += len(made)
	}

	if len(c.prototypes) == 0 {
		return nil
	}
	var all []string
	for _, object := range c.prototypes {
		text, err := yaml.Marshal(object)
		if err != nil {
			return err
		}
		all = append(all, string(text))
	}
	documents, notes, err := prototypes.Convert([]byte(strings.Join(all, "---\n")))
	c.Notes = append(c.Notes, notes...)
	c.insert(c.prototypesAt, documents)

	return err
}

func (c *converter) insert(at int, documents []string) {
	if at >= 0 {
		c.Documents = slices.Insert(c.Documents, at, documents...)
	}
}

func (c *converter) sriovdpConfig(text []byte) error {
	prefix := c.ResourcePrefix
	if prefix == "" {
		prefix = sriovdp.DefaultPrefix
	}
	pools, notes, err := sriovdp.Convert(text, prefix)
	if err != nil {
		return err
	}

	c.Notes = append(c.Notes, notes...)
	for _, pool := range pools {
		document, err := DevicePool(pool)
		if err != nil {
			return err
		}
		c.add(document)
	}

	return nil
}

// configMap converts a ConfigMap of sriov-network-device-plugin. One that has no configuration of it
// is kept.
func (c *converter) configMap(object map[string]any, where string) error {
	data, _, err := unstructured.NestedStringMap(object, "data")
	if err != nil {
		return err
	}

	var keys []string
	for key, value := range data {
		if sriovdp.Is([]byte(value)) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)

	key := c.Key
	switch {
	case len(keys) == 0:
		return c.keep(object)
	case slices.Contains(keys, key):
	case key != "":
		c.unknown(where, fmt.Sprintf("has no configuration in key %s: it has %s", key,
			strings.Join(keys, ", ")))
		return nil
	case len(keys) == 1:
		key = keys[0]
	case slices.Contains(keys, "config.json"):
		key = "config.json"
	default:
		c.unknown(where, "has configurations in several keys: name one of them by --key: "+
			strings.Join(keys, ", "))
		return nil
	}

	return c.sriovdpConfig([]byte(data[key]))
}

func (c *converter) policy(text []byte, where string) error {
	pool, notes, err := sriovoperator.Policy(text, c.operatorPrefix)
	if err != nil {
		return err
	}

	c.note(where, notes...)
	if c.poolsAt < 0 {
		c.poolsAt = len(c.Documents)
	}
	c.pools = append(c.pools, pool)
	return nil
}

func (c *converter) network(object map[string]any, text []byte, where string) error {
	mtu := c.mtu[stringOf(object, "spec", "resourceName")]
	definition, notes, err := sriovoperator.Network(text, c.operatorPrefix, mtu)
	if err != nil {
		return err
	}

	c.note(where, notes...)
	return c.keep(definition)
}

// attachment converts a NetworkAttachmentDefinition. Those of sriov-cni are Multus' or
// dra-driver-sriov's.
func (c *converter) attachment(object map[string]any, where string) error {
	if !slices.Contains(sriovoperator.Types(object), "sriov") {
		return c.keep(object)
	}

	forMultus := stringOf(object, "metadata", "annotations", sriovoperator.ResourceAnnotation) != ""
	forClaims := c.isForClaims(object)
	switch {
	case forMultus && forClaims:
		c.unknown(where, "is for Multus by its annotation "+sriovoperator.ResourceAnnotation+
			", and for dra-driver-sriov by a VfConfig that names it: give it with one of them")
		return nil
	case forMultus:
		notes, err := sriovoperator.Definition(object)
		if err != nil {
			return err
		}
		c.note(where, notes...)
		return c.keep(object)
	case forClaims:
		text, err := yaml.Marshal(object)
		if err != nil {
			return err
		}
		return c.claims(text)
	default:
		c.unknown(where, "is of type sriov, and neither has the annotation "+
			sriovoperator.ResourceAnnotation+", as for Multus, nor is named by a VfConfig here, as for "+
			"dra-driver-sriov")
		return nil
	}
}

// claims converts an object with parameters of DRA drivers, by each driver in turn. Each of them
// leaves alone what is another's.
func (c *converter) claims(text []byte) error {
	for _, driver := range c.dra {
		driver.Read = nil // it was called in the beginning
		documents, notes, err := conversion.Convert(text, driver)
		if err != nil {
			return err
		}
		c.Notes = append(c.Notes, notes...)
		text = []byte(strings.Join(documents, "---\n"))
	}

	c.add(string(text))
	return nil
}

func (c *converter) prototype(object map[string]any) {
	if c.prototypesAt < 0 {
		c.prototypesAt = len(c.Documents)
	}
	c.prototypes = append(c.prototypes, object)
}

func (c *converter) hasPrototypes() bool {
	return slices.ContainsFunc(c.objects, func(object map[string]any) bool {
		return recognize(object) == prototype
	})
}

// values converts values of a chart.
func (c *converter) values(object map[string]any, where string) error {
	chart := values.Of(object)
	where += " (Helm values of " + chart.Name + ")"
	converted, notes, err := chart.Convert(object)
	if err != nil {
		return err
	}

	c.note(where, notes...)
	c.note(where, "becomes Helm values of this project's chart: helm install --values, and not kubectl")
	return c.keep(converted)
}

// DevicePool returns a DevicePool as YAML, without its status. A selector that selects everything
// gets a field without effect, because the API server rejects a selector without fields.
func DevicePool(pool v1alpha1.DevicePool) (string, error) {
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&pool)
	if err != nil {
		return "", err
	}

	delete(object, "status")
	spec := object["spec"].(map[string]any)
	for _, s := range spec["selectors"].([]any) {
		if selector := s.(map[string]any); len(selector) == 0 {
			selector["isRdma"] = false
		}
	}

	text, err := yaml.Marshal(object)
	return string(text), err
}
