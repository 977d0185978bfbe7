// SPDX-License-Identifier: Apache-2.0

package bundle

import "strings"

// fields selects the parts of a JSON value to show. Everything else is omitted, because no list of
// the places where people put secrets could be complete.
type fields struct {
	children map[string]*fields // by name, or "*" for every name
	items    *fields            // for a list's items
	view     view
}

// view returns the part of a value to show; nil means nothing.
type view func(value any) any

// parse parses a list of fields. A line has a path, and after a colon the paths that are shown
// below it, such as "spec.devices: name taints[].key". In a path, "[]" stands for the items of a
// list and "*" for every field of a map. "name=view" shows a field through a named view.
func parse(list string, views map[string]view) *fields {
	root := &fields{}
	for line := range strings.Lines(list) {
		prefix, names, isBelow := strings.Cut(strings.TrimSpace(line), ":")
		if !isBelow {
			prefix, names = "", prefix
		}

		at := root.child(prefix)
		for _, name := range strings.Fields(names) {
			path, viewName, viewed := strings.Cut(name, "=")
			leaf := at.child(path)
			if viewed {
				leaf.view = views[viewName]
			}
		}
	}

	return root
}

// child returns the fields below a path, creating them if needed.
func (f *fields) child(path string) *fields {
	if path == "" {
		return f
	}

	for name := range strings.SplitSeq(path, ".") {
		name, lists := strings.TrimRight(name, "[]"), strings.Count(name, "[]")
		if name != "" {
			if f.children == nil {
				f.children = map[string]*fields{}
			}
			if f.children[name] == nil {
				f.children[name] = &fields{}
			}
			f = f.children[name]
		}

		for range lists {
			if f.items == nil {
				f.items = &fields{}
			}
			f = f.items
		}
	}

	return f
}

// filter returns a copy of the value with only these fields, or nil if nothing is left. Where a
// text or number is expected, a map or list is omitted, because its content is unknown.
func (f *fields) filter(value any) any {
	if f.view != nil {
		return f.view(value)
	}

	switch v := value.(type) {
	case map[string]any:
		return f.filterMap(v)
	case []any:
		return f.filterList(v)
	}

	if f.children != nil || f.items != nil {
		return nil
	}

	return value
}

func (f *fields) filterMap(all map[string]any) any {
	if f.children == nil {
		return nil
	}

	kept := map[string]any{}
	for name, value := range all {
		field := f.children[name]
		if field == nil {
			field = f.children["*"]
		}
		if field == nil {
			continue
		}

		if value = field.filter(value); value != nil {
			kept[name] = value
		}
	}

	return kept
}

func (f *fields) filterList(all []any) any {
	if f.items == nil {
		return nil
	}

	kept := []any{}
	for _, value := range all {
		if value = f.items.filter(value); value != nil {
			kept = append(kept, value)
		}
	}

	return kept
}
