// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// State says how a part of an installation is.
type State string

// States of parts.
const (
	Good    State = "Good"
	Bad     State = "Bad"
	Unknown State = "Unknown" // the user may not read it
	None    State = "None"    // there is no such part, which may be wanted
)

// Part is a part of an installation: a program, or all objects of a kind.
type Part struct {
	Name  string   `json:"name"`
	State State    `json:"state"`
	Text  string   `json:"text"`
	Notes []string `json:"notes,omitempty"` // what is wrong, at most mostNotes sentences
}

// mostNotes bounds the notes of a part, because a cluster may have thousands of broken objects.
const mostNotes = 5

// Installation is how xpu-device-plugin is in a cluster.
type Installation struct {
	Parts []Part `json:"parts"`
}

// Good reports whether nothing is wrong or unknown.
func (i Installation) Good() bool {
	return !slices.ContainsFunc(i.Parts, func(p Part) bool {
		return p.State == Bad || p.State == Unknown
	})
}

// Table shows the parts to people.
func (i Installation) Table() Table {
	table := Table{Header: []string{"PART", "STATE", ""}}
	for _, p := range i.Parts {
		table.Rows = append(table.Rows, Row{
			Cells: []string{p.Name, string(p.State), p.Text}, Notes: p.Notes,
		})
	}
	return table
}

// Status returns how xpu-device-plugin is. The namespace has its programs. An error is about the
// cluster as a whole; parts that the user may not read are Unknown.
func Status(
	ctx context.Context, reader client.Reader, namespace string, now time.Time,
) (Installation, error) {
	s := status{reader: reader, namespace: namespace, now: now}
	var all Installation
	for _, part := range []func(context.Context) (Part, error){
		s.agents, s.controller, s.nodes, s.pools, s.networks, s.xpus, s.ports,
	} {
		p, err := part(ctx)
		switch {
		case apierrors.IsForbidden(err):
			p.State, p.Text = Unknown, "you may not read it"
		case meta.IsNoMatchError(err):
			p.State = None
			p.Text = "the cluster has no such kind: direct mode, or not installed"
		case err != nil:
			return Installation{}, fmt.Errorf("%s: %w", p.Name, err)
		}

		if more := len(p.Notes) - mostNotes; more > 0 {
			p.Notes = append(p.Notes[:mostNotes:mostNotes], fmt.Sprintf("and %d more", more))
		}
		all.Parts = append(all.Parts, p)
	}

	if agents, controller := &all.Parts[0], &all.Parts[1]; agents.State == None &&
		controller.State == None {
		agents.State = Bad
		agents.Notes = []string{"xpu-device-plugin is not installed in namespace " + namespace +
			"; --agent-namespace names another one"}
	}
	return all, nil
}

type status struct {
	reader    client.Reader
	namespace string
	now       time.Time
}

// agents looks at the DaemonSet, which knows on how many nodes an agent should run.
func (s status) agents(ctx context.Context) (Part, error) {
	p := Part{Name: "xpu-agent"}
	var set appsv1.DaemonSet
	err := s.reader.Get(ctx, client.ObjectKey{Namespace: s.namespace, Name: "xpu-agent"}, &set)
	if apierrors.IsNotFound(err) {
		p.State = None
		p.Text = "there is no DaemonSet xpu-agent in namespace " + s.namespace
		return p, nil
	}
	if err != nil {
		return p, err
	}

	wanted, ready := set.Status.DesiredNumberScheduled, set.Status.NumberReady
	p.State, p.Text = Good, fmt.Sprintf("ready on %d of %d nodes", ready, wanted)
	if updated := set.Status.UpdatedNumberScheduled; updated < wanted {
		p.Text += fmt.Sprintf(", %d of them with the present version", updated)
		p.State = Bad
	}
	if ready < wanted || wanted == 0 {
		p.State = Bad
	}
	if set.Generation != set.Status.ObservedGeneration {
		p.State, p.Text = Bad, p.Text+"; a change has not begun yet"
	}
	return p, nil
}

func (s status) controller(ctx context.Context) (Part, error) {
	p := Part{Name: "xpu-controller"}
	var deployment appsv1.Deployment
	err := s.reader.Get(ctx, client.ObjectKey{Namespace: s.namespace, Name: "xpu-controller"},
		&deployment)
	if apierrors.IsNotFound(err) {
		p.State = None
		p.Text = "there is no Deployment xpu-controller in namespace " + s.namespace +
			", as in direct mode"
		return p, nil
	}
	if err != nil {
		return p, err
	}

	wanted := ptr.Deref(deployment.Spec.Replicas, 1)
	ready, updated := deployment.Status.ReadyReplicas, deployment.Status.UpdatedReplicas
	p.State, p.Text = Good, fmt.Sprintf("%d of %d replicas are ready", ready, wanted)
	if updated < wanted || deployment.Status.Replicas > updated {
		p.State = Bad
		p.Text += fmt.Sprintf(", %d of them with the present version", updated)
	}
	if ready < wanted || wanted == 0 {
		p.State = Bad
	}
	if deployment.Generation != deployment.Status.ObservedGeneration {
		p.State, p.Text = Bad, p.Text+"; a change has not begun yet"
	}

	away, err := ControllerAway(ctx, s.reader, s.namespace, s.now)
	if away != "" {
		p.State = Bad
		p.Notes = append(p.Notes, away)
	}
	return p, err
}

// nodes looks at the XPUNodes: versions of agents, and nodes whose agent is away.
func (s status) nodes(ctx context.Context) (Part, error) {
	p := Part{Name: "XPUNodes"}
	var nodes v1alpha1.XPUNodeList
	if err := s.reader.List(ctx, &nodes); err != nil {
		return p, err
	}

	versions := map[string]int{}
	functions := int32(0)
	for _, node := range nodes.Items {
		functions += node.Status.Functions
		if node.Status.Agent != nil {
			versions[node.Status.Agent.Version]++
		}
		problems, _ := JudgeNode(&node)
		for _, problem := range problems {
			p.Notes = append(p.Notes, node.Name+": "+problem)
		}
	}

	var of []string
	for _, version := range slices.Sorted(maps.Keys(versions)) {
		of = append(of, fmt.Sprintf("%d with %s", versions[version], version))
	}
	p.Text = fmt.Sprintf("%d, with %d Functions", len(nodes.Items), functions)
	if len(of) > 0 {
		p.Text += "; agents: " + strings.Join(of, ", ")
	}
	return p.judged(len(nodes.Items)), nil
}

func (s status) pools(ctx context.Context) (Part, error) {
	var pools v1alpha1.DevicePoolList
	p, err := s.kind(ctx, "DevicePools", &pools)
	functions, healthy := int32(0), int32(0)
	for _, pool := range pools.Items {
		functions += pool.Status.Functions
		healthy += pool.Status.Healthy
	}
	if len(pools.Items) > 0 {
		p.Text += fmt.Sprintf("; %d of %d Functions are healthy", healthy, functions)
	}
	return p, err
}

func (s status) networks(ctx context.Context) (Part, error) {
	return s.kind(ctx, "XPUNetworks", &v1alpha1.XPUNetworkList{})
}

func (s status) xpus(ctx context.Context) (Part, error) {
	return s.kind(ctx, "XPUs", &v1alpha1.XPUList{})
}

func (s status) ports(ctx context.Context) (Part, error) {
	return s.kind(ctx, "XPUPorts", &v1alpha1.XPUPortList{})
}

// kind counts the objects of a kind that are Ready, and notes what is wrong with each.
func (s status) kind(ctx context.Context, name string, list client.ObjectList) (Part, error) {
	p := Part{Name: name}
	if err := s.reader.List(ctx, list); err != nil {
		return p, err
	}

	total, good := 0, 0
	err := meta.EachListItem(list, func(item runtime.Object) error {
		o := item.(client.Object)
		total++
		if v1alpha1.ReadyOf(conditionsOf(o)).Status == metav1.ConditionTrue {
			good++
		}
		if troubles := troublesOf(o); len(troubles) > 0 {
			name := strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/")
			p.Notes = append(p.Notes, name+": "+strings.Join(troubles, "; "))
		}
		return nil
	})

	p.Text = fmt.Sprintf("%d of %d are ready", good, total)
	return p.judged(total), err
}

// troublesOf returns what is wrong with an object, or not known of it, such as a change that nobody
// has seen yet.
func troublesOf(o client.Object) (troubles []string) {
	conditions := conditionsOf(o)
	ready := v1alpha1.ReadyOf(conditions)
	troubles, _ = judge(conditions)
	if ready.Status != metav1.ConditionTrue {
		if len(troubles) == 0 {
			troubles = []string{"it is not known whether it is ready: is xpu-controller running?"}
		}
		return troubles
	}

	if seen := ready.ObservedGeneration; seen > 0 && seen < o.GetGeneration() {
		troubles = append(troubles, "its last change has not been taken up yet")
	}
	return troubles
}

// judged sets the state by the number of objects and the notes.
func (p Part) judged(objects int) Part {
	switch {
	case len(p.Notes) > 0:
		p.State = Bad
	case objects == 0:
		p.State = None
	default:
		p.State = Good
	}
	return p
}

func conditionsOf(o client.Object) []metav1.Condition {
	switch o := o.(type) {
	case *v1alpha1.DevicePool:
		return o.Status.Conditions
	case *v1alpha1.XPUNetwork:
		return o.Status.Conditions
	case *v1alpha1.XPU:
		return o.Status.Conditions
	case *v1alpha1.XPUPort:
		return o.Status.Conditions
	}
	return nil
}
