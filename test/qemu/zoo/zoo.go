// SPDX-License-Identifier: Apache-2.0

// Package zoo has the personalities of cards that the project does not have: the behaviour of their
// drivers by the kernel's sources and public reports. Package simnic plays them in a guest. A file
// that "xpuctl hardware-report" wrote belongs here too.
package zoo

import (
	"embed"
	"fmt"
	"path"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
)

//go:embed *.yaml
var files embed.FS

// All returns all personalities, sorted by name.
func All() ([]personality.Personality, error) {
	entries, err := files.ReadDir(".")
	if err != nil {
		return nil, err
	}

	var all []personality.Personality
	for _, entry := range entries {
		content, err := files.ReadFile(entry.Name())
		if err != nil {
			return nil, err
		}

		p, err := personality.Parse(content)
		if err == nil && p.Name != strings.TrimSuffix(entry.Name(), path.Ext(entry.Name())) {
			err = fmt.Errorf("name: %q is not that of the file", p.Name)
		}
		if err != nil {
			return nil, fmt.Errorf("personality %s: %w", entry.Name(), err)
		}

		all = append(all, p)
	}

	return all, nil
}

// Third returns every third personality. The number, which changes from day to day or from commit
// to commit, selects them: three numbers in a row have all.
func Third(all []personality.Personality, number int) []personality.Personality {
	var third []personality.Personality
	for i := (number%3 + 3) % 3; i < len(all); i += 3 {
		third = append(third, all[i])
	}
	return third
}
