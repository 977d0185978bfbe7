// SPDX-License-Identifier: Apache-2.0

package dashboard

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate/view"
)

// Bounds of what is sent, because a cluster may have more than a page can hold.
const (
	mostRows  = 50_000 // nodes, and pods
	mostWrong = 1000   // sentences
	mostNotes = 20     // sentences about one object
)

// records are what the page shows, by key: "overview", "node/node1", "pod/shop/web", "pool/fast",
// "network/blue", "xpu/dpu-1".
type records map[string]any

// Overview is about the cluster as a whole.
type Overview struct {
	// Reading is set until all kinds have been asked for.
	Reading bool `json:"reading,omitempty"`
	// Direct is set if the cluster has none of the project's kinds.
	Direct bool `json:"direct,omitempty"`
	// Parts are those of "xpuctl status".
	Parts []inspect.Part `json:"parts,omitempty"`
	// Wrong is what is wrong, causes first, at most mostWrong sentences; More is how many more
	// there are.
	Wrong   []Wrong  `json:"wrong"`
	More    int      `json:"more,omitempty"`
	Sources []Source `json:"sources"`
	// NotShown is how many nodes and pods are too many to be shown.
	NotShown int `json:"notShown,omitempty"`
	// Headers has the columns of the tables of pools, networks and xPUs.
	Headers map[string][]string `json:"headers"`
	Legend  []view.Symbol       `json:"legend"`
}

// Wrong is a problem with an object.
type Wrong struct {
	Kind string `json:"kind"` // program, xpu, network, pool, node, port, pod or cluster
	Name string `json:"name"`
	Text string `json:"text"`
}

// Node is a node with an agent.
type Node struct {
	Name    string         `json:"name"`
	Agent   string         `json:"agent,omitempty"` // its version
	Status  explain.Status `json:"status"`
	Notes   []string       `json:"notes,omitempty"`
	Remarks []string       `json:"remarks,omitempty"`
	PFs     []PF           `json:"pfs"`
	// Asked is when the agent was asked. It is zero if objects of the cluster say what is here.
	Asked time.Time `json:"asked,omitzero"`
}

// Row is an object in a table of package inspect.
type Row struct {
	Status  explain.Status `json:"status"`
	Cells   []string       `json:"cells"`
	Notes   []string       `json:"notes,omitempty"`
	Remarks []string       `json:"remarks,omitempty"`
}

// objects are the objects that records are made of. A list is empty if the kind cannot be read.
type objects struct {
	nodes     v1alpha1.XPUNodeList
	pools     v1alpha1.DevicePoolList
	ports     v1alpha1.XPUPortList
	claims    resourceapi.ResourceClaimList
	slices    resourceapi.ResourceSliceList
	pods      corev1.PodList
	claimsErr error
	nodesErr  error
}

// builder makes records.
type builder struct {
	sources   []*source
	reader    reader
	agents    *asker
	namespace string // of our programs
	now       func() time.Time

	out      records
	overview *Overview
}

// build returns what there is to show.
func (b *builder) build(ctx context.Context) records {
	b.out = records{}
	b.overview = &Overview{
		Wrong: []Wrong{}, Legend: legend(), Headers: map[string][]string{},
	}
	b.out["overview"] = b.overview
	for _, s := range b.sources {
		described := s.describe()
		b.overview.Sources = append(b.overview.Sources, described)
		b.overview.Reading = b.overview.Reading || described.State == reading
	}

	all := b.objects(ctx)
	b.overview.Direct = meta.IsNoMatchError(all.nodesErr)
	functions := knownFunctions(all.slices.Items, all.claims.Items, all.ports.Items)
	if b.overview.Direct {
		b.addDirect(all)
	} else {
		b.addNodes(all, functions)
		b.addPods(all, newPodFacts(all))
	}
	b.addOtherNodes(functions)

	b.addTables(ctx)
	b.addParts(ctx)
	slices.SortStableFunc(b.overview.Wrong, func(x, y Wrong) int {
		return cmp.Or(cmp.Compare(rank(x.Kind), rank(y.Kind)), strings.Compare(x.Name, y.Name))
	})
	if more := len(b.overview.Wrong) - mostWrong; more > 0 {
		b.overview.Wrong, b.overview.More = b.overview.Wrong[:mostWrong], more
	}
	return b.out
}

// rank orders what is wrong: causes come before what follows from them.
func rank(kind string) int {
	return slices.Index([]string{
		"cluster", "program", "xpu", "network", "pool", "node", "port", "pod",
	}, kind)
}

func (b *builder) objects(ctx context.Context) *objects {
	var all objects
	all.nodesErr = b.reader.List(ctx, &all.nodes)
	all.claimsErr = b.reader.List(ctx, &all.claims)
	for _, list := range []client.ObjectList{&all.pools, &all.ports, &all.slices, &all.pods} {
		_ = b.reader.List(ctx, list) // the sources say it
	}
	return &all
}

// add adds a record, unless there are too many of its kind.
func (b *builder) add(key string, count int, record any) {
	if count > mostRows {
		b.overview.NotShown++
		return
	}
	b.out[key] = record
}

// wrong notes what is wrong with an object.
func (b *builder) wrong(kind, name string, notes ...string) {
	for _, note := range notes {
		b.overview.Wrong = append(b.overview.Wrong, Wrong{kind, name, note})
	}
}

// limited bounds notes.
func limited(notes []string) []string {
	if more := len(notes) - mostNotes; more > 0 {
		return append(notes[:mostNotes:mostNotes], fmt.Sprintf("and %d more", more))
	}
	return notes
}

func (b *builder) addNodes(all *objects, functions known) {
	for i := range all.nodes.Items {
		node := &all.nodes.Items[i]
		problems, remarks := inspect.JudgeNode(node)
		notes := slices.Concat(problems, inspect.PoolNotes(node, all.pools.Items))
		record := Node{Name: node.Name, Status: explain.Done, PFs: functions.pfsOf(node),
			Notes: limited(notes), Remarks: limited(remarks)}
		if node.Status.Agent != nil {
			record.Agent = node.Status.Agent.Version
		}

		n := count(record.PFs, "troubled")
		if n > 0 && len(record.Notes) == 0 && len(node.Spec.Cordons) == 0 {
			record.Notes = []string{fmt.Sprintf("%d Functions are kept from pods", n)}
			b.wrong("node", node.Name, record.Notes...)
		}

		ready := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionAgentReady)
		switch {
		case len(record.Notes) > 0:
			record.Status = explain.Failed
		case ready == nil || ready.Status != metav1.ConditionTrue:
			record.Status = explain.Unknown
		}

		for _, c := range node.Spec.Cordons { // which somebody wanted
			record.Notes = append(record.Notes,
				strings.TrimSuffix("PF "+c.PF+" is cordoned: "+c.Reason, ": "))
		}
		b.add("node/"+node.Name, i+1, record)

		b.wrong("node", node.Name, problems...)
	}
}

// addOtherNodes adds nodes of which neither an XPUNode nor an agent says anything.
func (b *builder) addOtherNodes(functions known) {
	for i, name := range slices.Sorted(maps.Keys(functions)) {
		if b.out["node/"+name] == nil {
			b.add("node/"+name, i+1, Node{Name: name, Status: explain.Unknown,
				PFs: byPF(functions[name]),
				Notes: []string{"neither an XPUNode nor an agent says anything of it: ResourceSlices, " +
					"claims and XPUPorts say what is shown"}})
		}
	}
}

func (b *builder) addPods(all *objects, facts *podFacts) {
	count := 0
	for i := range all.pods.Items {
		pod := facts.judge(&all.pods.Items[i])
		if pod == nil {
			continue
		}
		count++
		b.add("pod/"+pod.Namespace+"/"+pod.Name, count, pod)
		if pod.Status == explain.Failed {
			b.wrong("pod", pod.Namespace+"/"+pod.Name, pod.Text)
		}
	}
}

// addDirect adds the nodes and pods of direct mode, of which the agents know.
func (b *builder) addDirect(all *objects) {
	facts := newPodFacts(all)
	facts.given = map[types.UID][]Interface{}
	for i, answer := range b.agents.answers() {
		b.addAnswer(i+1, answer)
		if answer.state == nil {
			continue
		}
		for _, f := range answer.state.Functions {
			if f.Attachment != nil && f.Attachment.Pod.UID != "" {
				uid := types.UID(f.Attachment.Pod.UID)
				facts.given[uid] = append(facts.given[uid], interfaceOf(f))
			}
		}
	}
	b.addPods(all, facts)
}

// addAnswer adds a node as its agent describes it.
func (b *builder) addAnswer(count int, answer answer) {
	record := Node{Name: answer.node, Status: explain.Done, Asked: answer.at, PFs: []PF{}}
	switch {
	case answer.err != nil:
		record.Status, record.Notes = explain.Unknown, []string{answer.err.Error()}
	case answer.state == nil:
		record.Status, record.Notes = explain.Waiting, []string{"its agent has not answered yet"}
	}

	if answer.state != nil {
		record.Agent = answer.state.Agent
		for _, card := range view.NewNode(answer.state).Cards {
			for _, pf := range card.PFs {
				shown := PF{Title: pf.Title, Detail: pf.Detail}
				var conditions []string
				for i, f := range pf.Functions {
					if i > 0 {
						conditions = append(conditions, f.Condition)
					}
					for _, trouble := range f.Troubles {
						record.Notes = append(record.Notes, f.ID+": "+trouble)
					}
				}
				shown.Functions = runs(conditions)
				record.PFs = append(record.PFs, shown)
			}
		}
		record.Notes = limited(record.Notes)
		if len(record.Notes) > 0 {
			record.Status = explain.Failed
		}
	}

	b.add("node/"+answer.node, count, record)
	b.wrong("node", answer.node, record.Notes...)
}

func interfaceOf(f nodestate.Function) Interface {
	a := f.Attachment
	i := Interface{Claim: a.Claim.Name, Resource: a.Resource, Function: f.ID.String(), Pool: f.Pool}
	if a.Network != "" {
		i.Networks = []string{a.Network}
	}
	for _, address := range a.Interface.Addresses {
		i.Addresses = append(i.Addresses, address.String())
	}
	return i
}

// addTables adds the objects of "xpuctl pools", "networks" and "xpus", and what is wrong with those
// of "xpuctl ports".
func (b *builder) addTables(ctx context.Context) {
	now := b.now()
	_, pools, err := inspect.Pools(ctx, lenient{b.reader, &v1alpha1.DevicePoolList{}}, now)
	b.addTable("pool", b.uncounted(pools, "ALLOCATED", "ResourceClaims", "pods"), err)
	_, networks, err := inspect.Networks(ctx, lenient{b.reader, &v1alpha1.XPUNetworkList{}}, now)
	b.addTable("network", b.uncounted(networks, "PORTS", "XPUPorts"), err)
	_, xpus, err := inspect.XPUs(ctx, lenient{b.reader, &v1alpha1.XPUList{}}, now)
	b.addTable("xpu", b.uncounted(xpus, "PORTS UP", "XPUPorts"), err)

	_, ports, err := inspect.Ports(ctx, b.reader, "", now)
	if err != nil {
		return // the sources say it
	}
	for _, row := range ports.Rows {
		b.wrong("port", row.Cells[0]+"/"+row.Cells[1], row.Notes...)
	}
}

// lenient is a reader for a table of one kind. Kinds that cannot be read have no objects, unless it
// is that kind.
type lenient struct {
	reader
	kind client.ObjectList
}

// List implements [client.Reader].
func (l lenient) List(
	ctx context.Context, list client.ObjectList, options ...client.ListOption,
) error {
	err := l.reader.List(ctx, list, options...)
	if reflect.TypeOf(list) != reflect.TypeOf(l.kind) {
		return nil
	}
	return err
}

// uncounted replaces the numbers in a column by "?" if they count objects of kinds that are not
// read in all namespaces.
func (b *builder) uncounted(table inspect.Table, column string, kinds ...string) inspect.Table {
	isKnown := !slices.ContainsFunc(b.overview.Sources, func(s Source) bool {
		isRead := s.State == live || s.State == stale && !s.Since.IsZero()
		return slices.Contains(kinds, s.Kind) && (!isRead || s.Scope != "")
	})
	at := slices.Index(table.Header, column)
	if isKnown || at < 0 {
		return table
	}

	for _, row := range table.Rows {
		row.Cells[at] = "?"
	}
	return table
}

func (b *builder) addTable(kind string, table inspect.Table, err error) {
	if err != nil {
		return
	}

	age := slices.Index(table.Header, "AGE") // would change without an event
	ready := slices.Index(table.Header, "READY")
	shown := func(cells []string) []string {
		return slices.Delete(slices.Clone(cells), age, age+1)
	}
	b.overview.Headers[kind] = shown(table.Header)
	for i, row := range table.Rows {
		record := Row{
			Status: explain.Done, Cells: shown(row.Cells), Notes: limited(row.Notes),
			Remarks: limited(row.Remarks),
		}
		switch {
		case row.Cells[ready] == string(metav1.ConditionFalse):
			record.Status = explain.Failed
		case row.Cells[ready] != string(metav1.ConditionTrue):
			record.Status = explain.Unknown
		case len(row.Notes) > 0:
			record.Status = explain.Failed
		}
		b.add(kind+"/"+row.Cells[0], i+1, record)
		b.wrong(kind, row.Cells[0], row.Notes...)
	}
}

// addParts adds what "xpuctl status" says.
func (b *builder) addParts(ctx context.Context) {
	status, err := inspect.Status(ctx, b.reader, b.namespace, b.now())
	if err != nil {
		if !errors.Is(err, errNotRead) {
			b.wrong("cluster", "", err.Error())
		}
		return
	}
	b.overview.Parts = status.Parts
	for _, part := range status.Parts[:2] { // the programs; the others are objects, which say it
		if part.State == inspect.Bad {
			b.wrong("program", part.Name, append([]string{part.Text}, part.Notes...)...)
		}
	}
}

// encoded is a record in JSON. Records that have not changed stay the same pointer, so that a
// client that has one need not get it again.
type encoded struct{ json []byte }

// snapshot has all records at a time. It is never changed.
type snapshot map[string]*encoded

// encode returns the records as a snapshot, with the former pointers of those that have not
// changed.
func encode(all records, former snapshot) (next snapshot, changed bool, err error) {
	next = make(snapshot, len(all))
	for key, record := range all {
		text, err := json.Marshal(record)
		if err != nil {
			return nil, false, fmt.Errorf("%s: %w", key, err)
		}
		if same := former[key]; same != nil && string(same.json) == string(text) {
			next[key] = same
			continue
		}
		next[key], changed = &encoded{text}, true
	}
	return next, changed || len(next) != len(former), nil
}
