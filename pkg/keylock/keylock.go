// SPDX-License-Identifier: Apache-2.0

// Package keylock provides a lock for each key.
package keylock

import (
	"context"
	"sync"
)

// Locks provides a lock for each key. The zero value is ready for use. Safe for concurrent use.
type Locks[K comparable] struct {
	held sync.Map // key to *holder
}

// holder holds a lock until released is closed. cancel ends its context, if it has one.
type holder struct {
	cancel   context.CancelCauseFunc
	released chan struct{}
}

// Lock locks the key. The caller must call unlock exactly once. If ctx ends before the key is
// locked, or has ended before the call, Lock returns [context.Cause]. Locks are not reentrant.
func (l *Locks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	for ctx.Err() == nil {
		unlock, other := l.acquire(key, func(error) {})
		if other == nil {
			return unlock, nil
		}
		select {
		case <-other.released:
		case <-ctx.Done():
		}
	}
	return nil, context.Cause(ctx)
}

// TakeOver locks the key, and interrupts the holders that it waits for: it cancels the context that
// TakeOver returned to them, with the reason as the cause. The returned context is for the work
// under the lock, and ends with unlock.
func (l *Locks[K]) TakeOver(
	ctx context.Context, key K, reason error,
) (_ context.Context, unlock func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	for {
		unlock, other := l.acquire(key, cancel)
		if other == nil {
			return ctx, unlock, nil
		}

		other.cancel(reason)
		select {
		case <-other.released:
		case <-ctx.Done():
			defer cancel(nil)
			return nil, nil, context.Cause(ctx)
		}
	}
}

// TryLock locks the key if it is free, without waiting. If taken is true, the caller must call
// unlock exactly once.
func (l *Locks[K]) TryLock(key K) (unlock func(), taken bool) {
	unlock, other := l.acquire(key, func(error) {})
	return unlock, other == nil
}

// Held reports whether the key is locked.
func (l *Locks[K]) Held(key K) bool {
	_, held := l.held.Load(key)
	return held
}

// acquire locks the key, or returns its holder.
func (l *Locks[K]) acquire(key K, cancel context.CancelCauseFunc) (unlock func(), other *holder) {
	mine := &holder{cancel: cancel, released: make(chan struct{})}
	if other, taken := l.held.LoadOrStore(key, mine); taken {
		return nil, other.(*holder)
	}
	return func() {
		cancel(nil)
		l.held.Delete(key)
		close(mine.released)
	}, nil
}
