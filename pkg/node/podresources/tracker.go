package podresources

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Tracker is a client that keeps the kubelet's last list for callers that cannot wait. Its methods may be called by several
// goroutines at once.
type Tracker struct {
	*Client
	log logr.Logger

	assigned atomic.Pointer[map[function.ID][]Assignment]

	refreshing sync.Mutex // held while the kubelet is asked, so that an older answer never replaces a newer one
	away       bool       // the kubelet did not answer; guarded by refreshing
}

// NewTracker makes a tracker that knows nothing until [Tracker.Refresh].
func NewTracker(client *Client, log logr.Logger) *Tracker {
	t := &Tracker{Client: client, log: log}
	t.assigned.Store(&map[function.ID][]Assignment{})
	return t
}

// Refresh asks the kubelet. changed says whether its answer differs from the last one. Without an answer the tracker keeps
// what it knows, and logs that once.
func (t *Tracker) Refresh(ctx context.Context) (changed bool, err error) {
	t.refreshing.Lock()
	defer t.refreshing.Unlock()
	assigned, err := t.listed(ctx)
	if err != nil {
		if !t.away && !errors.Is(ctx.Err(), context.Canceled) {
			t.log.Error(err, "Pods' devices are not known anew, keeping what is known")
			t.away = true
		}
		return false, err
	}
	if t.away {
		t.log.Info("Pods' devices are known again")
	}
	t.away = false
	before := t.assigned.Swap(&assigned)
	return !maps.EqualFunc(*before, assigned, slices.Equal[[]Assignment]), nil
}

// InUse returns a message if a pod has the Function by another resource than this, "" if none has or the kubelet was never
// asked. The resource "" stands for ResourceClaims of this project's driver. It does not block.
func (t *Tracker) InUse(id function.ID, resource string) string {
	for _, a := range (*t.assigned.Load())[id] {
		if a.Resource != resource {
			by := "resource " + a.Resource
			if a.Resource == "" {
				by = "a ResourceClaim"
			}
			return fmt.Sprintf("%s still has it by %s: it is offered again when that pod is gone", a, by)
		}
	}
	return ""
}

// Has says whether a pod has the Function by this resource, "" for ResourceClaims of this project's driver. It is false if
// the kubelet was never asked. It does not block.
func (t *Tracker) Has(id function.ID, resource string) bool {
	return slices.ContainsFunc((*t.assigned.Load())[id], func(a Assignment) bool { return a.Resource == resource })
}
