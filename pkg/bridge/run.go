package bridge

import (
	"context"
	"errors"
)

// task is something that Run looks at again. Looking more often than needed does no harm.
type task struct {
	kind taskKind
	id   string // of taskNetwork and taskPort; for a port it may be the name of a netdev that is no port's
}

type taskKind int

const (
	taskAll     taskKind = iota // events were lost, or the bridge of all networks changed
	taskUplink                  // the uplink or an address changed: networks with a VNI
	taskNetwork                 // one network
	taskPort                    // one port
	taskArrival                 // a new netdev may be the representor of a port that failed
	taskRetry                   // everything that failed
)

// Run follows what happens to netdevs and keeps the data plane as it has to be, until the context ends (nil) or the
// events do (an error). It may be called once.
func (a *Agent) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, a.tasks.ShutDown)()
	ended := make(chan error, 1)
	go func() {
		ended <- a.plane.watch(a.tasks.Add)
		a.tasks.ShutDown()
	}()
	for {
		t, shutdown := a.tasks.Get()
		if ctx.Err() != nil {
			return nil
		}
		if shutdown {
			return errors.Join(errors.New("opi-bridge: no more netdev events"), <-ended)
		}
		a.perform(t)
		a.tasks.Done(t)
	}
}

func (a *Agent) perform(t task) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch t.kind {
	case taskAll:
		a.reconcileAll()
	case taskUplink:
		for _, id := range idsWhere(a.networks, (*network).hasVNI) {
			a.reconcileNetwork(id)
		}
	case taskNetwork:
		a.reconcileNetwork(t.id)
	case taskPort:
		a.reconcilePort(t.id)
	case taskArrival:
		for _, id := range idsWhere(a.ports, (*port).failed) {
			a.reconcilePort(id)
		}
		a.retrySoon() // a driver may tell later whose representor it is, without an event
	case taskRetry:
		if a.retry() {
			a.tasks.AddRateLimited(t)
		}
	}
}

// retry looks again at everything that failed, and tells whether there still is something.
func (a *Agent) retry() bool {
	for _, id := range idsWhere(a.networks, (*network).failed) {
		a.reconcileNetwork(id)
	}
	for _, id := range idsWhere(a.ports, (*port).failed) {
		a.reconcilePort(id)
	}
	return len(idsWhere(a.networks, (*network).failed))+len(idsWhere(a.ports, (*port).failed)) > 0
}

// retrySoon has Run retry in a second, and from then on after 2, 4 ... 30 s: something failed anew, or what was in its way
// may be gone. A retry that is due sooner is not put off. Most failures end with an event, but not all: the kernel tells
// nobody of a new alternative name of a netdev that is down (netdev_state_change).
func (a *Agent) retrySoon() {
	a.tasks.Forget(task{kind: taskRetry})
	a.tasks.AddRateLimited(task{kind: taskRetry})
}
