package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
)

// Text writes the Schedule for people: a table of the pods with their devices, and below it what keeps pods pending.
// Refusals of pods that have a node are written if all is set.
func (s *Schedule) Text(to io.Writer, all bool) error {
	table := tabwriter.NewWriter(to, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "POD\tNODE\tCLAIM\tREQUEST\tDEVICE\tTAKES")
	for _, pod := range s.Pods {
		for _, row := range rows(pod) {
			fmt.Fprintln(table, strings.Join(row, "\t"))
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, pod := range s.Pods {
		if pod.Node != "" && (!all || len(pod.Refusals) == 0) {
			continue
		}
		if _, err := io.WriteString(to, "\n"+explanation(pod)); err != nil {
			return err
		}
	}
	return nil
}

// rows returns a row for each device of the pod, or one if it has none. What stands in the row above is not repeated.
func rows(pod Pod) [][]string {
	name, node := pod.Namespace+"/"+pod.Name, pod.Node
	if node == "" {
		node = "<pending>"
	}
	var rows [][]string
	for _, claim := range pod.Claims {
		claimName := claim.Name
		for _, device := range claim.Devices {
			rows = append(rows, []string{name, node, claimName, device.Request, device.Driver + "/" + device.Pool + "/" + device.Device, takes(claim, device)})
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
		all = append(all, fmt.Sprintf("%s of %s/%s", counter.Value, counter.CounterSet, counter.Name))
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

// explanation says why nodes cannot take the pod.
func explanation(pod Pod) string {
	var text strings.Builder
	nodes := 0
	for _, refusal := range pod.Refusals {
		nodes += len(refusal.Nodes)
	}
	nodes += pod.Fits
	name := pod.Namespace + "/" + pod.Name
	switch {
	case pod.Node != "":
		fmt.Fprintf(&text, "%s is on %s: %d of %d nodes can take it.\n", name, pod.Node, pod.Fits, nodes)
	case len(pod.Reasons) > 0:
		fmt.Fprintf(&text, "%s is pending, whatever node:\n", name)
	case nodes == 0:
		fmt.Fprintf(&text, "%s is pending: there are no nodes.\n", name)
	case nodes == 1:
		fmt.Fprintf(&text, "%s is pending: the only node cannot take it.\n", name)
	default:
		fmt.Fprintf(&text, "%s is pending: none of %d nodes can take it.\n", name, nodes)
	}
	for _, reason := range pod.Reasons {
		writeReason(&text, "  ", reason)
	}
	for _, refusal := range pod.Refusals {
		fmt.Fprintf(&text, "  %s:\n", places(refusal.Nodes))
		for _, reason := range refusal.Reasons {
			writeReason(&text, "    ", reason)
		}
	}
	return text.String()
}

// Why says in one sentence why no node takes the pod, by what most nodes say, and then all that the nodes say, line by line. It is nil for a
// pod that has a node.
func (p Pod) Why() []string {
	if p.Node != "" {
		return nil
	}
	lines := strings.Split(strings.TrimSuffix(explanation(p), "\n"), "\n")
	reasons := p.Reasons
	if len(reasons) == 0 && len(p.Refusals) > 0 {
		most := slices.MaxFunc(p.Refusals, func(a, b schedule.Refusal) int { return cmp.Compare(len(a.Nodes), len(b.Nodes)) })
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
	lines[0] = strings.TrimRight(strings.TrimLeft(where, ":, "), ":.") + ": " + strings.Join(said, "; ")
	return lines
}

// places names up to four nodes.
func places(nodes []string) string {
	const most = 4
	if len(nodes) <= most {
		return strings.Join(nodes, ", ")
	}
	return fmt.Sprintf("%s and %d more nodes", strings.Join(nodes[:most-1], ", "), len(nodes)-most+1)
}

func writeReason(text *strings.Builder, indent string, reason schedule.Reason) {
	var of []string
	if reason.Claim != "" {
		of = append(of, "claim "+reason.Claim)
	}
	if reason.Request != "" {
		of = append(of, "request "+reason.Request)
	}
	text.WriteString(indent)
	if of != nil {
		text.WriteString(strings.Join(of, ", ") + ": ")
	}
	text.WriteString(reason.Message + "\n")
	for _, cause := range reason.Causes {
		text.WriteString(indent + "  " + cause.Message + "\n")
	}
}
