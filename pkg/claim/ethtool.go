// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// ethtoolOf converts settings of the driver to the texts that package ethtool has for them.
func ethtoolOf(c *v1alpha1.Ethtool) (function.Ethtool, error) {
	if c == nil {
		return nil, nil
	}

	settings := function.Ethtool{}
	add := func(group, name, value string) {
		if settings[group] == nil {
			settings[group] = map[string]string{}
		}
		settings[group][name] = value
	}

	for group, flags := range map[string]map[string]bool{
		"features": c.Features, "private flags": c.PrivateFlags,
	} {
		for name, on := range flags {
			add(group, name, map[bool]string{true: "on", false: "off"}[on])
		}
	}

	for name, on := range c.Pause {
		add("pause", name, map[bool]string{true: "1", false: "0"}[on])
	}

	for group, numbers := range map[string]map[string]int32{
		"channels": c.Channels, "rings": c.Rings, "coalescing": c.Coalescing,
	} {
		for name, number := range numbers {
			add(group, name, strconv.Itoa(int(number)))
		}
	}

	rss, err := rssOf(c.RSS)
	if len(rss) > 0 {
		settings[function.RSSGroup] = rss
	}

	return settings, err
}

// rssOf converts what a pod asks of RSS.
func rssOf(c *v1alpha1.RSS) (map[string]string, error) {
	if c == nil {
		return nil, nil
	}

	var errs []error
	settings := map[string]string{}
	if c.Equal != nil && len(c.Weights) > 0 {
		errs = append(errs, errors.New("ethtool.rss: only one of equal and weights may be given"))
	}
	switch {
	case c.Equal != nil:
		settings[function.RSSTable] = function.RSSEqual + strconv.Itoa(int(*c.Equal))
	case len(c.Weights) > 0:
		settings[function.RSSTable] = function.RSSWeights + strings.Trim(fmt.Sprint(c.Weights), "[]")
	}

	if c.HashKey != "" {
		if !keyPattern().MatchString(c.HashKey) {
			errs = append(errs, fmt.Errorf("ethtool.rss.hashKey: %s", mustBeKey))
		}
		settings[function.RSSKey] = strings.ToLower(strings.ReplaceAll(c.HashKey, ":", ""))
	}
	if c.HashFunction != "" {
		number, err := function.RSSFunctionNumber(c.HashFunction)
		if err != nil {
			errs = append(errs, fmt.Errorf("ethtool.rss.hashFunction %w", err))
		}
		settings[function.RSSFunction] = number
	}

	return settings, errors.Join(errs...)
}

// hashKeyPattern is the form of a hash key, in the syntax of RE2, as ethtool -x has it. mustBeKey
// says so in words.
const (
	hashKeyPattern = "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2})*$"
	mustBeKey      = "must be a key in hexadecimal such as 6d:5a:56"
)

var keyPattern = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(hashKeyPattern) })

// replaceTable removes the table of RSS from base if over has another one, because equal shares and
// weights are two forms of the same setting.
func replaceTable(base, over *v1alpha1.Ethtool) {
	hasBoth := base != nil && over != nil && base.RSS != nil && over.RSS != nil
	if hasBoth && (over.RSS.Equal != nil || len(over.RSS.Weights) > 0) {
		base.RSS.Equal, base.RSS.Weights = nil, nil
	}
}
