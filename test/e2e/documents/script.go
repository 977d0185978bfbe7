// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// exitCode are the commands that ask for the exit code of the block before.
const exitCode = "echo $?\n"

// prelude has mark, which prints the number of the block that follows, and failed, which ends the
// script if the last command has not failed. Both keep the exit code of the last command.
const prelude = `shopt -s expand_aliases
mark() { local code=$?; printf '\n@@@ %s\n' $1; return $code; }
failed() { local code=$?; [ $code -ne 0 ] || { echo 'it should fail'; exit 1; }; return $code; }
set -e
`

// Script returns a bash script that does what a reader of the document does. A command that fails ends
// the script, unless the document says that it fails, or asks for its exit code.
func Script(blocks []Block) string {
	var script strings.Builder
	script.WriteString(prelude)
	for i, block := range blocks {
		if block.NotRun != "" || block.Commands == "" {
			continue
		}
		isAsked := i+1 < len(blocks) && blocks[i+1].Commands == exitCode

		fmt.Fprintf(&script, "mark %d\n", i)
		if block.Fails || isAsked {
			script.WriteString("set +e\n")
		}
		script.WriteString(block.Commands)
		if block.Fails {
			script.WriteString("failed\n")
		}
		if block.Fails && !isAsked || block.Commands == exitCode {
			script.WriteString("set -e\n")
		}
	}
	return script.String()
}

// Part is what the commands of a block printed.
type Part struct {
	// Block is the index of the block.
	Block  int
	Output string
}

var marks = regexp.MustCompile(`(?m)^@@@ ([0-9]+)\n`)

// Parts divides what a document's script printed.
func Parts(out string) (parts []Part) {
	found := marks.FindAllStringSubmatchIndex(out, -1)
	for i, at := range found {
		end := len(out)
		if i+1 < len(found) {
			end = found[i+1][0]
		}
		block, _ := strconv.Atoi(out[at[2]:at[3]])
		parts = append(parts, Part{block, out[at[1]:end]})
	}
	return parts
}
