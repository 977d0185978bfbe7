// SPDX-License-Identifier: Apache-2.0

// Package explain tells the life of a pod's interfaces, stage by stage, from what everybody says
// who has a part in it: scheduler, controller, agent, kubelet. It says in one sentence what is
// wrong.
package explain

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// Sources are asked for what they know.
type Sources struct {
	Reader client.Reader
	// State asks the agent of a node.
	State func(ctx context.Context, node string) (*nodestate.State, error)
	// Schedule says why no node takes a pod, or which node does.
	Schedule func(ctx context.Context, pod *corev1.Pod) (why []string, node string, err error)
}

// Pod is the life of a pod's interfaces.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Node      string `json:"node,omitempty"`
	Phase     string `json:"phase"`
	// OK says that nothing is wrong. Verdict is what is wrong, or that nothing is.
	OK         bool        `json:"ok"`
	Verdict    string      `json:"verdict"`
	Interfaces []Interface `json:"interfaces"`
	// Why has the reasons of each node, for a pod that no node takes.
	Why []string `json:"why,omitempty"`
	// about the pod, its claims and XPUPorts, the oldest first
	Events []Event `json:"events,omitempty"`
	// Unknown is what could not be found out.
	Unknown []string `json:"unknown,omitempty"`
}

// Interface is one Function that the pod has, or is to have.
type Interface struct {
	Claim    string `json:"claim,omitempty"`    // name of the ResourceClaim
	Request  string `json:"request,omitempty"`  // in the claim
	Resource string `json:"resource,omitempty"` // extended resource, where there is no claim
	Name     string `json:"name,omitempty"`     // in the pod

	Pool     string `json:"pool,omitempty"`
	Function string `json:"function,omitempty"`
	Network  string `json:"network,omitempty"`
	XPU      string `json:"xpu,omitempty"`

	Stages []Stage `json:"stages"`
	// Host is the interface as it is in the pod, Card the Port as the xPU serves it. Nil is not
	// known, or not there.
	Host *Side `json:"host,omitempty"`
	Card *Side `json:"card,omitempty"`
	// sentences about what does not fit together
	Differences []string `json:"differences,omitempty"`
}

// Side is one end of an interface.
type Side struct {
	MAC string `json:"mac,omitempty"`
	// in the pod the tag that the PF adds, at the xPU that of the network
	VLAN int32 `json:"vlan,omitempty"`
	// bytes; at the xPU the largest that the network carries
	MTU       int32    `json:"mtu,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
	Port      string   `json:"port,omitempty"` // id at the OPI agent
	State     string   `json:"state,omitempty"`
}

// Status is how a stage is.
type Status string

const (
	Done    Status = "Done"
	Waiting Status = "Waiting" // it has not ended yet, or not begun
	Failed  Status = "Failed"
	Skipped Status = "Skipped" // it is not needed
	Unknown Status = "Unknown" // whoever knows could not be asked
)

// Stage is a step of an interface's life.
type Stage struct {
	Name   string    `json:"name"`
	Status Status    `json:"status"`
	Time   time.Time `json:"time,omitzero"` // when it ended
	Text   string    `json:"text,omitempty"`
}

// Names of the stages, in their order; with a pool that provisions BeforeBind, Bound comes after
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

// Event is one of the API server's.
type Event struct {
	Time    time.Time `json:"time"`
	Type    string    `json:"type"`
	Reason  string    `json:"reason"`
	Object  string    `json:"object"` // "Pod/web"
	From    string    `json:"from,omitempty"`
	Message string    `json:"message"`
	Count   int32     `json:"count,omitempty"`
}

// Of explains a pod.
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
