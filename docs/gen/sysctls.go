// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

const sysctlsBegin = "<!-- Made by docs/gen from pkg/function. Do not edit. -->\n"

// sysctlsList replaces the list of sysctls in a page.
func sysctlsList(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}

	list := "```text\n" + strings.Join(function.SysctlNames(), "\n") + "\n```\n"
	made, err := replace(string(page), sysctlsBegin, list)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}

	return os.WriteFile(path, []byte(made), 0o644)
}
