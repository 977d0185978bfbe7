// Package keylock has a lock for each key.
package keylock

import (
	"context"
	"sync"
)

// Locks has a lock for each key. The zero value is ready for use, by several goroutines at once.
type Locks[K comparable] struct {
	held sync.Map // a chan struct{} by key, closed by unlock
}

// Lock makes the caller the only one to work on the key until it calls unlock, once. It waits until nobody has the lock,
// or ctx ends: then, also if the lock was free, the error is [context.Cause]. Whoever gave up must not be at work after
// it said so. A lock is not reentrant.
func (l *Locks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	for ctx.Err() == nil {
		unlock, held := l.take(key)
		if held == nil {
			return unlock, nil
		}
		select {
		case <-held:
		case <-ctx.Done():
		}
	}
	return nil, context.Cause(ctx)
}

// TryLock does not wait; taken is false if somebody has the lock of the key. unlock must be called once.
func (l *Locks[K]) TryLock(key K) (unlock func(), taken bool) {
	unlock, held := l.take(key)
	return unlock, held == nil
}

// take takes the lock, or returns what is closed when whoever holds it gives it back.
func (l *Locks[K]) take(key K) (unlock func(), held <-chan struct{}) {
	mine := make(chan struct{})
	if other, taken := l.held.LoadOrStore(key, mine); taken {
		return nil, other.(chan struct{})
	}
	return func() {
		l.held.Delete(key)
		close(mine)
	}, nil
}
