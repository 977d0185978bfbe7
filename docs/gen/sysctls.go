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

	before, rest, ok := strings.Cut(string(page), sysctlsBegin)
	_, after, ended := strings.Cut(rest, tableEnd)
	if !ok || !ended {
		return fmt.Errorf("%s: the lines that enclose the list are missing", path)
	}

	list := "\n```text\n" + strings.Join(function.SysctlNames(), "\n") + "\n```\n\n"
	return os.WriteFile(path, []byte(before+sysctlsBegin+list+tableEnd+after), 0o644)
}
