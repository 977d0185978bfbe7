// Package opi speaks to an xPU's OPI agent in terms of Networks and Ports.
//
// OPI agents are asynchronous and loose about what they promise (Create proves nothing, most errors are Unknown), so
// each method of [Client] converges: it looks at what the agent has, does what is missing, and returns nil only when
// the agent says that exactly the wanted state is there. A method may be called again with the same arguments at any
// time, also when an earlier call's outcome is unknown.
package opi
