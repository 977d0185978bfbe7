// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/opiproject/xpu-device-plugin/test/matrix/result"
)

const versionsBegin = "<!-- Made by docs/gen from docs/gen/versions.yaml, which scripts/matrix " +
	"writes. Do not edit. -->\n"

// versionsTable replaces the table of versions that the story was told on.
func versionsTable(path, results string) error {
	all, err := result.Read(results)
	if err != nil {
		return err
	}
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}

	text, err := replace(string(page), versionsBegin, strings.TrimSuffix(result.Table(all), "\n")+"\n")
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return os.WriteFile(path, []byte(text), 0o644)
}
