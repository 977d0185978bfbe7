// SPDX-License-Identifier: Apache-2.0

// Command gen writes the manifest that follows from the type InterfaceConfig and its limits:
// deploy/claims/policy.yaml. Run it at the root of the project; "make generate" does.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := os.WriteFile("deploy/claims/policy.yaml", policy(), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}
