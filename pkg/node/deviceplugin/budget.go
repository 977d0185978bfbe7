package deviceplugin

import (
	"context"
	"errors"
	"sync"
	"time"
)

const (
	// allocateTimeout is how long an Allocate waits for a Function where Manager.AllocateTimeout is 0. The kubelet admits
	// pods, ends them and probes them in one loop, which stands still meanwhile.
	allocateTimeout = 2500 * time.Millisecond
	// impatience is how long, after an Allocate waited in vain, others wait only a fifth of that: an xPU that is away
	// would otherwise stop the kubelet's loop for as many times as pods wait for it.
	impatience = 10 * time.Second
)

// allocateBudget says how long an Allocate may wait. The zero value is ready for use.
type allocateBudget struct {
	mutex  sync.Mutex
	vainly time.Time // when an Allocate last waited in vain
}

// timeout is the time for the next Allocate, of which usual is the longest.
func (p *allocateBudget) timeout(usual time.Duration) time.Duration {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if time.Since(p.vainly) < impatience {
		return usual / 5
	}
	return usual
}

// ended says how an Allocate ended that had this context.
func (p *allocateBudget) ended(ctx context.Context, err error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	switch {
	case err == nil:
		p.vainly = time.Time{}
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		p.vainly = time.Now()
	}
}
