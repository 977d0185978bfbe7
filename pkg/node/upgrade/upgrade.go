// SPDX-License-Identifier: Apache-2.0

// Package upgrade replaces the running agent of a node by a new one without a gap, as a rolling
// update with maxSurge does. Both agents run for some seconds, and every request of the kubelet or
// of a container runtime finds an agent that answers it, now or a moment later.
//
// The running agent is the predecessor, and the new one is its successor. One agent at a time has
// the node: it has the journal open, which locks the journal's file. An agent without the journal
// changes nothing on the node. The upgrade takes these steps:
//
//  1. The successor starts. It serves its [Readiness] at a socket of its own, and is not ready. It
//     registers its DRA driver with the kubelet ([Register]). The kubelet calls the driver that it
//     registered last, so claims wait at the successor from now on.
//  2. The successor connects to the predecessor's [Socket], and waits until the kubelet knows its
//     DRA driver. Then it asks for the node ([TakeOver]).
//  3. The predecessor gets the request ([AwaitSuccessor]), and stops its work. It stays ready. Its
//     device plugin completes the running Allocates, and forwards later ones ([Relay]). Its CNI
//     server accepts no connection any more, but keeps the listening socket, so that requests wait
//     in the queue of the socket. Its DRA driver completes the running calls
//     ([Registration.Close]). All parts except the device plugin end, and it closes the journal.
//  4. The predecessor gives the node to the successor, with the listening socket of the CNI server
//     ([Successor.Give]). It forwards calls to its device plugin until its process is ended.
//  5. The successor opens the journal, and recovers what the journal records. It serves the CNI
//     socket once it knows the pools ([Predecessor.Listener]), or after some seconds. It lets the
//     claims through ([Registration.Open]), and offers its resources to the kubelet.
//  6. The successor is ready once the kubelet knows its resources. The DaemonSet's controller then
//     ends the pod of the predecessor.
//  7. The connection of step 2 closes with the predecessor's process ([Predecessor.AwaitEnd]). The
//     successor registers its resources again, because kubelets before 1.37 lose them then.
//
// If an agent dies, or is ended, during the upgrade:
//
//   - The successor, before step 3: the predecessor has the node as before. Sockets that the
//     successor left for the kubelet are removed by the next agent that starts.
//   - The successor, from step 3 on: the predecessor completes step 3. It sees that the connection
//     is closed, and ends with an error ([Successor.AwaitEnd]), so that the kubelet starts it
//     again. The new process takes the node like any agent.
//   - The predecessor, before step 4: the successor gets no answer, and waits for the journal. The
//     kernel unlocks the journal with the end of the process. The CNI socket is lost with the
//     requests in its queue, and the successor makes a new one.
//   - The predecessor, from step 4 on: the successor goes on. Calls that the predecessor was
//     forwarding fail.
//   - Both: the next agent finds no process behind the socket, and a journal that is not locked.
//
// A predecessor may not listen at the socket, or may refuse because it has another version of the
// protocol. Then the successor is ready while it waits for the journal, because the rolling update
// would not end the predecessor otherwise. While a predecessor has not completed step 3, the
// successor waits, and is not ready.
package upgrade

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// ErrSucceeded is the reason to end the work of an agent when a successor has asked for the node.
var ErrSucceeded = errors.New("another agent has the node")

// Socket returns the path of the socket at which the agent with this state directory can be asked
// for the node.
func Socket(stateDir string) string { return filepath.Join(stateDir, "handover.sock") }

// TakeOver asks the agent behind the socket for the node, and returns the predecessor once it has
// ended its work. It returns nil if there is no other agent, or if the other agent does not hand
// the node over, so that this agent has to wait for the journal. Before it asks, it calls known,
// which returns once the kubelet knows this agent, within 10 s; known may be nil. An error means
// that ctx has ended.
func TakeOver(
	ctx context.Context, socket string, known func(context.Context), readiness *Readiness,
	log logr.Logger,
) (*Predecessor, error) {
	readiness.Set(func() error {
		return errors.New("does not have the node yet: another agent has it, and was asked to " +
			"hand over")
	})

	p, err := dial(ctx, socket)
	if err == nil && p != nil {
		if known != nil {
			known(ctx)
		}
		begin := time.Now()
		if err = p.take(ctx, version.String()); err == nil {
			log.Info("Another agent has handed the node over", "took", time.Since(begin).String())
			return p, nil
		}
	}

	if err != nil && ctx.Err() == nil {
		log.Error(err, "The agent that has the node does not hand over; waiting for its end")
	}

	return nil, ctx.Err()
}
