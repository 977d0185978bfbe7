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

// FECGroup is the group of [Ethtool] with the forward error correction of a port (IEEE 802.3,
// ETHTOOL_MSG_FEC_SET of linux/ethtool_netlink.h).
const FECGroup = "FEC"

// Settings of the group [FECGroup].
const (
	FECAuto  = "auto"  // "1" if the driver chooses the mode, or else "0"
	FECNames = "modes" // the kernel's names of the modes, with blanks between them
)

// fecModes are the kernel's names of modes (link_mode_names of net/ethtool/common.c) by the names
// that the program ethtool has for them.
var fecModes = map[string]string{"off": "None", "rs": "RS", "baser": "BASER", "llrs": "LLRS"}

// FECModes returns the names of the modes of [FEC].
func FECModes() []string {
	return slices.Sorted(slices.Values(append(slices.Collect(maps.Keys(fecModes)), FECAuto)))
}

// FEC returns the settings of the group [FECGroup] for modes of [FECModes].
func FEC(modes []string) (map[string]string, error) {
	settings := map[string]string{FECAuto: "0"}
	var names []string
	for _, mode := range modes {
		name, known := fecModes[mode]
		switch {
		case mode == FECAuto:
			settings[FECAuto] = "1"
		case known:
			names = append(names, name)
		default:
			return nil, fmt.Errorf("%q: must be one of %s", cut(mode), strings.Join(FECModes(), ", "))
		}
	}

	slices.Sort(names)
	settings[FECNames] = strings.Join(slices.Compact(names), " ")
	return settings, nil
}

// FECModeOf returns the name of [FECModes] for the kernel's name of a mode, or the kernel's name if
// there is none.
func FECModeOf(kernelName string) string {
	for name, of := range fecModes {
		if of == kernelName {
			return name
		}
	}
	return kernelName
}

func validateFEC(settings map[string]string) error {
	choice := strings.Join(FECModes(), ", ")
	known := slices.Collect(maps.Values(fecModes))
	names := strings.Fields(settings[FECNames])
	for _, name := range names {
		if !slices.Contains(known, name) {
			return fmt.Errorf("ethtool.fec %q: must be one of %s", cut(name), choice)
		}
	}
	if len(names) == 0 && settings[FECAuto] != "1" {
		return fmt.Errorf("ethtool.fec: must have one of %s", choice)
	}
	return nil
}
