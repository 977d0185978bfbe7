// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// foreign are messages, or parts of messages, of Kubernetes, container runtimes and Multus.
var foreign = []string{
	"device class xpu-none does not exist", "cannot allocate all claims",
	"waiting for binding conditions for device on node node1",
	"device binding failed:", "reason=Failed, message=", "unresolvable CDI devices",
	"NRI RunPodSandbox failed:", "Allocate failed due to rpc error:",
	"Insufficient", "failed to find plugin", "in path [/opt/cni/bin]", "mount source path",
	"no such file or directory", "strict decoding error: unknown field",
	"failed to create ResourceClaim:", "denied request:", ": unknown field",
	// short constant texts before a verb of a format
	"request nic:", "claim default/net:", "parameters in the claim:",
	"dial unix", "the network is missing", "because of", "connect: connection refused",
}

var (
	verb = regexp.MustCompile(`%[-+# 0]*[0-9.\[\]]*[a-zA-Z]`)
	// prose matches a word. names matches names of objects and keys that look like words.
	prose = regexp.MustCompile(`^[a-z]{4,}[,.;:]?$`)
	names = regexp.MustCompile(`^(blue|nowhere|vlan|vlna|shared)[,.;:]?$`)
	code  = regexp.MustCompile("`([^`]+)`")
	logs  = regexp.MustCompile(`msg="((?:[^"\\]|\\.)*)"`)
)

// pieces returns the constant parts, with at least one space, of the strings in the programs.
func pieces(t testing.TB) (all []string) {
	t.Helper()
	for _, file := range files(t, func(path string) bool {
		return strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") &&
			(strings.HasPrefix(path, "pkg/") || strings.HasPrefix(path, "cni/") ||
				strings.HasPrefix(path, "cmd/"))
	}) {
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil,
			parser.SkipObjectResolution)
		must.Succeed(t, err)

		for node := range ast.Preorder(parsed) {
			if text, ok := constant(node); ok {
				for _, piece := range verb.Split(text, -1) {
					if piece = strings.Trim(piece, " "); strings.Contains(piece, " ") ||
						len(piece) >= 8 {
						all = append(all, piece)
					}
				}
			}
		}
	}

	return all
}

// constant returns the value of a string constant, which may be a sum of parts.
func constant(node ast.Node) (string, bool) {
	switch node := node.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(node.Value)
		return text, err == nil && node.Kind == token.STRING
	case *ast.BinaryExpr:
		left, leftOK := constant(node.X)
		right, rightOK := constant(node.Y)
		return left + right, node.Op == token.ADD && leftOK && rightOK
	}
	return "", false
}

// strange returns the words of prose in a message that no string of the programs has.
func strange(message string, known []string) (words []string) {
	covered := make([]bool, len(message))
	for _, piece := range known {
		for at := 0; ; {
			i := strings.Index(message[at:], piece)
			if i < 0 {
				break
			}
			for j := range piece {
				covered[at+i+j] = true
			}
			at += i + len(piece)
		}
	}

	at := 0
	for _, word := range strings.Split(message, " ") {
		if prose.MatchString(word) && !names.MatchString(word) && !covered[at] {
			words = append(words, word)
		}
		at += len(word) + 1
	}

	return words
}

// messages returns the messages in the documents: all log messages, and the table of debug.md.
func messages(t testing.TB) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, file := range files(t, func(path string) bool {
		return strings.HasSuffix(path, ".md")
	}) {
		content, err := os.ReadFile(filepath.Join(root, file))
		must.Succeed(t, err)

		for _, match := range logs.FindAllStringSubmatch(string(content), -1) {
			found[strings.ReplaceAll(match[1], `\"`, `"`)] = file
		}

		if file != "docs/how-to/debug.md" {
			continue
		}

		for line := range strings.Lines(string(content)) {
			if cells := strings.Split(line, " | "); strings.HasPrefix(line, "| ") &&
				len(cells) == 4 {
				for _, match := range code.FindAllStringSubmatch(cells[2], -1) {
					if strings.Contains(match[1], " ") {
						found[match[1]] = file
					}
				}
			}
		}
	}

	return found
}

// TestMessages checks that the programs have the messages that the documents quote.
func TestMessages(t *testing.T) {
	known := append(pieces(t), foreign...)
	all := messages(t)
	for message, file := range all {
		if words := strange(message, known); len(words) > 0 {
			t.Errorf("%s: %q: no program says %q", file, message, words)
		}
	}

	if len(all) < 40 {
		t.Errorf("only %d messages were found", len(all))
	}
	if words := strange("the Function has gone to the moon: no Function", known); len(words) == 0 {
		t.Error("a message that nobody says is accepted")
	}
}
