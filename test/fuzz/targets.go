// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
)

// target is a fuzz target.
type target struct {
	dir  string // of its package, as it was reached
	name string
}

func (t target) String() string { return t.dir + " " + t.name }

// targets are those in packages below the directories, by directory and name. They are found in the
// files, not by the go command, because that does not look into the modules within a module.
func targets(directories []string) (all []target, err error) {
	for _, root := range directories {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}

			if entry.IsDir() {
				if path != root && leftOut(entry.Name()) {
					return filepath.SkipDir
				}
				return nil
			}

			found, err := targetsIn(path)
			all = append(all, found...)

			return err
		})
		if err != nil {
			return nil, fmt.Errorf("look for fuzz targets in %s: %w", root, err)
		}
	}

	slices.SortFunc(all, func(a, b target) int {
		return cmp.Or(cmp.Compare(a.dir, b.dir), cmp.Compare(a.name, b.name))
	})

	return slices.Compact(all), nil
}

// leftOut says which directories have no packages of the repository: those that the go command
// leaves out, and what is built.
func leftOut(name string) bool {
	return strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") ||
		slices.Contains([]string{"testdata", "bin", "node_modules"}, name)
}

// targetsIn finds the fuzz targets of a file. A file that is no test, or is not compiled on this
// platform, has none.
func targetsIn(path string) (all []target, err error) {
	if !strings.HasSuffix(path, "_test.go") {
		return nil, nil
	}

	dir, name := filepath.Split(path)
	if matches, err := build.Default.MatchFile(dir, name); err != nil || !matches {
		return nil, err
	}

	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}

	for _, declaration := range file.Decls {
		f, ok := declaration.(*ast.FuncDecl)
		if !ok || f.Recv != nil || !takesF(f.Type.Params) {
			continue
		}
		if strings.HasPrefix(f.Name.Name, "Fuzz") {
			all = append(all, target{dir: filepath.Clean("./" + dir), name: f.Name.Name})
		}
	}

	return all, nil
}

// takesF says whether the one parameter is a *testing.F.
func takesF(params *ast.FieldList) bool {
	if params.NumFields() != 1 {
		return false
	}

	pointer, ok := params.List[0].Type.(*ast.StarExpr)
	if !ok {
		return false
	}

	of, ok := pointer.X.(*ast.SelectorExpr)
	return ok && of.Sel.Name == "F"
}
