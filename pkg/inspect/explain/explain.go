// SPDX-License-Identifier: Apache-2.0

// Package explain shows the life of a pod's interfaces stage by stage. It combines what scheduler,
// controller, agent and kubelet report, and summarizes the problem in one sentence.
package explain

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// Sources are the sources of information.
type Sources struct {
	Reader client.Reader
	// State returns the state that the agent of a node reports.
	State func(ctx context.Context, node string) (*nodestate.State, error)
	// Schedule returns why no node takes a pod, or which node does.
	Schedule func(ctx context.Context, pod *corev1.Pod) (why []string, node string, err error)
}

// Pod is the explanation of a pod's interfaces.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Node      string `json:"node,omitempty"`
	Phase     string `json:"phase"`
	// OK is set if nothing is wrong. Verdict is the problem, or says that there is none.
	OK         bool        `json:"ok"`
	Verdict    string      `json:"verdict"`
	Interfaces []Interface `json:"interfaces"`
	// Why lists the reasons of each node, for a pod that no node takes.
	Why []string `json:"why,omitempty"`
	// about the pod, its claims and XPUPorts; the oldest first
	Events []Event `json:"events,omitempty"`
	// Unknown lists what could not be found out.
	Unknown []string `json:"unknown,omitempty"`
}

// Interface is a Function that the pod has, or is to have.
type Interface struct {
	Claim    string `json:"claim,omitempty"`    // name of the ResourceClaim
	Request  string `json:"request,omitempty"`  // in the claim
	Resource string `json:"resource,omitempty"` // extended resource, if there is no claim
	Name     string `json:"name,omitempty"`     // in the pod

	Pool     string `json:"pool,omitempty"`
	Function string `json:"function,omitempty"`
	Network  string `json:"network,omitempty"`
	XPU      string `json:"xpu,omitempty"`

	Stages []Stage `json:"stages"`
	// Host is the interface in the pod, Card the Port at the xPU. Nil means unknown or absent.
	Host *Side `json:"host,omitempty"`
	Card *Side `json:"card,omitempty"`
	// contradictions between the two sides, each a sentence
	Differences []string `json:"differences,omitempty"`
}

// Side is one end of an interface.
type Side struct {
	MAC string `json:"mac,omitempty"`
	// in the pod the tag that the PF adds, at the xPU the network's
	VLAN int32 `json:"vlan,omitempty"`
	// in bytes; at the xPU the maximum of the network
	MTU       int32    `json:"mtu,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
	Port      string   `json:"port,omitempty"` // id at the OPI agent
	State     string   `json:"state,omitempty"`
}

// Status is the status of a stage.
type Status string

const (
	Done    Status = "Done"
	Waiting Status = "Waiting" // not finished, or not begun
	Failed  Status = "Failed"
	Skipped Status = "Skipped" // not needed
	Unknown Status = "Unknown" // the source of information could not be asked
)

// Stage is a step in the life of an interface.
type Stage struct {
	Name   string    `json:"name"`
	Status Status    `json:"status"`
	Time   time.Time `json:"time,omitzero"` // when it ended
	Text   string    `json:"text,omitempty"`
}

// Names of the stages in their order. With a pool that provisions BeforeBind, Bound follows
// Provisioned.
const (
	Requested   = "Requested"
	Allocated   = "Allocated"
	Bound       = "Bound"
	Provisioned = "Provisioned"
	Prepared    = "Prepared"
	Attached    = "Attached"
	Running     = "Running"
	Released    = "Released" // of a pod that ends
)

// Event is an event of the API server.
type Event struct {
	Time    time.Time `json:"time"`
	Type    string    `json:"type"`
	Reason  string    `json:"reason"`
	Object  string    `json:"object"` // "Pod/web"
	From    string    `json:"from,omitempty"`
	Message string    `json:"message"`
	Count   int32     `json:"count,omitempty"`
}

// Of returns the explanation of a pod.
func Of(ctx context.Context, sources Sources, key types.NamespacedName) (*Pod, error) {
	facts, err := gather(ctx, sources, key)
	if err != nil {
		return nil, err
	}

	out := &Pod{
		Namespace: key.Namespace, Name: key.Name, Node: facts.pod.Spec.NodeName,
		Phase: string(facts.pod.Status.Phase), Interfaces: []Interface{},
		Why: facts.why, Events: facts.events, Unknown: facts.unknown,
	}

	for i := range facts.claims {
		out.Interfaces = append(out.Interfaces, facts.claimed(&facts.claims[i])...)
	}

	out.Interfaces = append(out.Interfaces, facts.extended()...)
	for i := range out.Interfaces {
		compare(&out.Interfaces[i])
	}

	out.OK, out.Verdict = verdict(facts, out)
	return out, nil
}
