// SPDX-License-Identifier: Apache-2.0

// Package keylock has a lock for each key.
package keylock

import (
	"context"
	"sync"
)

// Locks has a lock for each key. The zero value is ready for use, by several goroutines at once.
type Locks[K comparable] struct {
	held sync.Map // a *holder by key
}

// holder has a lock until released is closed. cancel ends its context, if it has one.
type holder struct {
	cancel   context.CancelCauseFunc
	released chan struct{}
}

// Lock takes the lock of the key. The caller must call unlock once. If ctx ends before Lock has the
// lock, or has ended when Lock is called, the error is [context.Cause]. A lock is not reentrant.
func (l *Locks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	for ctx.Err() == nil {
		unlock, other := l.take(key, func(error) {})
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

// TakeOver takes the lock of the key, and makes every holder that it waits for end: it cancels the
// context that TakeOver returned to that holder, with the reason as the cause. The context is for
// the work under the lock, and ends with unlock.
func (l *Locks[K]) TakeOver(
	ctx context.Context, key K, reason error,
) (_ context.Context, unlock func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	for {
		unlock, other := l.take(key, cancel)
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

// TryLock does not wait. taken is false if somebody else has the lock of the key; else unlock must
// be called once.
func (l *Locks[K]) TryLock(key K) (unlock func(), taken bool) {
	unlock, other := l.take(key, func(error) {})
	return unlock, other == nil
}

// Held says whether somebody has the lock of the key.
func (l *Locks[K]) Held(key K) bool {
	_, held := l.held.Load(key)
	return held
}

// take takes the lock, or returns its holder.
func (l *Locks[K]) take(key K, cancel context.CancelCauseFunc) (unlock func(), other *holder) {
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
