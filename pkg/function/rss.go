// SPDX-License-Identifier: Apache-2.0

package function

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// RSSGroup is the group of [Ethtool] that says how a card spreads received packets over its queues
// (receive side scaling, Documentation/networking/scaling.rst).
const RSSGroup = "RSS"

// Settings of the group [RSSGroup].
const (
	// RSSTable is "equal N" for equal shares of the first N queues, or "weights 3 1" with the shares
	// of the queues from the first one.
	RSSTable = "table"
	// RSSKey is the key of the hash in hexadecimal.
	RSSKey = "hash key"
	// RSSFunction is the number of the hash function: see [RSSFunctions].
	RSSFunction = "hash function"
)

// Beginnings of the values of [RSSTable].
const (
	RSSEqual   = "equal "
	RSSWeights = "weights "
)

// Limits of what a pod may ask for. They are larger than what cards have.
const (
	MaxRSSQueues = 1024  // queues
	MaxRSSWeight = 65535 // of a queue
	MaxRSSKey    = 128   // bytes
)

// rssFunctions are the numbers of hash functions by their names (ETH_RSS_HASH_* of
// linux/ethtool.h, rss_hash_func_strings of net/ethtool/common.c).
var rssFunctions = map[string]string{"toeplitz": "1", "xor": "2", "crc32": "4"}

// RSSFunctions returns the names of the hash functions.
func RSSFunctions() []string { return slices.Sorted(maps.Keys(rssFunctions)) }

// RSSFunctionNumber returns the value of [RSSFunction] for a name of [RSSFunctions].
func RSSFunctionNumber(name string) (string, error) {
	number, known := rssFunctions[name]
	if !known {
		return "", fmt.Errorf("%q: must be one of %s", cut(name), strings.Join(RSSFunctions(), ", "))
	}
	return number, nil
}

func validateRSS(settings map[string]string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		value := settings[name]
		switch name {
		case RSSTable:
			errs = append(errs, validateTable(value))
		case RSSKey:
			key, err := hex.DecodeString(value)
			if err != nil || len(key) == 0 || len(key) > MaxRSSKey {
				errs = append(errs, fmt.Errorf("ethtool.rss.hashKey: must be 1-%d bytes such as "+
					"6d:5a:56", MaxRSSKey))
			}
		case RSSFunction:
			if !slices.Contains(slices.Collect(maps.Values(rssFunctions)), value) {
				errs = append(errs, fmt.Errorf("ethtool.rss.hashFunction: must be one of %s",
					strings.Join(RSSFunctions(), ", ")))
			}
		default:
			errs = append(errs, fmt.Errorf("ethtool.rss: %q cannot be set", cut(name)))
		}
	}
	return errors.Join(errs...)
}

func validateTable(text string) error {
	if count, isEqual := strings.CutPrefix(text, RSSEqual); isEqual {
		if n, err := strconv.ParseUint(count, 10, 32); err != nil || n < 1 || n > MaxRSSQueues {
			return fmt.Errorf("ethtool.rss.equal %q: must be 1-%d", cut(count), MaxRSSQueues)
		}
		return nil
	}

	list, isWeights := strings.CutPrefix(text, RSSWeights)
	if !isWeights {
		return fmt.Errorf("ethtool.rss: table %q: must be equal shares or weights", cut(text))
	}

	weights, sum := strings.Fields(list), uint64(0)
	if len(weights) > MaxRSSQueues {
		return fmt.Errorf("ethtool.rss.weights: has %d, at most %d may be given", len(weights),
			MaxRSSQueues)
	}
	for _, weight := range weights {
		n, err := strconv.ParseUint(weight, 10, 16)
		if err != nil {
			return fmt.Errorf("ethtool.rss.weights %q: must be 0-%d", cut(weight), MaxRSSWeight)
		}
		sum += n
	}
	if sum == 0 {
		return errors.New("ethtool.rss.weights: must have one that is not 0")
	}

	return nil
}
