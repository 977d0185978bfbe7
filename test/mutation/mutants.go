// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"strings"
)

// mutant is one change of a file.
type mutant struct {
	file string
	line int
	what string
	// from and to are the bounds of the bytes that text replaces.
	from, to int
	text     string
	original []byte
}

func (m mutant) String() string { return fmt.Sprintf("%s:%d: %s", m.file, m.line, m.what) }

func (m mutant) source() []byte {
	return bytes.Join([][]byte{m.original[:m.from], []byte(m.text), m.original[m.to:]}, nil)
}

// swapped maps operators to their replacements.
var swapped = map[token.Token]token.Token{
	token.EQL: token.NEQ, token.NEQ: token.EQL, token.LAND: token.LOR, token.LOR: token.LAND,
	token.LSS: token.GEQ, token.GEQ: token.LSS, token.GTR: token.LEQ, token.LEQ: token.GTR,
}

// mutants returns the changes for a file: inverted comparisons and conditions, lost errors, other
// constants, and calls, deferred calls, assignments and cases that are left out. Code that only logs
// or counts stays as it is.
func mutants(path string) ([]mutant, error) {
	original, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}

	files := token.NewFileSet()
	parsed, err := parser.ParseFile(files, path, original, 0)
	if err != nil {
		return nil, err
	}

	f := finder{path: path, original: original, files: files}
	ast.Inspect(parsed, f.visit)

	return f.found, nil
}

type finder struct {
	path     string
	original []byte
	files    *token.FileSet
	found    []mutant
}

func (f *finder) add(from, to token.Pos, what, text string) {
	position := f.files.Position(from)
	f.found = append(f.found, mutant{
		file: f.path, line: position.Line, what: what, from: position.Offset,
		to: f.files.Position(to).Offset, text: text,
		original: f.original,
	})
}

func (f *finder) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.BinaryExpr:
		if to, ok := swapped[n.Op]; ok {
			f.add(n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), n.Op.String()+" to "+to.String(),
				to.String())
		}

	case *ast.UnaryExpr:
		if n.Op == token.NOT {
			f.add(n.OpPos, n.OpPos+1, "! left out", "")
		}

	case *ast.ReturnStmt:
		f.lostError(n)
	case *ast.ExprStmt:
		if call, ok := n.X.(*ast.CallExpr); ok && !f.tells(call) {
			f.add(n.Pos(), n.End(), "left out: "+f.source(call), "{}")
		}
	case *ast.DeferStmt:
		if !f.tells(n.Call) {
			f.add(n.Pos(), n.End(), "left out: "+f.source(n), "{}")
		}
	case *ast.AssignStmt:
		f.lostAssignment(n)
	case *ast.CaseClause:
		if n.List != nil {
			f.add(n.Pos(), n.End(), "left out: case "+f.source(n.List[0]), "")
		}
	case *ast.Ident:
		if n.Name == "true" || n.Name == "false" {
			other := map[string]string{"true": "false", "false": "true"}[n.Name]
			f.add(n.Pos(), n.End(), n.Name+" to "+other, other)
		}
	}
	return true
}

// lostError makes a mutant that returns nil in place of an error in the last result.
func (f *finder) lostError(n *ast.ReturnStmt) {
	if len(n.Results) == 0 {
		return
	}
	switch last := n.Results[len(n.Results)-1].(type) {
	case *ast.Ident:
		if last.Name == "err" {
			f.add(last.Pos(), last.End(), "err to nil", "nil")
		}
	case *ast.CallExpr:
		if name := f.source(last.Fun); name == "fmt.Errorf" || name == "errors.New" ||
			name == "errors.Join" {
			f.add(last.Pos(), last.End(), name+" to nil", "nil")
		}
	}
}

// lostAssignment makes a mutant that computes values and assigns them to nothing. Variables that the
// statement declares would be missing in what follows, so these statements stay.
func (f *finder) lostAssignment(n *ast.AssignStmt) {
	if n.Tok != token.ASSIGN {
		return
	}

	blanks := make([]string, len(n.Lhs))
	for i, target := range n.Lhs {
		if name, ok := target.(*ast.Ident); ok && name.Name == "_" {
			return
		}
		blanks[i] = "_"
	}

	f.add(n.Pos(), n.TokPos, "left out: assignment to "+f.source(n.Lhs[0]),
		strings.Join(blanks, ", ")+" ")
}

// tells reports whether a call only logs, counts, locks or closes, which tests of behaviour
// need not notice.
func (f *finder) tells(call *ast.CallExpr) bool {
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}

	switch selector.Sel.Name {
	case "Info", "Error", "Inc", "Dec", "Add", "Set", "Observe", "Close", "Lock", "Unlock",
		"RLock", "RUnlock", "MustRegister":
		return true
	}

	return false
}

// source returns the formatted source of a node on one line.
func (f *finder) source(n ast.Node) string {
	var out bytes.Buffer
	if err := format.Node(&out, f.files, n); err != nil {
		return "?"
	}
	line, _, _ := bytes.Cut(out.Bytes(), []byte("\n"))
	return string(line)
}
