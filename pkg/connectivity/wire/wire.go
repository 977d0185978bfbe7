// SPDX-License-Identifier: Apache-2.0

// Package wire defines what "xpuctl test" says to its pods, and what they say to it. The orders are
// in an annotation of the pod, which the kubelet puts into a file. The reports are lines of the
// pod's log. So neither needs a right to run something in a pod.
package wire

import (
	"net/netip"
	"time"
)

// AnnotationOrder is the annotation of a pod that has its [Order] in JSON.
const AnnotationOrder = "xpu.opiproject.org/test-order"

// OrderFile is the name of the file that has the annotation's value in the pod.
const OrderFile = "order"

// Bounds. They keep a pod from filling its node's disk, and a log from filling memory.
const (
	// MaxQuestions is how many questions an order may have.
	MaxQuestions = 64
	// MaxHeard is how many pods of other networks a report has that were heard.
	MaxHeard = 64
	// MaxLine is the length of a report in bytes.
	MaxLine = 64 << 10
)

// Order is something that a pod does once.
type Order struct {
	// Number is 1 for the first order. A pod ignores an order whose number is not higher than the
	// one before.
	Number    int        `json:"number"`
	Questions []Question `json:"questions,omitempty"`
	// Call makes the pod call all pods of its segment, by IPv4 broadcast and IPv6 multicast.
	Call bool `json:"call,omitempty"`
	// Patience is how long the pod waits for each answer. A question is repeated meanwhile.
	Patience time.Duration `json:"patience"`
}

// Question is a packet that a pod sends to another one, which answers with a packet of the same
// size.
type Question struct {
	Address netip.Addr `json:"address"`
	// Size is the size of the IP packet in bytes, header included. It is not fragmented. 0 means a
	// small one.
	Size int `json:"size,omitempty"`
}

// Report is what a pod says when its interface is there, and after each order. The first report has
// no order.
type Report struct {
	Order     int       `json:"order,omitempty"`
	Interface Interface `json:"interface,omitzero"`
	// Answers are in the order of the questions.
	Answers []Answer `json:"answers,omitempty"`
	// Heard are pods of other networks whose packets have come since the pod started: the first of
	// each network.
	Heard []Peer `json:"heard,omitempty"`
	// Called are calls of pods of the same network that have come since the pod started: the first
	// of each IP version. Only they show that the pod would hear the calls of other networks.
	Called []Call `json:"called,omitempty"`
	// Error is why the pod could not do it.
	Error string `json:"error,omitempty"`
}

// Interface is an interface as the pod sees it.
type Interface struct {
	Name string `json:"name"`
	MAC  string `json:"mac"`
	MTU  int    `json:"mtu"` // in bytes
	Up   bool   `json:"up"`
	// Addresses has no link-local ones.
	Addresses []netip.Prefix `json:"addresses,omitempty"`
}

// Answer is what came of a question. It has From, or Silent, or Unsent, or Error.
type Answer struct {
	From *Peer `json:"from,omitempty"`
	// Took is the time between the packet that was answered and its answer.
	Took time.Duration `json:"took,omitempty"`
	// Silent is set if a packet was sent, and nobody answered in time.
	Silent bool `json:"silent,omitempty"`
	// Unsent is set if no packet was sent, because the kernel has no route to the address by the
	// interface.
	Unsent bool `json:"unsent,omitempty"`
	// Error is why no packet could be sent.
	Error string `json:"error,omitempty"`
}

// Call is a packet to all pods of a segment.
type Call struct {
	From Peer `json:"from"`
	IPv6 bool `json:"ipv6,omitempty"`
}

// Peer is a pod of a test.
type Peer struct {
	Pod     string `json:"pod"`
	Network string `json:"network"`
}
