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
	// quarantineAfter is how long restoring a Function may fail, from the first failure on, before
	// the Function is quarantined. Callers wait longer, 30 s for a DEL and 45 s for an Unprepare,
	// and both call again.
	quarantineAfter = 20 * time.Second
	// A quarantined Function is retried after firstPause. Each pause is twice the last one, up to
	// longestPause.
	firstPause, longestPause = time.Minute, time.Hour
	// changePause is how long after an attempt a change of the device causes no other attempt,
	// because an attempt changes the device too.
	changePause = 5 * time.Second
	// maxMessage is how many bytes of an error are kept, because a pod can give its netdevs long
	// names.
	maxMessage = 1024
)

// undoError says why a Function could not be restored. If it is definite, an immediate retry cannot
// succeed.
type undoError struct {
	error
	reason   journal.QuarantineReason
	definite bool
}

func (e *undoError) Unwrap() error { return e.error }

// failures has the failed attempts to restore Functions. It is kept in memory only: the next agent
// makes an attempt when it starts. The zero value is ready for use, by several goroutines at once.
type failures struct {
	mutex sync.Mutex
	all   map[function.ID]failure
}

// failure describes the failed attempts to restore one Function.
type failure struct {
	// since is the time of the first failure, and last the time of the last one, with monotonic
	// readings.
	since, last time.Time
	// pause is how long to wait after the last attempt before the next one. It is 0 if the Function
	// is not quarantined.
	pause time.Duration
	// device is the device after the last attempt.
	device deviceView
}

// deviceView is what the inventory sees of a Function and its PF. A change may make the next
// attempt succeed.
type deviceView struct {
	exists, pfExists   bool
	driver, netdev     string
	pfDriver, pfNetdev string
	link               bool
}

func (s *failures) get(id function.ID) (t failure, exists bool) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	t, exists = s.all[id]
	return t, exists
}

// add records a failure at this moment.
func (s *failures) add(id function.ID, device deviceView) failure {
	s.mutex.Lock()
	defer s.mutex.Unlock()

	if s.all == nil {
		s.all = map[function.ID]failure{}
	}

	t, again := s.all[id]
	t.last, t.device = time.Now(), device
	if !again {
		t.since = t.last
	}

	s.all[id] = t
	return t
}

func (s *failures) pause(id function.ID, pause time.Duration) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if t, exists := s.all[id]; exists {
		t.pause = pause
		s.all[id] = t
	}
}

func (s *failures) end(id function.ID) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	delete(s.all, id)
}

// view returns what the inventory sees of the record's device.
func (m *Manager) view(a journal.Attachment) deviceView {
	f, exists := m.options.Seen(a.Function)
	pf, pfExists := m.options.Seen(function.ID{Address: a.PF})
	return deviceView{
		exists: exists, driver: f.Driver, netdev: f.Netdev, link: f.LinkUp,
		pfExists: pfExists, pfDriver: pf.Driver, pfNetdev: pf.Netdev,
	}
}

// quarantine handles a failed attempt to restore a Function. It returns the failure until the
// Function is quarantined, and nil after that, because the pod may end then. The caller must hold
// the Function's lock.
func (m *Manager) quarantine(a journal.Attachment, failure error) error {
	t := m.failures.add(a.Function, m.view(a))
	why := &undoError{error: failure, reason: journal.NotRestored}
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

	m.failures.pause(a.Function, pause)
	log := m.log.WithValues("function", a.Function.String(), "reason", string(q.Reason), "again",
		pause.String())
	if first {
		log.Error(failure, "The Function is quarantined: its pod goes, and no other owner gets it")
		m.options.Quarantined(a)
	} else {
		log.Info("The Function is still quarantined", "attempts", q.Attempts, "message", q.Message)
	}

	m.healthChanged(a.Function)
	m.deletePort(a)

	return nil
}

// pauseAfter returns the pause before the next attempt, after the given number of attempts.
func pauseAfter(attempts int) time.Duration {
	return min(firstPause<<min(attempts, 10), longestPause)
}

// bounded returns the text, cut to at most maxMessage bytes.
func bounded(text string) string {
	if len(text) <= maxMessage {
		return text
	}
	return strings.ToValidUTF8(text[:maxMessage], "") + "..."
}

// deletePort has the Port of a quarantined Function deleted once its reservation is over. Nothing
// of the pod is left on the xPU then, whatever state the netdev is in.
func (m *Manager) deletePort(a journal.Attachment) {
	if a.State == journal.Releasing && m.options.Hooks != nil {
		m.options.Hooks.Add(a.Function)
	}
}

// disown ends the reservation of a quarantined Function, which stays quarantined. The caller must
// hold the Function's lock.
func (m *Manager) disown(a journal.Attachment) error {
	a.State = journal.Releasing
	if err := m.put(a); err != nil {
		return err
	}
	if err := m.options.Expose(a); err != nil {
		return err
	}

	m.deletePort(a)
	return nil
}

// checkDriver compares the current driver with the driver that the Function must have. A device
// that is gone has no driver to compare. A driver that cannot be read is unknown, and the
// comparison is retried.
func (m *Manager) checkDriver(a journal.Attachment) error {
	want, known := a.OwnDriver()
	setUp := a.Setup != nil && a.Setup.Driver != ""
	// the owner's driver stays until the release
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

	// An immediate retry does not bind the driver. The release continues when the device changes.
	return &undoError{errors.New(otherDriver(driver, want)), journal.WrongDriver, true}
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

// retryDue reports whether a quarantined Function is to be retried.
func (m *Manager) retryDue(_ context.Context, _ trigger, d *decision) (bool, error) {
	t, tried := m.failures.get(d.id)
	if !tried {
		return true, nil
	}
	since := time.Since(t.last)
	return since >= t.pause || since >= changePause && m.view(d.record) != t.device, nil
}

// Quarantined describes a Function that no owner may get, because it could not be restored. It
// returns "" for all others.
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

// errNotQuarantined is returned for a Function that an administrator need not release.
var errNotQuarantined = errors.New("is not quarantined")

// Release retries a quarantined Function at once, for an administrator. With asItIs, the quarantine
// ends without another attempt, because the administrator accepts the Function as it is for its
// next owner. outcome describes the result.
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
			return m.recordRestored(m.log, a, outcome)
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
