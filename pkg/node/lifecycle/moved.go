// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// freeLosses is how often a sandbox gets back a lost Function without a pause, because a card may
// be reset several times in a row. After the next loss the netdev stays on the host for firstPause,
// and after each further loss for twice as long.
const freeLosses = 5

// losses counts the losses of sandboxes since the agent started, because a pod may move its netdev
// to the host every time it gets it back. It is safe for concurrent use.
type losses struct {
	mutex sync.Mutex
	all   map[function.ID]*loss
}

// loss counts how often a sandbox lost one Function.
type loss struct {
	sandbox string
	// moved says that the log already names the pod that moved the netdev away.
	moved bool
	count int
	// last is the time of the last loss, with a monotonic reading.
	last time.Time
}

// of returns the losses of the record's sandbox. The caller must hold the mutex.
func (l *losses) of(a journal.Attachment) *loss {
	if l.all == nil {
		l.all = map[function.ID]*loss{}
	}
	if have := l.all[a.Function]; have == nil || have.sandbox != a.Sandbox {
		l.all[a.Function] = &loss{sandbox: a.Sandbox}
	}
	return l.all[a.Function]
}

// add counts a loss.
func (l *losses) add(a journal.Attachment) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	of := l.of(a)
	of.count, of.last = of.count+1, time.Now()
}

// pause returns an error as long as the Function has to stay on the host.
func (l *losses) pause(a journal.Attachment) error {
	l.mutex.Lock()
	defer l.mutex.Unlock()

	of := l.of(a)
	if of.count <= freeLosses {
		return nil
	}

	if left := pauseAfter(of.count-freeLosses-1) - time.Since(of.last); left > 0 {
		return fmt.Errorf("the pod has lost it %d times and gets it back in %s", of.count,
			left.Round(time.Second))
	}

	return nil
}

// firstMove reports whether this is the first time that the pod was seen to move the netdev away.
func (l *losses) firstMove(a journal.Attachment) bool {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	of := l.of(a)
	first := !of.moved
	of.moved = true
	return first
}

// movedByPod reports whether the netdev on the host is the same netdev that the pod had. In this
// case the pod moved it there, and the device was not made anew: the kernel does not give a new
// netdev an index that was used before (dev_index_reserve in net/core/dev.c).
func (m *Manager) movedByPod(ctx context.Context, a journal.Attachment) (bool, error) {
	wanted := a
	wanted.Interface.Name = a.Observed.Name
	_, now, _, err := m.plan(ctx, wanted, a.Place.NetNS)
	if err != nil {
		return false, err
	}

	index := now.Identity.Index
	if index != a.Before.Identity.Index && (index != a.Place.Index || index == 0) {
		return false, nil
	}

	if m.losses.firstMove(a) {
		m.log.Info("A pod has moved the netdev of its Function to the host; the pod does not get "+
			"it back",
			"function", a.Function.String(), "netdev", now.Name, "pod",
			a.Pod.Namespace+"/"+a.Pod.Name, "sandbox", a.Sandbox)
	}

	return true, nil
}
