// SPDX-License-Identifier: Apache-2.0

// Package notify notifies goroutines of changes.
package notify

import (
	"context"
	"sync"
)

// Signal wakes its subscribers. It carries no data: a subscriber reads the state itself, and
// several changes may wake it only once. The zero value is ready for use. Safe for concurrent use.
type Signal struct {
	subscribers sync.Map // set of chan struct{}
}

// Notify wakes every subscriber. It never blocks.
func (s *Signal) Notify() {
	for subscriber := range s.subscribers.Range {
		select {
		case subscriber.(chan struct{}) <- struct{}{}:
		default: // it has not received the last value yet
		}
	}
}

// Subscribe returns a channel that receives a value after every Notify from now on, until ctx ends.
// Values may be merged. The channel is never closed.
func (s *Signal) Subscribe(ctx context.Context) <-chan struct{} {
	subscriber := make(chan struct{}, 1)
	s.subscribers.Store(subscriber, nil)
	context.AfterFunc(ctx, func() { s.subscribers.Delete(subscriber) })
	return subscriber
}
