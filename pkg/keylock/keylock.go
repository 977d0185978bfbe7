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

// Lock takes the lock of the key. The caller must call unlock once. If ctx ends before Lock has the lock, or has ended
// when Lock is called, the error is [context.Cause]. A lock is not reentrant.
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

// TryLock does not wait. taken is false if somebody else has the lock of the key; else unlock must be called once.
func (l *Locks[K]) TryLock(key K) (unlock func(), taken bool) {
	unlock, held := l.take(key)
	return unlock, held == nil
}

// take takes the lock, or returns a channel that is closed when its holder unlocks it.
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
