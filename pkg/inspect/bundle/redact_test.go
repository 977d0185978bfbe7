// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// reference lists the fields that an archive shows.
const reference = "../../../docs/reference/bundle.md"

// secrets generates a different secret for every text of a value, and records where each is.
type secrets struct{ at []string }

var secretText = regexp.MustCompile(`secret(\d{5})t`)

func (s *secrets) next(path string) string {
	s.at = append(s.at, path)
	return fmt.Sprintf("secret%05dt", len(s.at)-1)
}

// found returns the sorted paths of the secrets in a text.
func (s *secrets) found(text string) (paths []string) {
	for _, match := range secretText.FindAllStringSubmatch(text, -1) {
		var i int
		fmt.Sscanf(match[1], "%d", &i)
		paths = append(paths, s.at[i])
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

// fill sets all fields of a value, and adds one item to each list or map.
func (s *secrets) fill(v reflect.Value, path string) {
	switch at := v.Addr().Interface().(type) {
	case *metav1.Time, *metav1.MicroTime, *metav1.Duration:
		return
	case *resource.Quantity:
		*at = resource.MustParse("1")
		return
	case *intstr.IntOrString:
		*at = intstr.FromString(s.next(path))
		return
	case *runtime.RawExtension:
		s.raw(at, path)
		return
	case *metav1.FieldsV1:
		at.SetRawString(fmt.Sprintf(`{"f:%s": {}}`, s.next(path)))
		return
	}

	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		s.fill(v.Elem(), path)
	case reflect.Struct:
		for i := range v.NumField() {
			if field := v.Type().Field(i); field.IsExported() {
				s.fill(v.Field(i), join(path, field))
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		s.fill(v.Index(0), path+"[]")
	case reflect.Map:
		s.fillMap(v, path)
	case reflect.String:
		v.SetString(s.next(path))
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Bool:
		v.SetBool(true)
	}
}

func (s *secrets) fillMap(v reflect.Value, path string) {
	v.Set(reflect.MakeMap(v.Type()))
	keys := []string{s.next(path + " (names)")}
	switch path {
	case "metadata.labels", "spec.template.metadata.labels", "spec.selector.matchLabels":
		keys = append(keys, shownLabels()...)
	case "metadata.annotations":
		keys = append(append(keys, shownAnnotations()...), networksAnnotation, statusAnnotation)
	}

	for i, name := range keys {
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		key.SetString(name)
		at := path + ".*"
		if i > 0 {
			at = path + " " + name
		}

		s.fill(value, at)
		switch name {
		case networksAnnotation:
			value.SetString(s.json(at, "name", "namespace", "interface", "mac", "cni-args",
				"portMappings"))
		case statusAnnotation:
			value.SetString(s.json(at, "name", "interface", "mac", "mtu", "dns"))
		}

		v.SetMapIndex(key, value)
	}
}

// json returns a list with a JSON object that has these fields.
func (s *secrets) json(path string, fields ...string) string {
	object := map[string]any{}
	for _, name := range fields {
		object[name] = s.next(path + " " + name)
	}

	object["deep"] = map[string]any{s.next(path + " names"): s.next(path + " values")}
	text, err := json.Marshal([]any{object})
	if err != nil {
		panic(err)
	}

	return string(text)
}

// raw sets a configuration that the project reads, with an additional unknown field.
func (s *secrets) raw(to *runtime.RawExtension, path string) {
	var config v1alpha1.InterfaceConfig
	s.fill(reflect.ValueOf(&config).Elem(), path)
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&config)
	if err != nil {
		panic(err)
	}

	object[s.next(path+" (names)")] = map[string]any{"deep": []any{s.next(path + ".*")}}
	if to.Raw, err = json.Marshal(object); err != nil {
		panic(err)
	}
}

func join(path string, field reflect.StructField) string {
	name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
	switch {
	case name == "":
		return path
	case path == "":
		return name
	}
	return path + "." + name
}

// networkAttachmentDefinition is the type of the multi-network specification.
type networkAttachmentDefinition struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Config string `json:"config"`
	} `json:"spec"`
}

// whereabouts returns a network configuration whose IPAM plugin has a password, with every text
// secret.
func (s *secrets) whereabouts(path string) string {
	text := func(name string) string { return s.next(path + " " + name) }
	conf, err := json.Marshal(map[string]any{
		"cniVersion": text("cniVersion"), "name": text("name"), text("names"): text("values"),
		"plugins": []any{
			map[string]any{"type": "xpu-cni", "network": text("network"),
				"deviceID": text("deviceID"),
				"ipam": map[string]any{
					"type": text("ipam.type"), "datastorePassword": text("password"),
				},
				"runtimeConfig": map[string]any{"mac": text("runtimeConfig.mac")}},
			map[string]any{"type": text("type"), "network": text("network of others"),
				"kubeconfig": text("kubeconfig"),
				"ipam": map[string]any{
					"type":       text("ipam.type"),
					"kubernetes": map[string]any{"kubeconfig": text("ipam.kubeconfig")},
				}},
		},
	})

	if err != nil {
		panic(err)
	}

	return string(conf)
}

// change sets fields that decide whether an object is the project's, or that the project writes.
type change func(object map[string]any, s *secrets)

// set sets the field at a path; lists on the path get one item.
func set(value any, path ...string) change {
	return func(object map[string]any, _ *secrets) {
		for _, name := range path[:len(path)-1] {
			if list, isList := object[name].([]any); isList {
				object = list[0].(map[string]any)
			} else {
				object = object[name].(map[string]any)
			}
		}
		object[path[len(path)-1]] = value
	}
}

func all(changes ...change) change {
	return func(object map[string]any, s *secrets) {
		for _, change := range changes {
			change(object, s)
		}
	}
}

// ourPod makes a pod the project's, or with below the pod template at that path. The first
// container is the project's, the second is not.
func ourPod(part string, below ...string) change {
	spec := func(name string) []string { return append(slices.Clone(below), "spec", name) }
	return all(
		set("xpu-system", "metadata", "namespace"),
		set("xpu-device-plugin", "metadata", "labels", partOf),
		set(part, "metadata", "labels", "app.kubernetes.io/name"),
		set("DaemonSet", "metadata", "ownerReferences", "kind"),
		set(part, "metadata", "ownerReferences", "name"),
		set(part, spec("serviceAccountName")...),
		func(object map[string]any, s *secrets) {
			for _, name := range append(slices.Clone(below), "spec") {
				object = object[name].(map[string]any)
			}

			ours := object["containers"].([]any)[0].(map[string]any)
			sidecar := runtime.DeepCopyJSON(ours)
			ours["name"] = part
			ours["args"] = []any{"--sys-root=" + s.next("args[] --sys-root"), s.next("args[]"),
				"--tracing-endpoint=" + s.next("args[] --tracing-endpoint")}

			for _, key := range []string{"image", "env", "command", "volumeMounts"} {
				delete(sidecar, key)
			}

			sidecar["args"] = []any{"--sys-root=" + s.next("args[] of a sidecar")}
			object["containers"] = []any{ours, sidecar}
		},
	)
}

// namesake adds a foreign container with the name of one of the project's.
func namesake(spec ...string) change {
	return func(object map[string]any, _ *secrets) {
		for _, name := range spec {
			object = object[name].(map[string]any)
		}
		container := runtime.DeepCopyJSON(object["containers"].([]any)[0].(map[string]any))
		container["name"] = "xpu-agent"
		object["containers"] = append(object["containers"].([]any), container)
	}
}

// ofKubelet makes an event one of the kubelet's, with messages of several CNI plugins.
func ofKubelet(object map[string]any, s *secrets) {
	object["reportingComponent"] = "kubelet"
	object["message"] = `plugin type="multus" ` + s.next("message") +
		`: plugin type="xpu-cni" failed: ` +
		s.next("message of xpu-cni") + `; plugin type="other" failed: ` + s.next("message")
}

// example is an object in which every text is secret.
type example struct {
	kind, of string // of is the origin of the object
	object   any
	change   change
}

func examples() []example {
	const driver = v1alpha1.GroupName
	config := func(path ...string) change {
		return set(driver, append(path, "devices", "config", "opaque", "driver")...)
	}
	about := set("Pod", "involvedObject", "kind")
	from := func(component string) change {
		return all(about, set(component, "reportingComponent"))
	}

	return []example{
		{"DevicePool", "", &v1alpha1.DevicePool{}, nil}, {"XPU", "", &v1alpha1.XPU{}, nil},
		{"XPUNetwork", "", &v1alpha1.XPUNetwork{}, nil}, {"XPUNode", "", &v1alpha1.XPUNode{}, nil},
		{"XPUPort", "", &v1alpha1.XPUPort{}, nil}, {"XPUTenant", "", &v1alpha1.XPUTenant{}, nil},
		{"DeviceClass", "", &resourceapi.DeviceClass{}, nil},
		{"DeviceClass", "for this driver", &resourceapi.DeviceClass{},
			set(driver, "spec", "config", "opaque", "driver")},
		{"ResourceClaim", "", &resourceapi.ResourceClaim{}, nil},
		{"ResourceClaim", "for this driver", &resourceapi.ResourceClaim{},
			all(config("spec"), config("status", "allocation"),
				set(driver, "status", "devices", "driver"))},
		{"ResourceClaimTemplate", "", &resourceapi.ResourceClaimTemplate{}, nil},
		{"ResourceClaimTemplate", "for this driver", &resourceapi.ResourceClaimTemplate{},
			config("spec", "spec")},
		{"ResourceSlice", "of this driver", &resourceapi.ResourceSlice{},
			set(driver, "spec", "driver")},
		{"Node", "", &corev1.Node{}, nil},
		{"Event", "", &corev1.Event{}, about},
		{"Event", "of the project", &corev1.Event{}, from("xpu-agent")},
		{"Event", "of a hook", &corev1.Event{},
			all(from("xpu-agent"), set("PostDeleteHookFailed", "reason"))},
		{"Event", "of the kubelet", &corev1.Event{}, all(about, ofKubelet)},
		{"Pod", "", &corev1.Pod{}, namesake("spec")},
		{"Pod", "of the project", &corev1.Pod{}, ourPod("xpu-agent")},
		{"DaemonSet", "", &appsv1.DaemonSet{}, namesake("spec", "template", "spec")},
		{"DaemonSet", "of the project", &appsv1.DaemonSet{},
			all(ourPod("xpu-agent", "spec", "template"), set("xpu-agent", "metadata", "name"))},
		{"Deployment", "", &appsv1.Deployment{}, namesake("spec", "template", "spec")},
		{"Deployment", "of the project", &appsv1.Deployment{},
			all(ourPod("xpu-controller", "spec", "template"),
				set("xpu-controller", "metadata", "name"))},
		{"NetworkAttachmentDefinition", "", &networkAttachmentDefinition{},
			func(o map[string]any, s *secrets) {
				set(s.whereabouts("spec.config"), "spec", "config")(o, s)
			}},
	}
}

// objects is an API server with objects of one kind.
type objects struct {
	client.Reader
	kind string
	all  []unstructured.Unstructured
}

func (o objects) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	if list.GetObjectKind().GroupVersionKind().Kind == o.kind+"List" {
		list.(*unstructured.UnstructuredList).Items = o.all
	}
	return nil
}

// shownOf writes an archive of the example, and returns which of its texts are in it.
func (e example) shownOf(t *testing.T) []string {
	t.Helper()
	var s secrets
	s.fill(reflect.ValueOf(e.object).Elem(), "")
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(e.object)
	must.Succeed(t, err)

	if e.change != nil {
		e.change(object, &s)
	}

	files := written(t, Sources{
		Reader: objects{kind: e.kind, all: []unstructured.Unstructured{{Object: object}}},
		Pods:   fake.NewClientset().CoreV1(), Namespace: "xpu-system",
		Nodes: func(context.Context) ([]string, error) { return nil, nil },
	})

	var text strings.Builder
	for _, content := range files {
		text.WriteString(content)
	}

	return s.found(text.String())
}

// TestShownFields puts a secret into every text of every kind, and checks that the archive contains
// only those that the reference lists.
func TestShownFields(t *testing.T) {
	shown := map[string][]string{}
	var titles []string
	for _, e := range examples() {
		title := strings.TrimSpace(e.kind + " " + e.of)
		titles = append(titles, title)
		shown[title] = e.shownOf(t)
		if len(shown[title]) == 0 {
			t.Errorf("%s: the archive has nothing of it", title)
		}

		if e.of != "" { // omit what is shown of all, which is listed before
			shown[title] = slices.DeleteFunc(shown[title], func(path string) bool {
				return slices.Contains(shown[e.kind], path) && e.kind != title
			})
		}
	}

	// Fields of every kind are listed once.
	everywhere := slices.DeleteFunc(slices.Clone(shown["XPU"]), func(path string) bool {
		return !slices.Contains(shown["Event"], path) || !slices.Contains(shown["Node"], path)
	})
	list := "every kind\n" + lines(everywhere)
	for _, title := range titles {
		own := slices.DeleteFunc(shown[title], func(path string) bool {
			return slices.Contains(everywhere, path)
		})
		list += title + "\n" + lines(own)
	}

	text, err := os.ReadFile(reference)
	must.Succeed(t, err)
	_, rest, _ := strings.Cut(string(text), "```fields\n")
	want, _, _ := strings.Cut(rest, "```")
	if diff := cmp.Diff(want, list); diff != "" {
		t.Errorf("%s lists other fields than the archive shows (-listed +shown):\n%s\nThe list "+
			"would be:\n%s", reference, diff, list)
	}
}

// lines puts paths with the same beginning on one line.
func lines(paths []string) string {
	names := map[string][]string{}
	var prefixes []string
	for _, path := range paths {
		prefix, name, isKey := strings.Cut(path, " ")
		if !isKey || name == "(names)" {
			i := strings.LastIndex(prefix, ".")
			prefix, name = path[:max(i, 0)], path[i+1:]
		}

		if _, known := names[prefix]; !known {
			prefixes = append(prefixes, prefix)
		}
		names[prefix] = append(names[prefix], name)
	}

	var out strings.Builder
	for _, prefix := range prefixes {
		fmt.Fprintf(&out, "  %s\n",
			strings.TrimPrefix(prefix+": "+strings.Join(names[prefix], ", "), ": "))
	}

	return out.String()
}
