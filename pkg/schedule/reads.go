// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"cmp"
	"slices"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	resourceapi "k8s.io/api/resource/v1"
)

// property is an attribute or a capacity that a selector uses.
type property struct {
	of     string // "attributes" or "capacity"
	domain string
	id     string
}

func (p property) String() string {
	if p.of == "capacity" {
		return "the capacity " + p.domain + "/" + p.id
	}
	return "the attribute " + p.domain + "/" + p.id
}

// isOn reports whether the device has the property. The name of a property in the driver's domain
// may omit the domain.
func (p property) isOn(c candidate) bool {
	names := []resourceapi.QualifiedName{resourceapi.QualifiedName(p.domain + "/" + p.id)}
	if p.domain == c.id.Driver.String() {
		names = append(names, resourceapi.QualifiedName(p.id))
	}

	return slices.ContainsFunc(names, func(name resourceapi.QualifiedName) bool {
		if p.of == "capacity" {
			_, has := c.Capacity[name]
			return has
		}
		_, has := c.Attributes[name]
		return has
	})
}

// reads returns the properties of a device that a CEL expression uses by literal names, sorted:
// device.attributes["domain"].id, or the same with capacity. It returns nothing for an invalid
// expression.
func reads(expression string) []property {
	environment, err := cel.NewEnv(cel.OptionalTypes())
	if err != nil {
		return nil
	}

	parsed, issues := environment.Parse(expression)
	if issues.Err() != nil {
		return nil
	}

	var found []property
	ast.PostOrderVisit(parsed.NativeRep().Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		if of, domain, id, is := read(e); is {
			found = append(found, property{of, domain, id})
		}
	}))

	slices.SortFunc(found, func(a, b property) int {
		return cmp.Or(cmp.Compare(a.of, b.of), cmp.Compare(a.domain, b.domain),
			cmp.Compare(a.id, b.id))
	})

	return slices.Compact(found)
}

// read splits device.OF["DOMAIN"].ID, device.OF["DOMAIN"].?ID and device.OF["DOMAIN"]["ID"].
func read(e ast.Expr) (of, domain, id string, is bool) {
	inner, id, is := member(e)
	if !is {
		return "", "", "", false
	}

	inner, domain, is = member(inner)
	if !is || inner.Kind() != ast.SelectKind {
		return "", "", "", false
	}

	of = inner.AsSelect().FieldName()
	operand := inner.AsSelect().Operand()
	return of, domain, id, operand.Kind() == ast.IdentKind && operand.AsIdent() == "device" &&
		(of == "attributes" || of == "capacity")
}

// member splits X.NAME, X.?NAME and X["NAME"].
func member(e ast.Expr) (of ast.Expr, name string, is bool) {
	switch e.Kind() {
	case ast.SelectKind:
		return e.AsSelect().Operand(), e.AsSelect().FieldName(), true
	case ast.CallKind:
		call := e.AsCall()
		switch call.FunctionName() {
		case operators.Index, operators.OptIndex, operators.OptSelect:
		default:
			return nil, "", false
		}

		if literal := call.Args()[1]; literal.Kind() == ast.LiteralKind {
			text, isText := literal.AsLiteral().(types.String)
			return call.Args()[0], string(text), isText
		}
	}
	return nil, "", false
}
