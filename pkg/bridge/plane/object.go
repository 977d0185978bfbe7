// SPDX-License-Identifier: Apache-2.0

package plane

// Object is a network, a port, a VRF or an SVI.
type Object struct {
	Kind ObjectKind
	ID   string
}

// ObjectKind is the kind of an Object.
type ObjectKind int

const (
	KindNetwork ObjectKind = iota
	KindPort
	KindVRF
	KindSVI
)

// routes reports whether the object is a VRF or an SVI.
func (o Object) routes() bool { return o.Kind == KindVRF || o.Kind == KindSVI }

// kindOf returns the kind of the object that a netdev of the agent is made for, by the netdev's
// type. In the mode with a bridge for each network, a bridge is also the netdev of an SVI.
func kindOf(netdevType string) ObjectKind {
	switch netdevType {
	case "vrf":
		return KindVRF
	case "vlan":
		return KindSVI
	}
	return KindNetwork
}

// ObjectError is an error whose text names another object, which may belong to another client.
type ObjectError struct {
	Object    Object
	Text      string // names the object
	Anonymous string // the text for clients that may not know of the object
}

func (e ObjectError) Error() string { return e.Text }

// Change says what an event may have changed, so that it has to be reconciled. It may name too
// much, because reconciling more than what has changed does no harm.
type Change struct {
	Scope Scope
	// Object is set for ScopeObject. The id of a port may be the name of any netdev.
	Object Object
}

// Scope is the extent of a Change.
type Scope int

const (
	ScopeObject  Scope = iota // one object
	ScopeAll                  // everything: events were lost, or a shared bridge has changed
	ScopeVXLAN                // the networks with a VNI: an uplink or its addresses have changed
	ScopeMissing              // the ports that failed: a new netdev may be the representor of one
	ScopeFilter               // the source filter: another program has changed it
	ScopeRouting              // the VRFs and SVIs: routes or what the machine forwards have changed
)
