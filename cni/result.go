package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
)

// DecodeResult reads the result of a plugin. A result that names no version of the specification is in the version given.
// The result can be converted to any version without a panic, which is not so for what create.Create of
// containernetworking/cni takes: that lets null through in lists.
func DecodeResult(data []byte, version string) (*types100.Result, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, err
	}
	if fields == nil {
		return nil, errors.New("it is null")
	}
	// The library's conversions do not expect what JSON allows here.
	for _, list := range []string{"interfaces", "ips", "routes"} {
		var items []json.RawMessage
		if raw, ok := fields[list]; ok {
			if err := json.Unmarshal(raw, &items); err != nil {
				return nil, fmt.Errorf("%s: %w", list, err)
			}
		}
		for i, item := range items {
			if bytes.Equal(item, []byte("null")) {
				return nil, fmt.Errorf("%s[%d] is null", list, i)
			}
		}
	}
	var own string
	if raw, ok := fields["cniVersion"]; ok {
		if err := json.Unmarshal(raw, &own); err != nil {
			return nil, fmt.Errorf("cniVersion: %w", err)
		}
	}
	if own != "" {
		version = own
	}
	fields["cniVersion"], _ = json.Marshal(version)
	data, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	result, err := create.Create(version, data)
	if err != nil {
		return nil, err
	}
	return types100.GetResult(result)
}
