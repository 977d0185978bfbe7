// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
)

// T is a case that runs. Its methods may end the case; only the goroutine of the case may call
// those, and [T.Go] is for calls at once.
type T struct {
	*Runner
	ctx context.Context
	c   Case
	// slots is how many ports the case has taken.
	slots     int
	preparing bool
	wires     []Wire // to be closed when the case ends

	outcome Outcome
	text    string
}

// Object is an object of the agent.
type Object struct {
	Kind *Kind
	ID   string
	Name string        // as Create returned it
	Spec proto.Message // as it was sent
	Got  Message       // the answer of Create
}

// Context ends with the case.
func (t *T) Context() context.Context { return t.ctx }

// Failf ends the case because the agent did not do what the sentence says. In [T.Prepare] it means
// that the agent did not come to the sentence.
func (t *T) Failf(format string, args ...any) {
	outcome := Failed
	switch {
	case t.preparing:
		outcome = Blocked
	case t.c.level() == Should:
		outcome = Deviates
	}
	t.end(outcome, fmt.Sprintf(format, args...))
}

// Skipf ends the case because something is missing that it needs.
func (t *T) Skipf(format string, args ...any) { t.end(Skipped, fmt.Sprintf(format, args...)) }

// Blockf ends the case because the agent failed before it came to the sentence.
func (t *T) Blockf(format string, args ...any) { t.end(Blocked, fmt.Sprintf(format, args...)) }

func (t *T) end(outcome Outcome, text string) {
	t.outcome, t.text = outcome, text
	runtime.Goexit()
}

// Prepare does what must succeed before the case comes to its sentence.
func (t *T) Prepare(do func()) {
	before := t.preparing
	t.preparing = true
	do()
	t.preparing = before
}

// maxText limits what an agent's error adds to a report, in bytes.
const maxText = 500

// describe returns an error for people.
func describe(err error) string {
	s := status.Convert(err)
	text := s.Message()
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "…"
	}
	return fmt.Sprintf("%s (%s)", s.Code(), text)
}

// WantOK ends the case unless a call succeeded.
func (t *T) WantOK(what string, err error) {
	if err != nil {
		t.Failf("%s: %s, want OK", what, describe(err))
	}
}

// WantCode ends the case unless a call failed with one of the codes.
func (t *T) WantCode(what string, err error, want ...codes.Code) {
	if !slices.Contains(want, status.Code(err)) {
		t.Failf("%s: %s, want %s", what, describe(err), either(want))
	}
}

// WantRefused ends the case unless the agent refused a call, with whatever code.
func (t *T) WantRefused(what string, err error) {
	if err == nil {
		t.Failf("%s: OK, want an error", what)
	}
}

func either(all []codes.Code) string {
	words := make([]string, len(all))
	for i, c := range all {
		words[i] = c.String()
	}
	return strings.Join(words, " or ")
}

// answered ends the case if the agent did not answer a call, or does not serve it.
func (t *T) answered(call string, err error) error {
	switch status.Code(err) {
	case codes.Unimplemented:
		t.Skipf("not served: %s: %s", call, describe(err))
	case codes.Unavailable:
		t.lost = true
		t.Failf("%s: the agent went away: %s", call, describe(err))
	case codes.DeadlineExceeded, codes.Canceled:
		if t.ctx.Err() != nil {
			t.Blockf("the run ended during %s", call)
		}
		t.Failf("%s: no answer in %s", call, t.cfg.CallTimeout)
	}
	return err
}

// Call makes one call of the API with a deadline, and ends the case if the agent did not answer, or
// does not serve it.
func (t *T) Call(name string, call func(ctx context.Context) error) error {
	return t.answered(name, t.try(call))
}

// try makes one call with a deadline.
func (t *T) try(call func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(t.ctx, t.cfg.CallTimeout)
	defer cancel()
	return call(ctx)
}

// Conn is the connection to the agent.
func (t *T) Conn() grpc.ClientConnInterface { return t.conn }

// Create makes an object, which the run deletes when the case ends.
func (t *T) Create(k *Kind, id string, spec proto.Message) (Message, error) {
	return t.CreateMessage(k, id, k.NewMessage("", spec))
}

// CreateMessage is Create with a whole message, which may be nil.
func (t *T) CreateMessage(k *Kind, id string, m Message) (got Message, err error) {
	got, err = t.CreateRaw(k, id, m)
	return got, t.answered("Create"+k.Type, err)
}

// CreateRaw is CreateMessage without an end of the case. Several goroutines may call it at once.
func (t *T) CreateRaw(k *Kind, id string, m Message) (got Message, err error) {
	record := t.record(k, id)
	err = t.try(func(ctx context.Context) (err error) {
		got, err = t.calls[k].create(ctx, id, m)
		return err
	})

	t.mu.Lock()
	defer t.mu.Unlock()
	record.lost = isLost(err)
	if err == nil {
		record.name = got.GetName()
		t.learn(k, id, got.GetName())
	}

	return got, err
}

// Get reads an object.
func (t *T) Get(k *Kind, name string) (m Message, err error) {
	err = t.Call("Get"+k.Type, func(ctx context.Context) (err error) {
		m, err = t.calls[k].get(ctx, name)
		return err
	})
	return m, err
}

// GetRaw is Get without an end of the case. Several goroutines may call it at once.
func (t *T) GetRaw(k *Kind, name string) (m Message, err error) {
	err = t.try(func(ctx context.Context) (err error) {
		m, err = t.calls[k].get(ctx, name)
		return err
	})
	return m, err
}

// Page reads one page of a list.
func (t *T) Page(k *Kind, size int32, token string) (page []Message, next string, err error) {
	err = t.Call("List"+k.Type+"s", func(ctx context.Context) (err error) {
		page, next, err = t.calls[k].list(ctx, size, token)
		return err
	})
	return page, next, err
}

// maxPages limits how many pages of a list are read.
const maxPages = 10000

// List reads all pages of a list. A size of 0 leaves the size of pages to the agent.
func (t *T) List(k *Kind, size int32) (all []Message) {
	token := ""
	for range maxPages {
		page, next, err := t.Page(k, size, token)
		t.WantOK("list", err)
		all = append(all, page...)
		if token = next; token == "" {
			return all
		}
	}
	t.Failf("the list has no end after %d pages", maxPages)
	return nil
}

// Listed returns the object of that name in the list, or nil if it is not there.
func (t *T) Listed(k *Kind, name string) Message {
	for _, m := range t.List(k, 0) {
		if m.GetName() == name {
			return m
		}
	}
	return nil
}

// Update changes an object. A nil mask is left out.
func (t *T) Update(
	k *Kind, m Message, mask []string, allowMissing bool,
) (got Message, err error) {
	var paths *fieldmaskpb.FieldMask
	if mask != nil {
		paths = &fieldmaskpb.FieldMask{Paths: mask}
	}
	err = t.Call("Update"+k.Type, func(ctx context.Context) (err error) {
		got, err = t.calls[k].update(ctx, m, paths, allowMissing)
		return err
	})

	return got, err
}

// Delete deletes an object.
func (t *T) Delete(k *Kind, name string, allowMissing bool) error {
	return t.Call("Delete"+k.Type, func(ctx context.Context) error {
		return t.calls[k].remove(ctx, name, allowMissing)
	})
}

// Interval is how often a state is looked at that should come soon.
const Interval = 20 * time.Millisecond

// await looks until a condition holds. It returns false if that is not in time.
func (t *T) await(condition func() bool) bool {
	deadline := time.Now().Add(t.patience())
	for !condition() {
		if time.Now().After(deadline) {
			t.timeouts++
			return false
		}
		t.Sleep(Interval)
	}
	return true
}

// Sleep waits, but not beyond the end of the case.
func (t *T) Sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.ctx.Done():
		t.Blockf("the run ended before the case did")
	}
}

// WantUp ends the case unless an object comes up.
func (t *T) WantUp(k *Kind, name string) (got Message) {
	var err error
	up := t.await(func() bool {
		got, err = t.Get(k, name)
		return err == nil && StateOf(got) == Up
	})

	switch {
	case up:
	case err != nil:
		t.Failf("%s %s does not come up: Get: %s", k.Word, name, describe(err))
	default:
		t.Failf("%s %s does not come up in %s: %s", k.Word, name, t.cfg.Settle, Status(got))
	}

	return got
}

// WantNotUp ends the case if an object is up, or is not down in time.
func (t *T) WantNotUp(k *Kind, name string) {
	down := t.await(func() bool {
		got, err := t.Get(k, name)
		return err != nil || StateOf(got) != Up
	})
	if !down {
		t.Failf("%s %s is UP", k.Word, name)
	}
}

// Status describes the status of an object for people.
func Status(m Message) string {
	text := "oper_status " + Word(StateOf(m))
	for _, c := range ComponentsOf(m) {
		text += fmt.Sprintf(", component %s %s %s", c.GetName(),
			strings.TrimPrefix(c.GetStatus().String(), "COMP_STATUS_"), c.GetDetails())
	}
	return text
}

// WantGone ends the case unless Get says that an object does not exist.
func (t *T) WantGone(k *Kind, name string) {
	var got Message
	var err error
	gone := t.await(func() bool {
		got, err = t.Get(k, name)
		return status.Code(err) == codes.NotFound
	})

	switch {
	case gone:
	case err != nil:
		t.Failf("Get of the deleted %s: %s, want NotFound", k.Word, describe(err))
	default:
		t.Failf("the deleted %s is still there after %s: %s", k.Word, t.cfg.Settle, Status(got))
	}
}

// WantSpec ends the case unless an object has the fields of a spec.
func (t *T) WantSpec(what string, got Message, want proto.Message) {
	if diff := Lacks(SpecOf(got), want); diff != "" {
		t.Failf("%s: %s", what, diff)
	}
}

// WantAsMade ends the case unless Get has the spec with which an object was made or changed. Where
// Get leaves fields out of any object of the kind, the case is blocked by that.
func (t *T) WantAsMade(o Object) {
	got, err := t.Get(o.Kind, o.Name)
	t.WantOK("Get", err)
	diff := Lacks(SpecOf(got), o.Spec)
	if diff == "" {
		return
	}
	if untold := t.untoldFields(o.Kind); Lacks(SpecOf(got), Without(o.Spec, untold)) == "" {
		t.Blockf("Get does not say %s of any %s", strings.Join(untold, ", "), o.Kind.Word)
	}
	t.Failf("Get: %s", diff)
}

// untoldFields returns the fields that Get leaves out of a new object.
func (t *T) untoldFields(k *Kind) []string {
	if fields, known := t.untold[k]; known {
		return fields
	}

	o := t.Have(k)
	got, err := t.Get(k, o.Name)
	t.Prepare(func() { t.WantOK("Get", err) })
	t.untold[k] = absent(SpecOf(got), o.Spec)
	return t.untold[k]
}

// Have makes an object of the kind. It ends the case as blocked if the agent fails.
func (t *T) Have(k *Kind) Object {
	id, spec := t.Sample(k)
	return t.HaveAs(k, id, spec)
}

// HaveAs makes an object with a spec. It ends the case as blocked if the agent fails.
func (t *T) HaveAs(k *Kind, id string, spec proto.Message) (o Object) {
	t.Prepare(func() {
		got, err := t.Create(k, id, spec)
		t.WantOK("Create"+k.Type, err)
		o = Object{Kind: k, ID: id, Name: got.GetName(), Spec: spec, Got: got}
		if o.Name == "" {
			t.Failf("Create%s: the answer has no name", k.Type)
		}
	})
	return o
}

// HaveUp is Have with an object that is up.
func (t *T) HaveUp(k *Kind) Object {
	if k == t.Kinds.BridgePort {
		t.NeedInterfaces()
	}
	o := t.Have(k)
	t.Prepare(func() { t.WantUp(k, o.Name) })
	return o
}

// NeedInterfaces ends the case unless ports can come up.
func (t *T) NeedInterfaces() {
	if t.cfg.Hooks.MakePort == nil && len(t.cfg.Ports) == 0 {
		t.Skipf("needs --make-port or --ports: ports are not up without interfaces")
	}
}

// Go makes n calls at once and returns their errors.
func (t *T) Go(n int, call func(i int) error) []error {
	errs, done := make([]error, n), make(chan struct{})
	for i := range n {
		go func() {
			defer func() { done <- struct{}{} }()
			errs[i] = call(i)
		}()
	}
	for range n {
		<-done
	}
	return errs
}

// DeleteRaw is Delete without an end of the case. Several goroutines may call it at once.
func (t *T) DeleteRaw(k *Kind, name string, allowMissing bool) error {
	return t.try(func(ctx context.Context) error {
		return t.calls[k].remove(ctx, name, allowMissing)
	})
}

// Lost notes that the agent does not answer, so that the run waits for it after the case.
func (t *T) Lost() { t.lost = true }

// Exists reports whether Get finds an object with this id. It is false where Get is not served.
func (t *T) Exists(k *Kind, id string) bool {
	for _, name := range t.names(k, id) {
		if got, err := t.GetRaw(k, name); err == nil && HasID(got, id) {
			return true
		}
	}
	return false
}
