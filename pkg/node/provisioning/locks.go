package provisioning

import (
	"context"
	"sync"
)

// locks has a lock for each key. The zero value is ready for use.
type locks[K comparable] struct {
	mutex sync.Mutex
	held  map[K]chan struct{} // closed by unlock
}

// lock waits until nobody has the lock of the key, or ctx ends. unlock must be called once.
func (l *locks[K]) lock(ctx context.Context, key K) (unlock func(), err error) {
	for {
		before := l.take(key)
		if before == nil {
			return func() { l.give(key) }, nil
		}
		select {
		case <-before:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// tryLock does not wait; taken is false if somebody has the lock of the key. unlock must be called once.
func (l *locks[K]) tryLock(key K) (unlock func(), taken bool) {
	if l.take(key) != nil {
		return nil, false
	}
	return func() { l.give(key) }, true
}

// take returns nil if the lock is the caller's now, and else what says that it is free.
func (l *locks[K]) take(key K) <-chan struct{} {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if before, taken := l.held[key]; taken {
		return before
	}
	if l.held == nil {
		l.held = map[K]chan struct{}{}
	}
	l.held[key] = make(chan struct{})
	return nil
}

func (l *locks[K]) give(key K) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	close(l.held[key])
	delete(l.held, key)
}
