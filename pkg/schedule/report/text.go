// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// Text writes the Schedule for people: a table of the pods with their devices, and below it why
// pods are pending. If all is set, it also writes the refusals of pods that have a node.
func (s *Schedule) Text(to io.Writer, all bool) error {
	if len(s.Pods) == 0 {
		return terminal.Line(to, "There is no pod without a node.")
	}

	table := [][]string{{"POD", "NODE", "CLAIM", "REQUEST", "DEVICE", "TAKES"}}
	for _, pod := range s.Pods {
		table = append(table, rows(pod)...)
	}

	var out strings.Builder
	for _, line := range terminal.Columns(3, table) {
		out.WriteString(line)
	}

	for _, pod := range s.Pods {
		if pod.Node != "" && (!all || len(pod.Refusals) == 0) {
			continue
		}
		out.WriteString("\n")
		for _, line := range explanation(pod) {
			out.WriteString(terminal.Escape(line) + "\n")
		}
	}

	_, err := io.WriteString(to, out.String())
	return err
}

// rows returns a row for each device of the pod, or one row if it has none. A value that equals the
// row above is left out.
func rows(pod Pod) [][]string {
	name, node := pod.Namespace+"/"+pod.Name, pod.Node
	if node == "" {
		node = "<pending>"
	}

	var rows [][]string
	for _, claim := range pod.Claims {
		claimName := claim.Name
		for _, device := range claim.Devices {
			rows = append(rows,
				[]string{name, node, claimName, device.Request, device.Driver + "/" + device.Pool +
					"/" + device.Device, takes(claim, device)})
			name, node, claimName = "", "", ""
		}
	}

	if rows == nil {
		rows = [][]string{{name, node, "-", "-", "-", "-"}}
	}

	return rows
}

func takes(claim Claim, device Device) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(device.ConsumedCapacity)) {
		all = append(all, device.ConsumedCapacity[name]+" "+name)
	}

	for _, counter := range device.ConsumedCounters {
		all = append(all,
			fmt.Sprintf("%s of %s/%s", counter.Value, counter.CounterSet, counter.Name))
	}

	const most = 3
	if len(all) > most {
		all = append(all[:most], fmt.Sprintf("%d more", len(all)-most))
	}

	switch {
	case device.AdminAccess:
		all = append(all, "nothing, it only looks")
	case claim.Shared:
		all = append(all, "nothing, the claim had it")
	case all == nil:
		all = append(all, "the device")
	}

	return strings.Join(all, ", ")
}

// explanation explains line by line why nodes cannot take the pod.
func explanation(pod Pod) []string {
	nodes := 0
	for _, refusal := range pod.Refusals {
		nodes += len(refusal.Nodes)
	}

	nodes += pod.Fits
	name := pod.Namespace + "/" + pod.Name

	var lines []string
	switch {
	case pod.Node != "":
		lines = append(lines,
			fmt.Sprintf("%s is on %s: %d of %d nodes can take it.", name, pod.Node,
				pod.Fits, nodes))
	case len(pod.Reasons) > 0:
		lines = append(lines, name+" is pending, whatever node:")
	case nodes == 0:
		lines = append(lines, name+" is pending: there are no nodes.")
	case nodes == 1:
		lines = append(lines, name+" is pending: the only node cannot take it.")
	default:
		lines = append(lines,
			fmt.Sprintf("%s is pending: none of %d nodes can take it.", name, nodes))
	}

	for _, reason := range pod.Reasons {
		lines = append(lines, reasonLines("  ", reason)...)
	}

	for _, refusal := range pod.Refusals {
		lines = append(lines, "  "+places(refusal.Nodes)+":")
		for _, reason := range refusal.Reasons {
			lines = append(lines, reasonLines("    ", reason)...)
		}
	}

	return lines
}

// Why explains why no node takes the pod: first one sentence with the reason of most nodes, then
// all refusals line by line. It returns nil for a pod that has a node.
func (p Pod) Why() []string {
	if p.Node != "" {
		return nil
	}

	lines := explanation(p)
	reasons := p.Reasons
	if len(reasons) == 0 && len(p.Refusals) > 0 {
		most := slices.MaxFunc(p.Refusals, func(a, b schedule.Refusal) int {
			return cmp.Compare(len(a.Nodes), len(b.Nodes))
		})
		reasons = most.Reasons
	}

	if len(reasons) == 0 {
		return lines
	}

	said := []string{reasons[0].Message}
	for _, cause := range reasons[0].Causes {
		said = append(said, cause.Message)
	}

	_, where, _ := strings.Cut(lines[0], " is pending")
	lines[0] = strings.TrimRight(strings.TrimLeft(where, ":, "), ":.") + ": " +
		strings.Join(said, "; ")
	return lines
}

// places lists up to four nodes.
func places(nodes []string) string {
	const most = 4
	if len(nodes) <= most {
		return strings.Join(nodes, ", ")
	}
	return fmt.Sprintf("%s and %d more nodes", strings.Join(nodes[:most-1], ", "),
		len(nodes)-most+1)
}

func reasonLines(indent string, reason schedule.Reason) []string {
	var of []string
	if reason.Claim != "" {
		of = append(of, "claim "+reason.Claim)
	}

	if reason.Request != "" {
		of = append(of, "request "+reason.Request)
	}

	first := ""
	if of != nil {
		first = strings.Join(of, ", ") + ": "
	}

	lines := messageLines(indent, first+reason.Message)
	for _, cause := range reason.Causes {
		lines = append(lines, messageLines(indent+"  ", cause.Message)...)
	}

	return lines
}

// messageLines marks all lines of a message after the first, so that they are not mistaken for
// another reason. Errors of CEL have several lines.
func messageLines(indent, message string) []string {
	lines := strings.Split(message, "\n")
	for i := range lines {
		if i > 0 {
			lines[i] = "  | " + lines[i]
		}
		lines[i] = indent + lines[i]
	}
	return lines
}
