// SPDX-License-Identifier: Apache-2.0

// Package convert finds out which program's configuration a text is, and converts it to what this
// project understands. The packages that it uses know the other programs. One text may have objects
// of several programs.
package convert

import (
	"encoding/json"
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

// document is YAML, and what it was made of.
type document struct {
	text, from string
}

// helm is Helm values of another chart.
type helm struct {
	object map[string]any
	where  string
}

// Result is what texts were converted to.
type Result struct {
	// Documents are YAML, in the order of what they were made of.
	Documents []string
	// Notes say what is left out, what differs, and what an administrator must allow.
	Notes []string
	// Unknown names what was not recognized, with the reason. It is not in Documents.
	Unknown []string
}

// Text is YAML or JSON documents and lists.
type Text struct {
	// Name is the name of the file, for messages.
	Name    string
	Content []byte
}

// Texts converts texts, of which one may name objects of another. Objects of Kubernetes and of this
// project that need no conversion come back as they are. An error names the text.
func Texts(texts []Text, o Options) (Result, error) {
	objects, places, err := read(texts)
	if err != nil {
		return Result{}, err
	}

	c, err := newConverter(objects, o)
	if err != nil {
		return Result{}, err
	}
	for i, object := range objects {
		where := describe(object, places[i].document)
		c.current = origin(object, places[i].document)
		if err := c.convert(object, where); err != nil {
			return Result{}, fmt.Errorf("%s: %s: %w", places[i].text, where, err)
		}
	}

	err = c.finish()
	return c.Result, err
}

// place is where an object stands, for messages.
type place struct {
	text     string // its name
	document string // with the name of the text if there are several
}

// read returns the objects of texts, and the place of each.
func read(texts []Text) (objects []map[string]any, places []place, err error) {
	for _, text := range texts {
		all, err := conversion.Objects(text.Content)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", text.Name, err)
		}

		for i, object := range all {
			document := fmt.Sprintf("document %d", i+1)
			if len(texts) > 1 {
				document += " of " + text.Name
			}
			objects, places = append(objects, object), append(places, place{text.Name, document})
		}
	}
	return objects, places, nil
}

// describe returns the name of an object for messages.
func describe(object map[string]any, document string) string {
	kind, name := stringOf(object, "kind"), stringOf(object, "metadata", "name")
	if kind != "" && name != "" {
		return kind + " " + name
	}
	if kind != "" {
		return kind + " in " + document
	}
	return document
}

// origin returns what a document was made of, for messages.
func origin(object map[string]any, document string) string {
	kind, name := stringOf(object, "kind"), stringOf(object, "metadata", "name")
	if kind == "" || name == "" {
		return document
	}
	if namespace := stringOf(object, "metadata", "namespace"); namespace != "" {
		name = namespace + "/" + name
	}
	return fmt.Sprintf("%s (%s %s)", document, kind, name)
}

// converter converts texts.
type converter struct {
	Options
	Result
	objects []map[string]any
	current string // what is converted
	made    []document
	values  []helm

	// dra converts claims, of which one may have parameters for several drivers.
	dra []conversion.Driver
	// named are the NetworkAttachmentDefinitions that VfConfigs name, as namespace/name; those of a
	// DeviceClass have no namespace.
	named map[string]bool
	// prototypes are given together to their converter, for which there is a place in made.
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
				return nil, fmt.Errorf("NetworkAttachmentDefinition %s: %w",
					stringOf(object, "metadata", "name"), err)
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

func (c *converter) add(text string) { c.made = append(c.made, document{text, c.current}) }

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
		config, err := json.Marshal(object) // its parser takes no YAML
		if err != nil {
			return err
		}
		return c.sriovdpConfig(config)
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
		c.values = append(c.values, helm{object, where})
		return nil
	default:
		c.unknown(where, unknownReason(object))
		return nil
	}
}

// finish converts what is converted together.
func (c *converter) finish() error {
	for _, step := range []func() error{
		c.finishPools, c.finishPrototypes, c.finishValues, c.finishDocuments,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (c *converter) finishPools() error {
	var made []document
	pools, notes := sriovoperator.Merge(c.pools)
	c.Notes = append(c.Notes, notes...)
	for _, pool := range pools {
		text, err := DevicePool(pool)
		if err != nil {
			return err
		}
		made = append(made, document{text, "SriovNetworkNodePolicy " + pool.Name})
	}

	c.insert(c.poolsAt, made)
	if c.prototypesAt > c.poolsAt && c.poolsAt >= 0 {
		c.prototypesAt += len(made)
	}
	return nil
}

func (c *converter) finishPrototypes() error {
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

	texts, notes, err := prototypes.Convert([]byte(strings.Join(all, "---\n")))
	if err != nil {
		return err
	}
	c.Notes = append(c.Notes, notes...)
	var made []document
	for _, text := range texts {
		made = append(made, document{text, "the prototypes' objects"})
	}
	c.insert(c.prototypesAt, made)

	return nil
}

func (c *converter) insert(at int, documents []document) {
	if at >= 0 {
		c.made = slices.Insert(c.made, at, documents...)
	}
}

// finishValues converts values of a chart. They are never printed with anything else, because
// kubectl takes no values, and Helm takes nothing but values of one chart.
func (c *converter) finishValues() error {
	objects := len(c.made) > 0
	for _, v := range c.values {
		chart := values.Of(v.object)
		where := v.where + " (Helm values of " + chart.Name + ")"
		if objects {
			c.note(where, "is not printed, because objects are: give the file alone for Helm values of "+
				"this project's chart")
			continue
		}

		converted, notes, err := chart.Convert(v.object)
		if err != nil {
			return fmt.Errorf("%s: %w", where, err)
		}
		switch {
		case len(converted) == 0:
			c.note(where, notes...)
			c.note(where, "has no value for this project's chart")
		case len(c.made) > 0:
			c.unknown(where, "other Helm values are printed: give each of these files alone")
		default:
			c.note(where, notes...)
			c.note(where, "becomes Helm values of this project's chart: helm install --values, and not "+
				"kubectl")
			if err := c.keep(converted); err != nil {
				return err
			}
		}
	}

	return nil
}

// identity tells objects of a cluster apart.
type identity struct {
	group, kind, namespace, name string
}

// finishDocuments takes over what was made. An object that has the name of another one would
// replace it in the cluster.
func (c *converter) finishDocuments() error {
	seen := map[identity]document{}
	for _, d := range c.made {
		var object map[string]any
		if err := yaml.Unmarshal([]byte(d.text), &object); err != nil {
			return fmt.Errorf("%s: %w", d.from, err)
		}
		group, _, hasGroup := strings.Cut(stringOf(object, "apiVersion"), "/")
		if !hasGroup {
			group = ""
		}
		id := identity{group, stringOf(object, "kind"), stringOf(object, "metadata", "namespace"),
			stringOf(object, "metadata", "name")}

		first, isSecond := seen[id]
		what := fmt.Sprintf("%s %s, made of %s", id.kind, id.name, d.from)
		switch {
		case id.name == "" || !isSecond:
			seen[id] = d
			c.Documents = append(c.Documents, d.text)
		case first.text == d.text:
			c.note(what, "is the same as what is made of "+first.from+", and is printed once")
		default:
			c.unknown(what, "another one of this name is printed, made of "+first.from+": rename one, or "+
				"give one of them only")
		}
	}

	return nil
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
		others := slices.DeleteFunc(keys, func(one string) bool { return one == key })
		c.note(where, "the configuration of key config.json is taken; name another one by --key: "+
			strings.Join(others, ", "))
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
		c.poolsAt = len(c.made)
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
	types, err := sriovoperator.Types(object)
	if err != nil {
		c.unknown(where, err.Error())
		return nil
	}
	if !slices.Contains(types, "sriov") {
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
		c.prototypesAt = len(c.made)
	}
	c.prototypes = append(c.prototypes, object)
}

func (c *converter) hasPrototypes() bool {
	return slices.ContainsFunc(c.objects, func(object map[string]any) bool {
		return recognize(object) == prototype
	})
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
