// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
)

// DecodeResult decodes the result of a plugin. version is the version of a result that does not
// name its own. DecodeResult refuses lists that contain null, because the conversions of
// containernetworking/cni to other versions panic on them.
func DecodeResult(data []byte, version string) (*types100.Result, error) {
	var own struct{ CNIVersion string }
	if err := json.Unmarshal(data, &own); err != nil {
		return nil, err
	}

	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, err
	}
	if fields == nil {
		return nil, errors.New("it is null")
	}

	version = cmp.Or(own.CNIVersion, version)
	fields["cniVersion"], _ = json.Marshal(version)
	data, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}

	// These are the bytes that Create decodes. The original bytes could have the keys in another
	// order, and the last one of equal keys counts.
	var lists struct{ Interfaces, IPs, Routes []*json.RawMessage }
	if err := json.Unmarshal(data, &lists); err != nil {
		return nil, err
	}

	for _, list := range []struct {
		name  string
		items []*json.RawMessage
	}{{"interfaces", lists.Interfaces}, {"ips", lists.IPs}, {"routes", lists.Routes}} {
		if i := slices.Index(list.items, nil); i >= 0 {
			return nil, fmt.Errorf("%s[%d] is null", list.name, i)
		}
	}

	result, err := create.Create(version, data)
	if err != nil {
		return nil, err
	}

	return types100.GetResult(result)
}
