// SPDX-License-Identifier: Apache-2.0

// Style checks how the Go files that are named as arguments read: that each says its license, that
// lines fit beside another file, that functions have paragraphs, and that comments are plain
// English. It prints what is wrong with file and line.
package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strings"
)

const (
	columns  = 100 // of a line, where a tab counts as tabWidth
	tabWidth = 4
	// mostWide is the share of wider lines. Some cannot be broken, such as raw strings and URLs.
	mostWide = 0.01
	// leastBlank and mostBlank are the share of blank lines in function bodies.
	leastBlank, mostBlank = 0.06, 0.125
	// mostRiddles is how often a phrase may stand in comments, for each word.
	mostRiddles = 0.5 / 1000
)

const license = "// SPDX-License-Identifier: Apache-2.0\n"

// riddles are phrases after which a reader has to look for the noun.
var riddles = []*regexp.Regexp{
	regexp.MustCompile(`\b([Tt]hat|[Tt]hose) (of|which)\b`),
	regexp.MustCompile(`\b([Tt]ells?|[Tt]old)\b`),
	regexp.MustCompile(`\b(is|are) none\b`),
	regexp.MustCompile(`\b([Nn]obody|[Ss]omebody|[Ww]hoever)\b`),
}

func main() {
	s := &survey{fset: token.NewFileSet(), riddles: make([][]string, len(riddles))}
	for _, name := range os.Args[1:] {
		if err := s.file(name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
	}

	if problems := s.problems(); len(problems) > 0 {
		fmt.Println(strings.Join(problems, "\n"))
		os.Exit(1)
	}
}

// survey counts over all files.
type survey struct {
	fset *token.FileSet

	unlicensed  []string
	lines       int
	wide        []string
	body, blank int
	words       int
	riddles     [][]string
}

// file adds a file to the survey. Generated files do not count.
func (s *survey) file(name string) error {
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	tree, err := parser.ParseFile(s.fset, name, text, parser.ParseComments)
	if err != nil {
		return err
	}
	if ast.IsGenerated(tree) {
		return nil
	}

	if !bytes.HasPrefix(text, []byte(license)) {
		s.unlicensed = append(s.unlicensed, name)
	}
	lines := strings.Split(string(text), "\n")
	for i, line := range lines {
		s.lines++
		if width(line) > columns {
			s.wide = append(s.wide, fmt.Sprintf("%s:%d", name, i+1))
		}
	}

	s.bodies(tree, lines)
	s.comments(tree)
	return nil
}

func width(line string) int {
	return len([]rune(line)) + strings.Count(line, "\t")*(tabWidth-1)
}

// bodies counts the lines of function bodies.
func (s *survey) bodies(tree *ast.File, lines []string) {
	for _, declaration := range tree.Decls {
		function, ok := declaration.(*ast.FuncDecl)
		if !ok || function.Body == nil {
			continue
		}

		first := s.fset.Position(function.Body.Lbrace).Line
		last := s.fset.Position(function.Body.Rbrace).Line
		for _, line := range lines[first:max(first, last-1)] {
			s.body++
			if strings.TrimSpace(line) == "" {
				s.blank++
			}
		}
	}
}

func (s *survey) comments(tree *ast.File) {
	for _, group := range tree.Comments {
		text := strings.Join(strings.Fields(group.Text()), " ")
		s.words += len(strings.Fields(text))
		for i, riddle := range riddles {
			for _, found := range riddle.FindAllString(text, -1) {
				at := s.fset.Position(group.Pos())
				s.riddles[i] = append(s.riddles[i],
					fmt.Sprintf("%s:%d: %q", at.Filename, at.Line, found))
			}
		}
	}
}

// problems are what the survey found wrong.
func (s *survey) problems() (problems []string) {
	for _, name := range s.unlicensed {
		problems = append(problems, fmt.Sprintf("%s: must begin with %q", name, license))
	}

	if share := share(len(s.wide), s.lines); share > mostWide {
		problems = append(problems, fmt.Sprintf("%.2f %% of all lines have more than %d columns, "+
			"which may be %.2f %%:", 100*share, columns, 100*mostWide))
		problems = append(problems, s.wide...)
	}

	if share := share(s.blank, s.body); s.body > 0 && (share < leastBlank || share > mostBlank) {
		problems = append(problems, fmt.Sprintf("%.1f of 100 lines in functions are blank, want "+
			"%.0f to %.1f: a paragraph prepares, acts or concludes", 100*share, 100*leastBlank,
			100*mostBlank))
	}

	for i, riddle := range riddles {
		if share := share(len(s.riddles[i]), s.words); share > mostRiddles {
			problems = append(problems, fmt.Sprintf("comments have %s %.2f times in 1000 words, "+
				"which may be %.2f times; name the thing instead:", riddle, 1000*share,
				1000*mostRiddles))
			problems = append(problems, s.riddles[i]...)
		}
	}

	return problems
}

func share(n, of int) float64 { return float64(n) / float64(max(of, 1)) }
