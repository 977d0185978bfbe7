// SPDX-License-Identifier: Apache-2.0

package conversion

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	yamlv3 "go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// maxDepth is how many lists may be within each other. kubectl makes one.
const maxDepth = 8

// documentEnd is a line that ends a YAML document (YAML 1.2.2, section 9.1.2).
var documentEnd = regexp.MustCompile(`(?m)^\.\.\.[ \t]*(#.*)?\r?$`)

// document is a YAML document, a JSON value, or an item of a list.
type document struct {
	text   []byte
	object map[string]any
}

// kind returns the kind of the object, or "".
func (d document) kind() string {
	kind, _ := d.object["kind"].(string)
	return kind
}

func (d document) name() string {
	name, _, _ := unstructured.NestedString(d.object, "metadata", "name")
	return name
}

// Objects returns the objects of YAML documents and of JSON values, and the items of lists. Each is
// returned, or there is an error.
func Objects(text []byte) ([]map[string]any, error) {
	all, err := read(text)
	if err != nil {
		return nil, err
	}

	var objects []map[string]any
	for _, d := range all {
		objects = append(objects, d.object)
	}
	return objects, nil
}

// read returns the documents of a text.
func read(text []byte) (all []document, err error) {
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		part, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}

		parts, err := split(part)
		if err != nil {
			return nil, err
		}
		for _, one := range parts {
			items, err := itemsOf(one, 0)
			if err != nil {
				return nil, err
			}
			all = append(all, items...)
		}
	}
}

// split returns the documents between two lines "---". These are JSON values one after the other, or
// YAML documents that end with lines "...".
func split(text []byte) (documents [][]byte, err error) {
	if values := jsonValues(text); len(values) > 0 {
		return values, nil
	}

	for _, one := range documentEnd.Split(string(text), -1) {
		if err := isOne([]byte(one)); err != nil {
			return nil, err
		}
		documents = append(documents, []byte(one))
	}
	return documents, nil
}

// jsonValues returns the JSON values of a text; none if it has anything else.
func jsonValues(text []byte) (values [][]byte) {
	for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
		var value json.RawMessage
		err := decoder.Decode(&value)
		if errors.Is(err, io.EOF) {
			return values
		}
		if err != nil {
			return nil
		}
		values = append(values, append(value, '\n'))
	}
}

// isOne returns an error if a text has more than one YAML document, of which yaml.Unmarshal would
// return the first only.
func isOne(text []byte) error {
	decoder := yamlv3.NewDecoder(bytes.NewReader(text))
	for range 2 {
		var node yamlv3.Node
		err := decoder.Decode(&node)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return errors.New("has a document behind another one, without a line --- between them")
}

// itemsOf returns the items of a list, also of lists within it, or the document itself. A document
// without a value, such as comments, has none. depth is how many lists the document is in.
func itemsOf(text []byte, depth int) (items []document, err error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("lists: at most %d may be within each other", maxDepth)
	}
	d := document{text: text}
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, nil
	}
	if d.object, err = decode(text); err != nil {
		return nil, err
	}

	if d.object == nil {
		return nil, nil
	}

	list, isList := d.object["items"].([]any)
	if !isList || !strings.HasSuffix(d.kind(), "List") {
		return []document{d}, nil
	}
	for i, item := range list {
		one, err := yaml.Marshal(item)
		if err != nil {
			return nil, err
		}
		more, err := itemsOf(one, depth+1)
		if err != nil {
			return nil, fmt.Errorf("items[%d]: %w", i, err)
		}
		items = append(items, more...)
	}

	return items, nil
}

// decode returns the object of a document. JSON is decoded as such, because YAML allows fewer tabs.
func decode(text []byte) (object map[string]any, err error) {
	if json.Valid(text) {
		return object, json.Unmarshal(text, &object)
	}
	return object, yaml.Unmarshal(text, &object)
}
