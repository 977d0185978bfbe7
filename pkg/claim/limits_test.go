// SPDX-License-Identifier: Apache-2.0

package claim_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
)

// around are JSON values of the fields that must be right beside the one that is tried.
var around = map[string]string{
	"bond":       `"name": "bond1", "mode": "802.3ad"`,
	"networks[]": `"name": "n"`, "routes[]": `"to": "10.2.0.0/16", "via": "10.1.0.1"`,
	"rules[]": `"incoming": true, "priority": 5, "table": 5`, "vrf": `"name": "red", "table": 5`,
	"vf": `"vlan": 5`,
}

// with returns the fields of an InterfaceConfig in which the one with the path has this value.
func with(path, value string) string {
	i := strings.LastIndex(path, ".")
	if i < 0 {
		return fmt.Sprintf("%q: %s", path, value)
	}

	name, inner := path[:i], path[i+1:]
	if of, isEntry := strings.CutSuffix(inner, "[]"); isEntry {
		inner, value = of, "["+value+"]"
		if of == "weights" { // one must not be 0
			value = "[1, " + value[1:]
		}
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal([]byte("{"+around[name]+"}"), &fields); err != nil {
		panic(err)
	}
	fields[inner] = json.RawMessage(value)
	text, err := json.Marshal(fields)
	if err != nil {
		panic(err)
	}

	if list, isList := strings.CutSuffix(name, "[]"); isList {
		return fmt.Sprintf("%q: [%s]", list, text)
	}
	return with(name, string(text))
}

// TestLimits checks that each limit is exactly where the validation refuses, and that its path is a
// field.
func TestLimits(t *testing.T) {
	for path, limit := range claim.Limits() {
		kind := kindAt(t, path)
		right, wrong := map[string]string{}, map[string]string{}
		number := func(n int64) string {
			if kind == reflect.Map {
				return fmt.Sprintf(`{"rx": %d}`, n)
			}
			return fmt.Sprint(n)
		}
		if limit.Min != nil {
			right["least"], wrong["less"] = number(*limit.Min), number(*limit.Min-1)
			right["most"], wrong["more"] = number(*limit.Max), number(*limit.Max+1)
		}
		for _, choice := range append(limit.Choices, "") {
			right["choice "+choice] = fmt.Sprintf("%q", choice)
		}
		if len(limit.Choices) > 0 {
			wrong["no choice"] = `"another"`
		}
		for _, key := range limit.Keys {
			right["key "+key] = fmt.Sprintf(`{%q: "1"}`, key)
			wrong["no key"] = `{"another": "1"}`
		}
		if strings.HasSuffix(path, "hashKey") {
			right["long"] = fmt.Sprintf("%q", strings.Repeat("6d:", limit.Length/3)+"6d")
			wrong["longer"] = fmt.Sprintf("%q", strings.Repeat("6d:", limit.Length/3+1)+"6d")
			wrong["no key"] = `"6d5a"`
		} else if strings.HasSuffix(path, "GUID") {
			right["GUID"] = `"00:11:22:33:44:55:66:7F"`
			wrong["short"], wrong["longer"] = `"00:11:22:33:44:55:66"`, `"00:11:22:33:44:55:66:77:88"`
			wrong["no colons"] = `"0011.2233.4455.6677"`
		} else if limit.Pattern != "" {
			const variant = "_vfio_pci"
			right["the driver"], right["a variant"] = `"vfio-pci"`, `"mlx5_vfio_pci"`
			right["long"] = fmt.Sprintf("%q", strings.Repeat("n", limit.Length-len(variant))+variant)
			wrong["longer"] = fmt.Sprintf("%q", strings.Repeat("n", limit.Length+1-len(variant))+variant)
			wrong["another driver"] = `"mlx5_core"`
		} else if limit.Length > 0 {
			right["long"] = fmt.Sprintf("%q", strings.Repeat("n", limit.Length))
			wrong["longer"] = fmt.Sprintf("%q", strings.Repeat("n", limit.Length+1))
		}
		if limit.Items > 0 {
			right["items"], wrong["too many items"] = items(path, limit.Items), items(path, limit.Items+1)
		}
		if limit.Choices == nil || strings.HasSuffix(path, "[]") {
			delete(right, "choice ")
		}

		for name, value := range right {
			if err := validated(with(path, value)); err != nil {
				t.Errorf("%s, %s: %s: %v", path, name, value, err)
			}
		}
		for name, value := range wrong {
			if err := validated(with(path, value)); err == nil {
				t.Errorf("%s, %s: %s is right", path, name, value)
			}
		}
	}
}

func validated(fields string) error {
	return claim.ValidateClaim("spec.devices",
		written([]string{nic}, claimtest.FromClaim(fields)))
}

// items returns a list of this many different entries.
func items(path string, n int) string {
	texts := make([]string, n)
	for i := range texts {
		texts[i] = map[string]string{
			"neighbors": fmt.Sprintf(`{"address": "10.0.%d.%d", "mac": "02:00:00:00:00:01"}`, i/250, i%250+1),
			"networks":  fmt.Sprintf(`{"name": "n%d"}`, i),
			"rules":     fmt.Sprintf(`{"incoming": true, "table": 5, "priority": %d}`, i+1),
		}[path]
		switch {
		case strings.HasSuffix(path, "weights"):
			texts[i] = "1"
		case strings.HasSuffix(path, "addresses"):
			texts[i] = fmt.Sprintf(`"10.0.0.%d/24"`, i+1)
		}
	}
	return "[" + strings.Join(texts, ", ") + "]"
}

// kindAt returns the kind of the field with the path.
func kindAt(t *testing.T, path string) reflect.Kind {
	t.Helper()
	of := reflect.TypeFor[v1alpha1.InterfaceConfig]()
	for name := range strings.SplitSeq(path, ".") {
		name, isEntry := strings.CutSuffix(name, "[]")
		found := false
		for i := range of.NumField() {
			if tag, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ","); tag == name {
				of, found = of.Field(i).Type, true
				break
			}
		}
		if !found {
			t.Fatalf("%s is no field", path)
		}
		if of.Kind() == reflect.Pointer || isEntry {
			of = of.Elem()
		}
	}
	return of.Kind()
}
