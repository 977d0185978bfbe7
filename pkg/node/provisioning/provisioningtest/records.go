// Package provisioningtest has what every [provisioning.Provisioner] must do, as one table of tests, and a journal for it.
package provisioningtest

import (
	"sync"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Records is a journal in memory. The zero value is empty. It may be used by several goroutines at once.
type Records struct {
	mutex sync.Mutex
	all   map[function.ID]journal.Attachment
}

// Get is the attachment of a Function.
func (r *Records) Get(id function.ID) (a journal.Attachment, ok bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	a, ok = r.all[id]
	return a, ok
}

// All are the attachments, in no order.
func (r *Records) All() []journal.Attachment {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var all []journal.Attachment
	for _, a := range r.all {
		all = append(all, a)
	}
	return all
}

// Put replaces the attachment of a Function.
func (r *Records) Put(a journal.Attachment) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.all == nil {
		r.all = map[function.ID]journal.Attachment{}
	}
	r.all[a.Function] = a
}

// Delete has the Function free.
func (r *Records) Delete(id function.ID) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.all, id)
}
