// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// check is a condition in CEL.
type check struct {
	holds string // an expression of type bool
	must  string // what the value must be, for a message
}

// checker makes checks of values, by the limits of their paths.
type checker struct {
	limits map[string]claim.Limit
}

// field is a field of a struct in JSON.
type field struct {
	name string
	of   reflect.Type
}

func fieldsOf(t reflect.Type) (fields []field) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" {
			fields = append(fields, field{name, f.Type})
		}
	}
	return fields
}

// value returns the check of a value that is not null. value is its expression, path the key of its
// limit. A variable of a macro has the number of the macros around it in its name.
func (c checker) value(value string, t reflect.Type, path string, depth int) check {
	limit := c.limits[path]
	switch t.Kind() {
	case reflect.Pointer:
		return c.value(value, t.Elem(), path, depth)
	case reflect.Bool:
		return check{"type(" + value + ") == bool", "must be true or false"}
	case reflect.Int32:
		return number(value, limit)
	case reflect.String:
		return text(value, limit)
	case reflect.Slice:
		return c.list(value, t, path, depth)
	case reflect.Map:
		return c.dictionary(value, t, path, depth)
	case reflect.Struct:
		return c.object(value, t, path, depth)
	}
	panic(fmt.Sprintf("%s is a %s, which has no check", path, t))
}

func number(value string, limit claim.Limit) check {
	least, most := int64(math.MinInt32), int64(math.MaxInt32)
	if limit.Min != nil {
		least, most = *limit.Min, *limit.Max
	}
	return check{
		fmt.Sprintf("type(%[1]s) == int && %[1]s >= %[2]d && %[1]s <= %[3]d", value, least, most),
		fmt.Sprintf("must be %d-%d", least, most),
	}
}

func text(value string, limit claim.Limit) check {
	c := check{"type(" + value + ") == string", "must be a text"}
	if limit.Length > 0 {
		c.holds += fmt.Sprintf(" && size(bytes(%s)) <= %d", value, limit.Length)
		c.must += fmt.Sprintf(" of at most %d bytes", limit.Length)
	}
	if limit.Pattern != "" {
		c.holds += fmt.Sprintf(" && (%s == '' || %[1]s.matches('%s'))", value, limit.Pattern)
		c.must = limit.Must
	}
	if len(limit.Choices) > 0 {
		c.holds += fmt.Sprintf(" && %s in %s", value, set(append([]string{""}, limit.Choices...)))
		c.must = "must be " + strings.Join(limit.Choices, " or ")
	}
	return c
}

func (c checker) list(value string, t reflect.Type, path string, depth int) check {
	entry := fmt.Sprint("v", depth)
	entries := c.value(entry, t.Elem(), path+"[]", depth+1)
	all := check{"type(" + value + ") == list", "must be a list, where each entry " + entries.must}
	if items := c.limits[path].Items; items > 0 {
		all.holds += fmt.Sprintf(" && size(%s) <= %d", value, items)
		all.must = fmt.Sprintf("must be a list of at most %d, where each entry %s", items, entries.must)
	}
	all.holds += fmt.Sprintf(" && %s.all(%s, %[2]s == null || %[3]s)", value, entry, entries.holds)
	return all
}

func (c checker) dictionary(value string, t reflect.Type, path string, depth int) check {
	key := fmt.Sprint("v", depth)
	entry := fmt.Sprintf("%s[%s]", value, key)
	limit := c.limits[path]
	entries := c.value(entry, t.Elem(), path, depth+1)
	all := check{"type(" + value + ") == map", "must be names with values, where each value " + entries.must}
	if len(limit.Keys) > 0 {
		all.holds += fmt.Sprintf(" && %s.all(%s, %[2]s in %[3]s)", value, key, set(limit.Keys))
		all.must = "must have names of the list in the documentation, and each value " + entries.must
	}
	all.holds += fmt.Sprintf(" && %s.all(%s, %s == null || %s)", value, key, entry, entries.holds)
	return all
}

func (c checker) object(value string, t reflect.Type, path string, depth int) check {
	key := fmt.Sprint("v", depth)
	var names, each []string
	for _, f := range fieldsOf(t) {
		names = append(names, f.name)
		at := value + "." + f.name
		inner := c.value(at, f.of, path+"."+f.name, depth+1)
		each = append(each, fmt.Sprintf("(!has(%s) || %[1]s == null || %[2]s)", at, inner.holds))
	}
	return check{
		fmt.Sprintf("type(%s) == map && %[1]s.all(%s, %[2]s in %[3]s) && ", value, key, set(names)) +
			strings.Join(each, " && "),
		"must have only " + strings.Join(names, ", ") + ", with the values that they may have",
	}
}

// set returns a map literal with these keys, because it costs less to look into than a list.
func set(keys []string) string {
	keys = slices.Clone(keys)
	slices.Sort(keys)
	for i, key := range keys {
		keys[i] = strconv.Quote(key) + ": 0"
	}
	return "{" + strings.Join(keys, ", ") + "}"
}
