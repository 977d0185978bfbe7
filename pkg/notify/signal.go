// Package notify tells goroutines that something changed.
package notify

import (
	"context"
	"sync"
)

// Signal wakes its subscribers. It carries no data: a subscriber reads the state itself. Several changes before it does
// wake it once. The zero value is ready for use, by several goroutines at once.
type Signal struct {
	mutex       sync.Mutex
	subscribers map[chan struct{}]struct{}
}

// Notify wakes every subscriber. It never blocks.
func (s *Signal) Notify() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for subscriber := range s.subscribers {
		select {
		case subscriber <- struct{}{}:
		default: // it has not received the last value yet
		}
	}
}

// Subscribe returns a channel that receives a value after every Notify from now on, until ctx ends. The channel is
// never closed.
func (s *Signal) Subscribe(ctx context.Context) <-chan struct{} {
	subscriber := make(chan struct{}, 1)
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.subscribers == nil {
		s.subscribers = map[chan struct{}]struct{}{}
	}
	s.subscribers[subscriber] = struct{}{}
	context.AfterFunc(ctx, func() {
		s.mutex.Lock()
		defer s.mutex.Unlock()
		delete(s.subscribers, subscriber)
	})
	return subscriber
}
