// SPDX-License-Identifier: Apache-2.0

// Command report takes the report of a conformance test out of the log of a guest, and prints it. The
// guest has no other way to the documents.
//
//	go run ./test/qemu/cmd/qemutest -guest simnic -only bridge -run '^TestDataPlanes$/^vlan-aware$/^Conformance$'
//	go run ./test/conformance/report bin/qemu/simnic/tests.log > docs/reference/opi-bridge-conformance-vlan-aware.json
package main

import (
	"compress/gzip"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"strings"
)

// Marker is before the report, which is compressed by gzip and written as base64.
const marker = "conformance report: "

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "report: usage: report LOG")
		os.Exit(2)
	}
	if err := extract(os.Args[1], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func extract(path string, to io.Writer) error {
	log, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	_, after, found := strings.Cut(string(log), marker)
	if !found {
		return fmt.Errorf("%s: there is no report in it", path)
	}

	text, _, _ := strings.Cut(after, "\n")
	report, err := gzip.NewReader(base64.NewDecoder(base64.StdEncoding,
		strings.NewReader(strings.TrimSpace(text))))
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if _, err := io.Copy(to, report); err != nil { //nolint:gosec // it is this project's own report
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
