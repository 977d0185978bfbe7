// SPDX-License-Identifier: Apache-2.0

// Package documents reads the commands in documents, the files that readers save, and the outputs that
// the documents show, so that a test can do what a reader does.
package documents

import (
	"fmt"
	"regexp"
	"strings"
)

// Block is a block of a document.
type Block struct {
	// Line is the number of its first line.
	Line int
	// Commands are for a shell; "" for a block that is a file.
	Commands string
	// File is the name under which the reader saves Content.
	File, Content string
	// Output are the lines that the document shows below the commands; nil if it shows none.
	Output []string
	// Fails means that the document says that the command fails. There is one command then.
	Fails bool
	// NotRun is the reason why the commands cannot be run by a test; "" if they can.
	NotRun string
}

var (
	notRun = regexp.MustCompile(`^<!-- not run: (.+) -->$`)
	save   = regexp.MustCompile("(?s)[Ss]ave.*`([A-Za-z0-9.-]+)`")
	// command matches the first line of an indented block with commands, but not YAML and prose.
	command = regexp.MustCompile(`^ {4}(\.?[a-zA-Z][A-Za-z0-9_./-]*)( |$|=)`)
)

// parser goes through a document line by line.
type parser struct {
	lines  []string
	at     int
	blocks []Block
	// prose is the text since the last block; reason and fails are those of markers in it.
	prose  strings.Builder
	reason string
	fails  bool
}

// Parse returns the blocks of a document: commands, which are indented by four blanks, or in blocks of
// language console or text after "$ "; and files, which are blocks after a sentence with "Save". A
// comment before a block, "<!-- not run: REASON -->", says why it is not run, and "<!-- fails -->" that
// its only command fails.
func Parse(text string) ([]Block, error) {
	p := &parser{lines: strings.Split(text, "\n")}
	for p.at < len(p.lines) {
		line := p.lines[p.at]
		switch language, isFence := strings.CutPrefix(line, "```"); {
		case isFence:
			if err := p.fence(language); err != nil {
				return nil, err
			}
		case command.MatchString(line) && p.at > 0 && p.lines[p.at-1] == "" && !p.inList():
			p.indented()
		default:
			p.fails = p.fails || line == "<!-- fails -->"
			if found := notRun.FindStringSubmatch(line); found != nil {
				p.reason = found[1]
			}
			p.prose.WriteString(line + "\n")
			p.at++
		}
	}

	for _, block := range p.blocks {
		if block.Fails && strings.Count(block.Commands, "\n") != 1 {
			return nil, fmt.Errorf("line %d: a block that fails must have one command", block.Line)
		}
	}
	return p.blocks, nil
}

// inList reports whether the last paragraph is an item of a list, to which indented lines belong.
func (p *parser) inList() bool {
	prose := strings.TrimRight(p.prose.String(), "\n")
	paragraph := prose[strings.LastIndex(prose, "\n\n")+1:]
	return regexp.MustCompile(`^\s*([-*]|[0-9]+\.) `).MatchString(paragraph)
}

// add appends a block, and begins new prose.
func (p *parser) add(b Block) {
	b.NotRun, b.Fails = p.reason, p.fails
	p.blocks, p.reason, p.fails = append(p.blocks, b), "", false
	p.prose.Reset()
}

// indented reads commands that are indented.
func (p *parser) indented() {
	b := Block{Line: p.at + 1}
	for ; p.at < len(p.lines) && strings.HasPrefix(p.lines[p.at], "    "); p.at++ {
		b.Commands += p.lines[p.at][4:] + "\n"
	}
	p.add(b)
}

// fence reads a block between fences.
func (p *parser) fence(language string) error {
	start := p.at + 1
	var content []string
	for p.at++; ; p.at++ {
		if p.at == len(p.lines) {
			return fmt.Errorf("line %d: the block does not end", start)
		}
		if p.lines[p.at] == "```" {
			break
		}
		content = append(content, p.lines[p.at])
	}
	p.at++

	isSession := len(content) > 0 && strings.HasPrefix(content[0], "$ ")
	saved := save.FindStringSubmatch(p.prose.String())
	switch {
	case isSession && (language == "console" || language == "text"):
		p.session(start, content)
	case language == "text" && strings.TrimSpace(p.prose.String()) == "" && len(p.blocks) > 0:
		p.blocks[len(p.blocks)-1].Output = content
	case saved != nil:
		p.add(Block{Line: start, File: saved[1], Content: strings.Join(content, "\n") + "\n"})
	default:
		p.prose.Reset()
	}
	return nil
}

// session reads commands after "$ " and their outputs.
func (p *parser) session(start int, content []string) {
	reason := p.reason
	for i, line := range content {
		if text, isCommand := strings.CutPrefix(line, "$ "); isCommand {
			p.reason = reason
			p.add(Block{Line: start + i + 1, Commands: text + "\n", Output: []string{}})
			continue
		}
		last := &p.blocks[len(p.blocks)-1]
		last.Output = append(last.Output, line)
	}
}

var (
	space = regexp.MustCompile(`\s+`)
	// random matches the random part that Kubernetes adds to a name, which has digits or has none
	// (k8s.io/apimachinery/pkg/util/rand).
	random = regexp.MustCompile(`-[bcdfghjklmnpqrstvwxz2456789]{5}\b`)
	// varying matches words with digits, without the punctuation after them.
	varying = regexp.MustCompile(`[\pL0-9_.:/+-]*[0-9]([\pL0-9_.:/+-]*[\pL0-9])?`)
	// steady matches words with digits that are the same in each run: counts and exit codes, which are
	// small, and "1/1". Other words with digits are times, addresses and names with random parts.
	steady = regexp.MustCompile(`^[0-9]{1,4}(/[0-9]{1,4})?$`)
)

// shape is a line without what differs from one run to another.
func shape(line string) string {
	line = random.ReplaceAllString(line, "-#")
	line = varying.ReplaceAllStringFunc(line, func(word string) string {
		if steady.MatchString(word) {
			return word
		}
		return "#"
	})
	return strings.TrimSpace(space.ReplaceAllString(line, " "))
}

// Missing returns the first line of the shown output that a real output does not have, in its shape:
// times, addresses, random names and the width of blanks may differ, and counts may not. "..." in
// the shown output stands for any text.
func Missing(shown []string, output string) string {
	var real []string
	for line := range strings.Lines(output) {
		real = append(real, shape(line))
	}

	for _, line := range shown {
		if line = strings.TrimSpace(line); line == "..." || line == "" {
			continue
		}
		parts := strings.Split(line, "...")
		for i := range parts {
			parts[i] = regexp.QuoteMeta(shape(parts[i]))
		}
		is := regexp.MustCompile("^" + strings.Join(parts, " ?.* ?") + "$")
		found := false
		for _, line := range real {
			found = found || is.MatchString(line)
		}
		if !found {
			return line
		}
	}
	return ""
}
