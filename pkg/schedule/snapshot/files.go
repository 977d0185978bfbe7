// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/util/workqueue"
	resourcev1beta1 "k8s.io/dynamic-resource-allocation/api/v1beta1"
	resourcev1beta2 "k8s.io/dynamic-resource-allocation/api/v1beta2"
	sigsyaml "sigs.k8s.io/yaml"
)

// extensions of the files that are read in directories.
var extensions = []string{".yaml", ".yml", ".json"}

// Reader reads objects from files. Create one with [NewReader]. It is not safe for concurrent use.
type Reader struct {
	stdin   io.Reader
	ignored []schema.GroupVersionKind
	scheme  *runtime.Scheme
	decoder runtime.Decoder
	skipped map[string]int // number of skipped objects by kind
}

// NewReader returns a Reader that reads stdin for a file named "-". It silently skips objects of
// the ignored kinds.
func NewReader(stdin io.Reader, ignored ...schema.GroupVersionKind) (*Reader, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, resourceapi.AddToScheme, resourcev1beta1.AddToScheme,
		resourcev1beta2.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}

	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	return &Reader{stdin: stdin, ignored: ignored, scheme: scheme, decoder: decoder,
		skipped: map[string]int{}}, nil
}

// Read returns the objects of files with YAML or JSON, including Lists. In a directory, it reads
// the files below that end in .yaml, .yml or .json, sorted by name. Objects keep their order. It
// converts objects of resource.k8s.io/v1beta1 and v1beta2 to v1. It reads the pods of a Deployment,
// ReplicaSet, StatefulSet, DaemonSet, Job, CronJob, JobSet or MPIJob from its template; see
// [Snapshot.PlaceDaemonSets]. An error names the file, the object and the field.
func (r *Reader) Read(paths ...string) (*Snapshot, error) {
	into := &Snapshot{}
	for _, path := range paths {
		if err := r.read(path, func(o runtime.Object) error { return into.add(o) }); err != nil {
			return nil, err
		}
	}
	return into, nil
}

// ReadInto is like [Reader.Read], but adds the objects to a Snapshot. They replace existing objects
// with the same name.
func (r *Reader) ReadInto(into *Snapshot, paths ...string) error {
	added, err := r.Read(paths...)
	if err != nil {
		return err
	}

	for _, object := range added.Objects() {
		if err := into.Put(object); err != nil {
			return err
		}
	}

	return nil
}

// Skipped returns a sentence about the objects that were skipped because a Snapshot does not hold
// their kinds, or "".
func (r *Reader) Skipped() string {
	if len(r.skipped) == 0 {
		return ""
	}
	var kinds []string
	for _, kind := range slices.Sorted(maps.Keys(r.skipped)) {
		kinds = append(kinds, fmt.Sprintf("%d %s", r.skipped[kind], kind))
	}
	return "left out, as only Pods and workloads are scheduled, by Nodes, Namespaces and what " +
		"resource.k8s.io has: " + strings.Join(kinds, ", ")
}

// add is like put, but rejects an object that exists already.
func (s *Snapshot) add(object runtime.Object) error {
	before := len(s.names)
	n, err := s.put(object)
	if err == nil && len(s.names) == before {
		return fmt.Errorf("%s: is there twice", n)
	}
	return err
}

// Objects returns all objects. An object comes after the objects that it refers to.
func (s *Snapshot) Objects() []runtime.Object {
	var all []runtime.Object
	all = appendObjects(all, s.Nodes)
	all = appendObjects(all, s.Namespaces)
	all = appendObjects(all, s.Classes)
	all = appendObjects(all, s.Slices)
	all = appendObjects(all, s.TaintRules)
	all = appendObjects(all, s.Templates)
	all = appendObjects(all, s.Claims)

	return appendObjects(all, s.Pods)
}

func appendObjects[T runtime.Object](all []runtime.Object, objects []T) []runtime.Object {
	for _, object := range objects {
		all = append(all, object)
	}
	return all
}

func (r *Reader) read(path string, add func(runtime.Object) error) error {
	if path == "-" {
		return r.documents("standard input", r.stdin, add)
	}

	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return r.file(path, add)
	}

	found := false
	err = filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !slices.Contains(extensions, filepath.Ext(path)) {
			return err
		}
		found = true
		return r.file(path, add)
	})

	if err == nil && !found {
		err = fmt.Errorf("%s: has no file that ends in %s", path, strings.Join(extensions, ", "))
	}

	return err
}

func (r *Reader) file(path string, add func(runtime.Object) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	return r.documents(path, file, add)
}

// documents adds the objects of a stream. The name is used in errors.
func (r *Reader) documents(name string, stream io.Reader, add func(runtime.Object) error) error {
	buffered := bufio.NewReader(stream)
	next := yaml.NewYAMLReader(buffered).Read
	if isJSON(buffered) {
		next = readAll(buffered)
	}

	for number := 1; ; number++ {
		document, err := next()
		if errors.Is(err, io.EOF) {
			return nil
		}

		if err == nil {
			err = r.document(document, add)
		}
		if err != nil {
			return fmt.Errorf("%s: document %d: %w", name, number, err)
		}
	}
}

// isJSON reports whether the stream begins like a JSON object. Such a stream is one document, so
// that the search for YAML separators can be skipped.
func isJSON(stream *bufio.Reader) bool {
	start, _ := stream.Peek(64)
	return bytes.HasPrefix(bytes.TrimSpace(start), []byte("{"))
}

// readAll returns a function that returns the whole stream first, and then io.EOF.
func readAll(stream io.Reader) func() ([]byte, error) {
	return func() ([]byte, error) {
		content, err := io.ReadAll(stream)
		if err == nil && len(content) == 0 {
			err = io.EOF
		}
		return content, err
	}
}

// document adds the object of a document, or the items of a List.
func (r *Reader) document(document []byte, add func(runtime.Object) error) error {
	if blank(document) {
		return nil
	}
	if items := listItems(document); items != nil {
		return r.items(items, add)
	}

	d := r.decode(document)
	if list, isList := d.object.(*corev1.List); isList {
		return r.items(list.Items, add)
	}

	return r.addDecoded(d, add)
}

// listItems returns the items of a List in JSON, or nil for anything else. It exists because the
// decoder would parse a List several times, and a List may hold a whole cluster.
func listItems(document []byte) []runtime.RawExtension {
	var list corev1.List
	if !bytes.HasPrefix(bytes.TrimSpace(document), []byte("{")) ||
		json.Unmarshal(document, &list) != nil ||
		list.GroupVersionKind() != corev1.SchemeGroupVersion.WithKind("List") {
		return nil
	}
	return list.Items
}

// items decodes several items in parallel, and adds them in their order.
func (r *Reader) items(items []runtime.RawExtension, add func(runtime.Object) error) error {
	decodedItems := make([]decoded, len(items))
	workqueue.ParallelizeUntil(context.Background(), goruntime.GOMAXPROCS(0), len(items),
		func(i int) {
			decodedItems[i] = r.decode(items[i].Raw)
		})

	for i, d := range decodedItems {
		if err := r.addDecoded(d, add); err != nil {
			return fmt.Errorf("items[%d]: %w", i, err)
		}
	}

	return nil
}

// decoded is the result of decoding: an object, a skipped kind, or an error.
type decoded struct {
	object runtime.Object
	kind   schema.GroupVersionKind
	err    error
}

// decode decodes one document. Safe for concurrent use.
func (r *Reader) decode(document []byte) decoded {
	object, kind, err := r.decoder.Decode(document, nil, nil)
	if runtime.IsNotRegisteredError(err) {
		var unknown metav1.TypeMeta
		err := sigsyaml.Unmarshal(document, &unknown)
		if kind := unknown.GroupVersionKind(); err == nil && isWorkload(kind) {
			pods, err := podsOf(document, kind)
			return decoded{pods, kind, err}
		}
		return decoded{nil, unknown.GroupVersionKind(), err}
	}

	if err != nil {
		return decoded{err: err}
	}

	object, err = r.newest(object)
	return decoded{object, *kind, err}
}

// addDecoded adds a decoded object, or counts it as skipped.
func (r *Reader) addDecoded(d decoded, add func(runtime.Object) error) error {
	switch {
	case d.err != nil:
		return d.err
	case d.object == nil:
		r.skip(d.kind)
		return nil
	case isWorkload(d.kind) && meta.IsListType(d.object) && meta.LenList(d.object) == 0:
		r.skip(schema.GroupVersionKind{Kind: d.kind.Kind + " without pods"})
		return nil
	case meta.IsListType(d.object): // a PodList, for example
		return meta.EachListItem(d.object, func(item runtime.Object) error {
			return r.addDecoded(decoded{object: item, kind: d.kind}, add)
		})
	}

	err := add(d.object)
	if errors.Is(err, ErrKind) {
		r.skip(d.kind)
		return nil
	}

	return err
}

func (r *Reader) skip(kind schema.GroupVersionKind) {
	if !slices.Contains(r.ignored, kind) {
		r.skipped[kind.Kind]++
	}
}

// blank reports whether a document consists of white space and comments.
func blank(document []byte) bool {
	for line := range bytes.Lines(document) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && !bytes.Equal(line, []byte("---")) {
			return false
		}
	}
	return true
}

// newest converts an object of resource.k8s.io to version v1.
func (r *Reader) newest(object runtime.Object) (runtime.Object, error) {
	kinds, _, err := r.scheme.ObjectKinds(object)
	if err != nil {
		return nil, err
	}

	kind := kinds[0]
	if kind.Group != resourceapi.GroupName ||
		kind.Version == resourceapi.SchemeGroupVersion.Version {
		return object, nil
	}

	newest, err := r.scheme.New(resourceapi.SchemeGroupVersion.WithKind(kind.Kind))
	if err != nil {
		return nil, err
	}
	if err := r.scheme.Convert(object, newest, nil); err != nil {
		return nil, fmt.Errorf("convert %s to %s: %w", kind, resourceapi.SchemeGroupVersion, err)
	}

	return newest, nil
}
