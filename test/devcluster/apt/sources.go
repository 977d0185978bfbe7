// SPDX-License-Identifier: Apache-2.0

package apt

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Source is one package archive, like a "deb" line of sources.list(5).
type Source struct {
	URI        string
	Suite      string   // a release name ("trixie"), not a security or updates suite
	Components []string // for example main
	// absolute path of the keyring; empty means the keys that apt trusts by default
	SignedBy string
}

// line returns the source in the one-line style of sources.list(5).
func (s Source) line() string {
	options := ""
	if s.SignedBy != "" {
		options = "[signed-by=" + s.SignedBy + "] "
	}
	return fmt.Sprintf("deb %s%s %s %s\n", options, s.URI, s.Suite, strings.Join(s.Components, " "))
}

// In returns the same archive with another suite.
func (s Source) In(suite string) Source {
	s.Suite = suite
	return s
}

// MachineSource returns the first binary source in the machine's apt configuration below etc
// (/etc/apt): sources.list.d/debian.sources or ubuntu.sources, then sources.list, then the other
// files of sources.list.d. It skips sources for other releases than codename, which is the
// machine's (VERSION_CODENAME in os-release).
func MachineSource(etc, codename string) (Source, error) {
	files := []string{
		filepath.Join(etc, "sources.list.d/debian.sources"),
		filepath.Join(etc, "sources.list.d/ubuntu.sources"),
		filepath.Join(etc, "sources.list"),
	}

	more, err := filepath.Glob(filepath.Join(etc, "sources.list.d/*"))
	if err != nil {
		return Source{}, fmt.Errorf("apt sources: %w", err)
	}

	for _, file := range append(files, more...) {
		content, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return Source{}, fmt.Errorf("apt sources: %w", err)
		}

		var found []Source
		switch filepath.Ext(file) {
		case ".sources":
			found = parseDeb822(string(content))
		case ".list":
			found = parseOneLine(string(content))
		}

		for _, s := range found {
			if s.Suite == codename && slices.Contains(s.Components, "main") {
				return s, nil
			}
		}
	}

	return Source{}, fmt.Errorf("apt sources: no source of suite %q with component main under %s",
		codename, etc)
}

// parseDeb822 parses a .sources file into one Source per URI and suite. It omits disabled stanzas
// and stanzas without binary packages. Embedded keys (Signed-By with a key block) are not
// supported: such a source is returned without SignedBy.
func parseDeb822(content string) []Source {
	var found []Source
	for _, stanza := range deb822Stanzas(content) {
		if !slices.Contains(strings.Fields(stanza["types"]), "deb") ||
			strings.EqualFold(stanza["enabled"], "no") {
			continue
		}

		signedBy := stanza["signed-by"]
		if !filepath.IsAbs(signedBy) || strings.ContainsAny(signedBy, " \n") {
			signedBy = ""
		}

		for _, uri := range strings.Fields(stanza["uris"]) {
			for _, suite := range strings.Fields(stanza["suites"]) {
				found = append(found, Source{URI: uri, Suite: suite,
					Components: strings.Fields(stanza["components"]), SignedBy: signedBy})
			}
		}
	}

	return found
}

// deb822Stanzas splits deb822(5) text into stanzas with lower-case field names.
func deb822Stanzas(content string) []map[string]string {
	var stanzas []map[string]string
	current, field := map[string]string{}, ""
	flush := func() {
		if len(current) > 0 {
			stanzas = append(stanzas, current)
		}
		current, field = map[string]string{}, ""
	}

	for line := range strings.Lines(content) {
		line = strings.TrimRight(line, " \t\r\n")
		switch {
		case line == "":
			flush()
		case line[0] == '#':
		case line[0] == ' ' || line[0] == '\t':
			if field != "" {
				current[field] += "\n" + strings.TrimSpace(line)
			}
		default:
			name, value, ok := strings.Cut(line, ":")
			if !ok {
				continue
			}
			field = strings.ToLower(strings.TrimSpace(name))
			current[field] = strings.TrimSpace(value)
		}
	}

	flush()
	return stanzas
}

// parseOneLine parses "deb [options] URI SUITE COMPONENT..." lines.
func parseOneLine(content string) []Source {
	var found []Source
	scanner := bufio.NewScanner(strings.NewReader(content))
	for scanner.Scan() {
		line, _, _ := strings.Cut(scanner.Text(), "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb ")
		if !ok {
			continue
		}

		var s Source
		rest = strings.TrimSpace(rest)
		if options, after, ok := strings.Cut(rest, "]"); ok && strings.HasPrefix(rest, "[") {
			for _, option := range strings.Fields(options[1:]) {
				if path, ok := strings.CutPrefix(option, "signed-by="); ok && filepath.IsAbs(path) {
					s.SignedBy = path
				}
			}
			rest = after
		}

		fields := strings.Fields(rest)
		if len(fields) < 3 {
			continue
		}

		s.URI, s.Suite, s.Components = fields[0], fields[1], fields[2:]
		found = append(found, s)
	}

	return found
}
