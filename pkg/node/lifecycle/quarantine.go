// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

const (
	// quarantineAfter is how long a way back may fail, from its first failure, before the Function
	// is quarantined. Callers wait longer: a DEL 30 s, an Unprepare 45 s; and both call again.
	quarantineAfter = 20 * time.Second
	// A quarantined Function is tried again after firstPause, and after twice the last pause each
	// time, up to longestPause.
	firstPause, longestPause = time.Minute, time.Hour
	// changePause is how long after a try a change of the device does not cause another one, as a
	// try changes the device too.
	changePause = 5 * time.Second
	// maxMessage is how many bytes of an error are kept, as a pod can give a netdev long names.
	maxMessage = 1024
)

// wayBackError is why a Function did not come back. A definite one does not pass by trying again at
// once.
type wayBackError struct {
	error
	reason   journal.QuarantineReason
	definite bool
}

func (e *wayBackError) Unwrap() error { return e.error }

// troubles are the ways back that failed, in the memory of this process: another agent tries each
// at its start. The zero value is ready for use, by several goroutines at once.
type troubles struct {
	mutex sync.Mutex
	all   map[function.ID]trouble
}

// trouble is a way back that failed.
type trouble struct {
	since, last time.Time // of the first failure and of the last one, by the monotonic clock
	// after the last one before it is tried again by itself; 0 unless quarantined
	pause  time.Duration
	device sight // of the device after the last one
}

// sight is what can make a way back succeed that failed: how the inventory sees a Function and its
// PF.
type sight struct {
	exists, pfExists   bool
	driver, netdev     string
	pfDriver, pfNetdev string
	link               bool
}

func (s *troubles) get(id function.ID) (t trouble, exists bool) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	t, exists = s.all[id]
	return t, exists
}

// failed adds a failure of now.
func (s *troubles) failed(id function.ID, device sight) trouble {
	s.mutex.Lock()
	defer s.mutex.Unlock()

	if s.all == nil {
		s.all = map[function.ID]trouble{}
	}

	t, again := s.all[id]
	t.last, t.device = time.Now(), device
	if !again {
		t.since = t.last
	}

	s.all[id] = t
	return t
}

func (s *troubles) pause(id function.ID, pause time.Duration) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if t, exists := s.all[id]; exists {
		t.pause = pause
		s.all[id] = t
	}
}

func (s *troubles) end(id function.ID) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	delete(s.all, id)
}

// look is how the inventory sees the device of a record.
func (m *Manager) look(a journal.Attachment) sight {
	f, exists := m.options.Seen(a.Function)
	pf, pfExists := m.options.Seen(function.ID{Address: a.PF})
	return sight{
		exists: exists, driver: f.Driver, netdev: f.Netdev, link: f.LinkUp,
		pfExists: pfExists, pfDriver: pf.Driver, pfNetdev: pf.Netdev,
	}
}

// failed decides what becomes of a Function whose way back failed. It returns nil once the Function
// is quarantined, as its pod may go then, and the failure before that. The caller has the
// Function's lock.
func (m *Manager) failed(a journal.Attachment, failure error) error {
	t := m.troubles.failed(a.Function, m.look(a))
	why := &wayBackError{error: failure, reason: journal.NotRestored}
	errors.As(failure, &why)
	first := !a.Quarantined()
	if first && !why.definite && time.Since(t.since) < quarantineAfter {
		return failure
	}

	now := m.options.Now().UTC()
	q := journal.Quarantine{Reason: why.reason, Message: bounded(failure.Error()), Since: now}
	if !first {
		q.Since, q.Attempts = a.Quarantine.Since, a.Quarantine.Attempts+1
	}

	pause := pauseAfter(q.Attempts)
	q.RetryAt = now.Add(pause)
	a.Quarantine = &q
	if err := m.put(a); err != nil {
		return errors.Join(failure, err)
	}

	m.troubles.pause(a.Function, pause)
	log := m.log.WithValues("function", a.Function.String(), "reason", string(q.Reason), "again",
		pause.String())
	if first {
		log.Error(failure, "The Function is quarantined: its pod goes, and no other owner gets it")
		m.options.Quarantined(a)
	} else {
		log.Info("The Function is still quarantined", "attempts", q.Attempts, "message", q.Message)
	}

	m.healthChanged(a.Function)
	m.letPortGo(a)

	return nil
}

// pauseAfter is the pause before the next try, after so many.
func pauseAfter(attempts int) time.Duration {
	return min(firstPause<<min(attempts, 10), longestPause)
}

// bounded is a text of at most maxMessage bytes.
func bounded(text string) string {
	if len(text) <= maxMessage {
		return text
	}
	return strings.ToValidUTF8(text[:maxMessage], "") + "..."
}

// letPortGo has the Port of a quarantined Function deleted once its reservation is over: nothing of
// the pod is left at the xPU then, whatever the netdev still has.
func (m *Manager) letPortGo(a journal.Attachment) {
	if a.State == journal.Releasing && m.options.Hooks != nil {
		m.options.Hooks.Add(a.Function)
	}
}

// disown ends the reservation of a quarantined Function, which stays quarantined. The caller has
// the Function's lock.
func (m *Manager) disown(a journal.Attachment) error {
	a.State = journal.Releasing
	if err := m.put(a); err != nil {
		return err
	}
	if err := m.options.Expose(a); err != nil {
		return err
	}

	m.letPortGo(a)
	return nil
}

// checkDriver compares the driver that is bound with the one that must be. A device that is gone
// has none to compare; one that cannot be read is unknown, and looked at again.
func (m *Manager) checkDriver(a journal.Attachment) error {
	want, known := a.OwnDriver()
	setUp := a.Setup != nil && a.Setup.Driver != ""
	// it is set up until its release
	if m.options.Driver == nil || !known || ownSF(a) || setUp && a.State == journal.Detaching {
		return nil
	}

	driver, err := m.options.Driver(a.Function)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("its driver cannot be read: %w", err)
	case driver == want:
		return nil
	}

	// Trying again at once does not bind the driver. The way back goes on when the device changes.
	return &wayBackError{errors.New(otherDriver(driver, want)), journal.WrongDriver, true}
}

func otherDriver(driver, want string) string {
	switch {
	case driver == "":
		return "has no driver, was " + want
	case want == "":
		return fmt.Sprintf("driver is %s, was none", driver)
	}
	return fmt.Sprintf("driver is %s, was %s", driver, want)
}

// retryDue says whether a quarantined Function is to be tried again.
func (m *Manager) retryDue(_ context.Context, _ trigger, d *decision) (bool, error) {
	t, tried := m.troubles.get(d.id)
	if !tried {
		return true, nil
	}
	since := time.Since(t.last)
	return since >= t.pause || since >= changePause && m.look(d.record) != t.device, nil
}

// Quarantined describes a Function that is kept from every owner since it did not come back as it
// was; "" for all others.
func (m *Manager) Quarantined(id function.ID) string {
	a, _ := m.journal.Get(id)
	if !a.Quarantined() {
		return ""
	}
	return "the Function " + quarantined(a)
}

func quarantined(a journal.Attachment) string {
	return fmt.Sprintf("is quarantined, as it did not come back as it was from %s: %s; it is "+
		"tried again now and then, and "+
		"\"xpuctl release\" frees it", lastPod(a), a.Quarantine.Message)
}

// errNotQuarantined is the error for a Function that an administrator need not release.
var errNotQuarantined = errors.New("is not quarantined")

// Release tries a quarantined Function again at once, as an administrator asks for it. With asItIs
// the Function is let go without that: the administrator says that its next owner may have it as it
// is. outcome says in words what became of it.
func (m *Manager) Release(
	ctx context.Context, id function.ID, asItIs bool,
) (outcome string, err error) {
	defer wrap(&err, id)
	defer m.healthChanged(id)

	err = m.withLock(ctx, id, func(a journal.Attachment) error {
		if !a.Quarantined() {
			return errNotQuarantined
		}

		message := a.Quarantine.Message
		if asItIs {
			outcome = "is let go as it is, by an administrator: " + message
			return m.letGo(m.log, a, outcome)
		}
		if err := m.finish(ctx, a); err != nil {
			return err
		}

		if now, _ := m.journal.Get(id); now.Quarantined() {
			return fmt.Errorf("is still quarantined: %s; if its next owner may have it as it is, "+
				"say so by --as-it-is",
				now.Quarantine.Message)
		}

		outcome = "is as it was"
		return nil
	})

	return outcome, err
}
