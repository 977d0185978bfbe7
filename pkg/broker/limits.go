// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Limits bound the resources that one tenant's cluster may use, because its API server may send
// anything. A zero value means the default.
type Limits struct {
	// AnswerBytes bounds one answer of the API server: an object, a page of a list, or an event of
	// a watch. Default 4 MiB: a page has 50 objects, and an object in etcd has at most 1.5 MiB.
	AnswerBytes int
	// BytesPerSecond bounds the rate at which answers are read; AnswerBytes may arrive in a burst.
	// Default 8 MiB: decoding this much takes a fifth of a CPU, and the 16 384 XPUPorts that a
	// tenant may have are read within 10 s.
	BytesPerSecond int
	// RequestsPerSecond bounds requests to the API server, and separately the watch events that are
	// taken from it. As many may come in a burst. Default 1000, for three requests for each of 300
	// XPUPorts in a second.
	RequestsPerSecond int
	// Objects bounds how many objects of each kind are read. Default 16384.
	Objects int
	// CacheBytes bounds the size as JSON of the cached objects of all kinds. Default 32 MiB, for 16
	// 384 XPUPorts and 1 000 XPUNodes.
	CacheBytes int
	// ObjectBytes bounds the size as JSON of one object that is copied, without the fields that are
	// not cached. Default 64 KiB: an XPUNode with 64 PFs has 30 kB, and an XPUPort 2 kB.
	ObjectBytes int

	// Ports bounds the XPUPorts of a tenant whose XPUTenant has no spec.maxPorts. Default 10000,
	// for which the broker's memory is enough.
	Ports int
	// Nodes bounds the XPUNodes of a tenant whose XPUTenant has no spec.maxNodes. Default 1000.
	Nodes int
}

// DefaultLimits returns the limits that the zero value stands for.
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

// Validate returns an error that names a limit outside its range.
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

// refusal is the error for a tenant's API server that misbehaves or exceeds a limit.
type refusal struct {
	reason  string // of the condition Connected
	message string // what the server did, and what would be right
}

func (r *refusal) Error() string { return r.message }

// misbehaves returns the refusal of an answer that no correct API server gives.
func misbehaves(format string, args ...any) *refusal {
	return &refusal{
		reason: v1alpha1.ReasonInvalidAnswer, message: cut(fmt.Sprintf(format, args...)),
	}
}

// tooMuch returns the refusal of an answer that exceeds a limit.
func tooMuch(format string, args ...any) *refusal {
	return &refusal{
		reason: v1alpha1.ReasonLimitExceeded, message: cut(fmt.Sprintf(format, args...)),
	}
}
