// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Seed writes files to a directory with which the go command builds an opi-bridge that has any of
// the faults, as [Variable] says, and returns the file for -overlay. root is the directory of the
// module. Faults that are not in a function's body cannot share a program with others: they are
// returned as alone, for [Seed] with them only and without the rest.
func Seed(root, dir string, all []Fault) (overlay string, alone []Fault, err error) {
	byFile := map[string][]Fault{}
	for _, f := range all {
		byFile[f.file] = append(byFile[f.file], f)
	}

	replace, files := map[string]string{}, 0
	add := func(path, content string) error {
		path, err := filepath.Abs(filepath.Join(root, path))
		if err != nil {
			return err
		}
		files++
		file := filepath.Join(dir, fmt.Sprintf("seeded%d.go", files))
		replace[path] = file
		return os.WriteFile(file, []byte(content), 0o600)
	}

	for _, file := range slices.Sorted(maps.Keys(byFile)) {
		s, err := parse(root, file)
		if err != nil {
			return "", nil, err
		}
		rest, err := s.seed(byFile[file])
		if err == nil {
			err = errors.Join(add(file, s.seeded()), add(filepath.Join(filepath.Dir(file),
				"seeded_fault.go"), fmt.Sprintf(selector, s.file.Name.Name, Variable)))
		}
		if err != nil {
			return "", nil, err
		}
		alone = append(alone, rest...)
	}

	return write(dir, replace, alone)
}

// Alone writes files with which the go command builds an opi-bridge that has one fault.
func Alone(root, dir string, f Fault) (overlay string, err error) {
	s, err := parse(root, f.file)
	if err != nil {
		return "", err
	}
	changed, err := f.apply(s.text)
	if err != nil {
		return "", err
	}
	path, err := filepath.Abs(filepath.Join(root, f.file))
	if err != nil {
		return "", err
	}

	file := filepath.Join(dir, "seeded.go")
	if err := os.WriteFile(file, []byte(changed), 0o600); err != nil {
		return "", err
	}
	overlay, _, err = write(dir, map[string]string{path: file}, nil)
	return overlay, err
}

func write(dir string, replace map[string]string, alone []Fault) (string, []Fault, error) {
	text, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		return "", nil, err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, alone, os.WriteFile(overlay, text, 0o600)
}

// selector is a file of each package with faults.
const selector = `package %s

import "os"

func seededFault(name string) bool { return os.Getenv(%q) == name }
`

// source is a file of the module.
type source struct {
	text  string
	file  *ast.File
	fset  *token.FileSet
	funcs map[string]*ast.FuncDecl
	other string // what is outside of functions' bodies

	variants map[string][]variant
}

// variant is the body of a function with a fault, with its braces.
type variant struct{ fault, body string }

func parse(root, file string) (*source, error) {
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return nil, err
	}
	return parseText(file, string(text))
}

func parseText(name, text string) (*source, error) {
	s := &source{
		text: text, fset: token.NewFileSet(), funcs: map[string]*ast.FuncDecl{},
		variants: map[string][]variant{},
	}
	var err error
	if s.file, err = parser.ParseFile(s.fset, name, text, parser.SkipObjectResolution); err != nil {
		return nil, err
	}

	end := 0
	for _, d := range s.file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		s.funcs[s.between(f.Pos(), f.Body.Pos())] = f
		s.other += text[end:s.offset(f.Body.Pos())]
		end = s.offset(f.Body.End())
	}
	s.other += text[end:]

	return s, nil
}

func (s *source) offset(p token.Pos) int { return s.fset.Position(p).Offset }

func (s *source) between(from, to token.Pos) string { return s.text[s.offset(from):s.offset(to)] }

// seed notes the functions that faults change, and returns the faults that change something else.
func (s *source) seed(all []Fault) (rest []Fault, err error) {
	for _, f := range all {
		changed, err := f.apply(s.text)
		if err != nil {
			return nil, err
		}
		to, err := parseText(f.file, changed)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
		if s.other != to.other {
			rest = append(rest, f)
			continue
		}

		for signature, before := range s.funcs {
			body := to.bodyOf(to.funcs[signature])
			if body != s.bodyOf(before) {
				s.variants[signature] = append(s.variants[signature], variant{f.Name, body})
			}
		}
	}
	return rest, nil
}

func (s *source) bodyOf(f *ast.FuncDecl) string { return s.between(f.Body.Pos(), f.Body.End()) }

// seeded returns the file in which each changed function begins with its variants.
func (s *source) seeded() string {
	type insertion struct {
		at   int
		text string
	}
	var all []insertion
	for signature, variants := range s.variants {
		f := s.funcs[signature]
		var text strings.Builder
		for _, v := range variants {
			format := "\nif seededFault(%q) {\nfunc()%s %s()\nreturn\n}\n"
			results := ""
			if f.Type.Results != nil {
				format = "\nif seededFault(%q) {\nreturn func() %s %s()\n}\n"
				results = s.between(f.Type.Results.Pos(), f.Type.Results.End())
			}
			fmt.Fprintf(&text, format, v.fault, results, v.body)
		}
		all = append(all, insertion{s.offset(f.Body.Lbrace) + 1, text.String()})
	}

	slices.SortFunc(all, func(a, b insertion) int { return b.at - a.at })
	text := s.text
	for _, i := range all {
		text = text[:i.at] + i.text + text[i.at:]
	}
	return text
}
