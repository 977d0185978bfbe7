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

// freeLosses is how often a sandbox gets back what it lost without a pause, because a card may be
// reset several times in a row. After one loss more the netdev stays on the host for firstPause,
// and after each further loss for twice as long.
const freeLosses = 5

// losses counts what sandboxes lost since the agent started. A pod may move its netdev to the host
// whenever it gets it back. It may be used by several goroutines at once.
type losses struct {
	mutex sync.Mutex
	all   map[function.ID]*loss
}

// loss is what a sandbox lost of one Function.
type loss struct {
	sandbox string
	moved   bool // it was logged that the pod moved the netdev away
	count   int
	last    time.Time // with a monotonic reading
}

// of returns the losses of the record's sandbox. The caller has the mutex.
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

// pause returns an error as long as the Function stays on the host.
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

// firstMove says whether it was not yet noted that the pod moved the netdev away.
func (l *losses) firstMove(a journal.Attachment) bool {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	of := l.of(a)
	first := !of.moved
	of.moved = true
	return first
}

// movedByPod says whether the netdev on the host is the very one that the pod had: the pod moved it
// there, and the device was not made anew. The kernel gives a new netdev no index that another had
// before (dev_index_reserve of net/core/dev.c).
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
