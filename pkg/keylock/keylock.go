// Package keylock has a lock for each key.
package keylock

import (
	"context"
	"sync"
)

// Locks has a lock for each key. The zero value is ready for use, by several goroutines at once.
type Locks[K comparable] struct {
	mutex sync.Mutex
	held  map[K]chan struct{} // closed by unlock
}

// Lock makes the caller the only one to work on the key until it calls unlock, once. It waits until nobody has the lock,
// or ctx ends: then, also if the lock was free, the error is [context.Cause]. Whoever gave up must not be at work after
// it said so. A lock is not reentrant.
func (l *Locks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		before := l.take(key)
		if before == nil {
			return func() { l.give(key) }, nil
		}
		select {
		case <-before:
		case <-ctx.Done():
		}
	}
}

// TryLock does not wait; taken is false if somebody has the lock of the key. unlock must be called once.
func (l *Locks[K]) TryLock(key K) (unlock func(), taken bool) {
	if l.take(key) != nil {
		return nil, false
	}
	return func() { l.give(key) }, true
}

// take returns nil if the lock is the caller's now, and else what says that it is free.
func (l *Locks[K]) take(key K) <-chan struct{} {
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

func (l *Locks[K]) give(key K) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	close(l.held[key])
	delete(l.held, key)
}
