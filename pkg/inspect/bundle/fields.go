// SPDX-License-Identifier: Apache-2.0

package bundle

import "strings"

// fields are those of a JSON value that are shown. All others are left out, because nobody can
// list the places where people put secrets.
type fields struct {
	of   map[string]*fields // by name, or "*" for every name
	each *fields            // of a list's items
	view view
}

// view returns what is shown of a value; nil is nothing.
type view func(value any) any

// parse reads a list of fields. A line has a path and after a colon what is shown there, each a
// path too, such as "spec.devices: name taints[].key". In a path, "[]" goes to the items of a list
// and "*" to every field of a map. "name=view" shows what the view of that name makes of a field.
func parse(list string, views map[string]view) *fields {
	root := &fields{}
	for line := range strings.Lines(list) {
		prefix, names, isBelow := strings.Cut(strings.TrimSpace(line), ":")
		if !isBelow {
			prefix, names = "", prefix
		}

		at := root.at(prefix)
		for _, name := range strings.Fields(names) {
			path, viewName, viewed := strings.Cut(name, "=")
			leaf := at.at(path)
			if viewed {
				leaf.view = views[viewName]
			}
		}
	}

	return root
}

// at returns the fields below a path, which it adds.
func (f *fields) at(path string) *fields {
	if path == "" {
		return f
	}

	for name := range strings.SplitSeq(path, ".") {
		name, lists := strings.TrimRight(name, "[]"), strings.Count(name, "[]")
		if name != "" {
			if f.of == nil {
				f.of = map[string]*fields{}
			}
			if f.of[name] == nil {
				f.of[name] = &fields{}
			}
			f = f.of[name]
		}

		for range lists {
			if f.each == nil {
				f.each = &fields{}
			}
			f = f.each
		}
	}

	return f
}

// shown returns a copy of the value with these fields only; nil if that is nothing. Where the list
// has a text or number, a map or list is left out, because nobody has said what is in it.
func (f *fields) shown(value any) any {
	if f.view != nil {
		return f.view(value)
	}

	switch v := value.(type) {
	case map[string]any:
		return f.shownMap(v)
	case []any:
		return f.shownList(v)
	}

	if f.of != nil || f.each != nil {
		return nil
	}

	return value
}

func (f *fields) shownMap(all map[string]any) any {
	if f.of == nil {
		return nil
	}

	kept := map[string]any{}
	for name, value := range all {
		field := f.of[name]
		if field == nil {
			field = f.of["*"]
		}
		if field == nil {
			continue
		}

		if value = field.shown(value); value != nil {
			kept[name] = value
		}
	}

	return kept
}

func (f *fields) shownList(all []any) any {
	if f.each == nil {
		return nil
	}

	kept := []any{}
	for _, value := range all {
		if value = f.each.shown(value); value != nil {
			kept = append(kept, value)
		}
	}

	return kept
}
