// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// program is a binary and the packages that define its metrics.
type program struct {
	name     string
	packages []string
}

// metric is a metric that the source defines.
type metric struct {
	name, kind, help string
	labels           []string
}

func metricsPage(programs []program) ([]byte, error) {
	var page bytes.Buffer
	page.WriteString(`# Metrics

<!-- Made by docs/gen from the source. Do not edit. -->

All programs serve Prometheus metrics at ` + "`/metrics`" + `: xpu-agent on port 9810 (` + "`--listen`" +
		`), xpu-controller on port 8080
(` + "`--metrics-bind-address`" + `), opi-bridge only where ` + "`--metrics-listen`" + ` says. What to watch is in
[debug.md](../how-to/debug.md#metrics-to-watch). A histogram has the usual ` + "`_bucket`, `_sum` and `_count`" + `, and is a native
histogram too for servers that scrape these. [Monitor](../how-to/monitor.md) has alerts and a dashboard. The counters of
Functions are read at most once a second, and 16 scrapes are answered at a time; a program answers others with 503.
`)

	for _, p := range programs {
		var found []metric
		for _, dir := range p.packages {
			metrics, err := metricsOf(dir)
			if err != nil {
				return nil, err
			}
			found = append(found, metrics...)
		}

		slices.SortFunc(found, func(a, b metric) int { return cmp.Compare(a.name, b.name) })
		fmt.Fprintf(&page,
			"\n## %s\n\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n", p.name)

		for _, m := range found {
			labels := ""
			if len(m.labels) > 0 {
				labels = "`" + strings.Join(m.labels, "`, `") + "`"
			}
			fmt.Fprintf(&page, "| `%s` | %s | %s | %s |\n", m.name, m.kind, labels, m.help)
		}
	}

	page.WriteString(`
All three have those of the Go runtime and of the process too (` + "`go_*`, `process_*`" + `), and xpu-controller those of
controller-runtime (` + "`controller_runtime_*`, `workqueue_*`, `rest_client_*`, `leader_election_*`" + `).
`)

	return page.Bytes(), nil
}

// metricsOf returns the metrics for which the package calls constructors of the Prometheus client
// library.
func metricsOf(dir string) ([]metric, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}

	var found []metric
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}

		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}

		lists := listsOf(file)
		for node := range ast.Preorder(file) {
			if call, ok := node.(*ast.CallExpr); ok {
				if m := constructed(call, lists); m.name != "" {
					found = append(found, m)
				}
			}
		}
	}

	if len(found) == 0 {
		return nil, fmt.Errorf("%s: defines no metrics", dir)
	}

	return found, nil
}

// constructed returns the metric of a call such as NewCounterVec(CounterOpts{...}, labels) or
// NewDesc(name, help, labels, nil). The labels may be a variable of lists. The metric's name is
// empty for any other call.
func constructed(call *ast.CallExpr, lists map[string]ast.Expr) metric {
	_, kind, ok := strings.Cut(types.ExprString(call.Fun), ".New")
	if !ok || len(call.Args) == 0 {
		return metric{}
	}

	if kind == "Desc" && len(call.Args) == 4 {
		m := metric{name: text(call.Args[0]), kind: "gauge", help: text(call.Args[1]),
			labels: texts(call.Args[2])}
		if list, named := lists[types.ExprString(call.Args[2])]; named {
			m.labels = texts(list)
		}

		// The names of sriov-network-metrics-exporter's counters do not end in _total.
		if strings.HasSuffix(m.name, "_total") || strings.HasPrefix(m.name, "sriov_vf_") {
			m.kind = "counter"
		}
		return m
	}

	options, ok := call.Args[0].(*ast.CompositeLit)
	if !ok || !strings.HasSuffix(types.ExprString(options.Type), "Opts") {
		return metric{}
	}

	fields := map[string]ast.Expr{}
	for _, element := range options.Elts {
		if field, ok := element.(*ast.KeyValueExpr); ok {
			fields[types.ExprString(field.Key)] = field.Value
		}
	}

	kind = strings.TrimSuffix(strings.TrimSuffix(kind, "Vec"), "Func")
	labels := texts(fields["ConstLabels"])
	for _, argument := range call.Args[1:] {
		labels = append(labels, texts(argument)...)
	}

	return metric{name: text(fields["Name"]), kind: strings.ToLower(kind),
		help: text(fields["Help"]), labels: labels}
}

// listsOf returns the variables of a file, by name.
func listsOf(file *ast.File) map[string]ast.Expr {
	lists := map[string]ast.Expr{}
	for node := range ast.Preorder(file) {
		if spec, ok := node.(*ast.ValueSpec); ok && len(spec.Names) == 1 && len(spec.Values) == 1 {
			lists[spec.Names[0].Name] = spec.Values[0]
		}
	}
	return lists
}

// text returns the value of a string constant, which may be a sum of parts.
func text(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		s, _ := strconv.Unquote(e.Value)
		return s
	case *ast.BinaryExpr:
		return text(e.X) + text(e.Y)
	}
	return ""
}

// texts returns the strings of a []string{...}, or the keys of a map.
func texts(e ast.Expr) []string {
	list, ok := e.(*ast.CompositeLit)
	if !ok {
		return nil
	}

	var out []string
	for _, element := range list.Elts {
		if pair, ok := element.(*ast.KeyValueExpr); ok {
			element = pair.Key
		}
		out = append(out, text(element))
	}

	return out
}
