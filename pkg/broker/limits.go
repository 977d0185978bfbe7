// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Limits bound what the cluster of one tenant costs, whose API server may send anything. Zero
// values mean the defaults.
type Limits struct {
	// AnswerBytes bounds one answer of the API server: an object, a page of a list, or an event of
	// a watch. Default 4 MiB: a page has 50 objects, and one of etcd has 1.5 MiB at most.
	AnswerBytes int
	// BytesPerSecond bounds what is read of all answers together; AnswerBytes may come at once.
	// Default 8 MiB: to decode as much takes a fifth of a CPU, and the 16 384 XPUPorts that a
	// tenant may have are read within 10 s.
	BytesPerSecond int
	// RequestsPerSecond bounds how often the API server is asked, and how many changes of objects
	// are taken from it; as many may come at once. Default 1000, for three requests for each of 300
	// XPUPorts in a second.
	RequestsPerSecond int
	// Objects bounds how many objects of a kind are read. Default 16384.
	Objects int
	// CacheBytes bounds what is kept of the objects of all kinds, as JSON. Default 32 MiB, for
	// 16 384 XPUPorts and 1 000 XPUNodes.
	CacheBytes int
	// ObjectBytes bounds one object that is carried over, as JSON and without what is not kept.
	// Default 64 KiB: an XPUNode with 64 PFs has 30 kB, and an XPUPort 2 kB.
	ObjectBytes int

	// Ports is how many XPUPorts a tenant may have whose XPUTenant does not say. Default 10000, for
	// which the broker's memory is enough.
	Ports int
	// Nodes is how many XPUNodes a tenant may have whose XPUTenant does not say. Default 1000.
	Nodes int
}

// DefaultLimits are those of the zero value.
func DefaultLimits() Limits {
	return Limits{
		AnswerBytes: 4 << 20, BytesPerSecond: 8 << 20, RequestsPerSecond: 1000,
		Objects: 16384, CacheBytes: 32 << 20, ObjectBytes: 64 << 10,
		Ports: 10000, Nodes: 1000,
	}
}

func (l *Limits) setDefaults() {
	those := DefaultLimits()
	l.AnswerBytes = cmp.Or(l.AnswerBytes, those.AnswerBytes)
	l.BytesPerSecond = cmp.Or(l.BytesPerSecond, those.BytesPerSecond)
	l.RequestsPerSecond = cmp.Or(l.RequestsPerSecond, those.RequestsPerSecond)
	l.Objects = cmp.Or(l.Objects, those.Objects)
	l.CacheBytes = cmp.Or(l.CacheBytes, those.CacheBytes)
	l.ObjectBytes = cmp.Or(l.ObjectBytes, those.ObjectBytes)
	l.Ports = cmp.Or(l.Ports, those.Ports)
	l.Nodes = cmp.Or(l.Nodes, those.Nodes)
}

// Validate says which limit nothing could keep.
func (l *Limits) Validate() error {
	for _, of := range []struct {
		flag  string
		value int
	}{
		{"answer-bytes", l.AnswerBytes}, {"bytes-per-second", l.BytesPerSecond},
		{"requests-per-second", l.RequestsPerSecond},
		{"objects", l.Objects}, {"cache-bytes", l.CacheBytes}, {"object-bytes", l.ObjectBytes},
		{"ports", l.Ports}, {"nodes", l.Nodes},
	} {
		if of.value <= 0 {
			return fmt.Errorf("--tenant-%s: it is %d, and must be more than 0", of.flag, of.value)
		}
	}
	return nil
}

// refusal says that a tenant's API server does what none may, or sends more than it may.
type refusal struct {
	reason  string // of the condition Connected
	message string // what it did, and what would be right
}

func (r *refusal) Error() string { return r.message }

// misbehaves is that the API server does not answer as API servers do.
func misbehaves(format string, args ...any) *refusal {
	return &refusal{
		reason: v1alpha1.ReasonInvalidAnswer, message: cut(fmt.Sprintf(format, args...)),
	}
}

// tooMuch is that a limit is exceeded.
func tooMuch(format string, args ...any) *refusal {
	return &refusal{
		reason: v1alpha1.ReasonLimitExceeded, message: cut(fmt.Sprintf(format, args...)),
	}
}
