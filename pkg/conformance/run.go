// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Runner runs cases against one agent, one after the other.
type Runner struct {
	Kinds Kinds

	cfg       Config
	conn      *grpc.ClientConn
	calls     map[*Kind]calls
	unserved  map[*Kind]bool
	macPrefix []byte
	// Progress is called with each result, if it is not nil.
	Progress func(Result)

	mu         sync.Mutex      // guards what follows, because cases may make calls at once
	made       []*made         // by the case that runs
	left       []*made         // by cases before, which could not be deleted
	interfaces map[string]Port // that MakePort made, by the port's id
	prefixes   byte
	macs       uint16
	serial     int
	vlans      numbers
	vnis       numbers
	// given is what an agent puts before the ids of a kind in names.
	given map[*Kind]string

	untold   map[*Kind][]string // fields that Get leaves out of every object
	timeouts int                // how often something did not come in time
	lost     bool               // whether the agent did not answer the last call
}

// made is an object that may exist at the agent because of the run.
type made struct {
	kind     *Kind
	id, name string // name is empty until the agent said it
	lost     bool   // the agent did not answer Create, so that it may have made the object
}

// NewRunner returns a runner. The caller must call Close.
func NewRunner(cfg Config, kinds Kinds) (*Runner, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	conn, err := cfg.Endpoint.Dial(cfg.Endpoint.TLS)
	if err != nil {
		return nil, err
	}

	r := &Runner{
		Kinds: kinds, cfg: cfg, conn: conn, calls: map[*Kind]calls{}, unserved: map[*Kind]bool{},
		interfaces: map[string]Port{}, given: map[*Kind]string{},
		untold: map[*Kind][]string{},
		vlans:  numbers{in: cfg.VLANs, foreign: map[uint32]bool{}},
		vnis:   numbers{in: cfg.VNIs, foreign: map[uint32]bool{}},
	}

	// The first byte says locally administered and unicast (IEEE 802), the second is not 0.
	r.macPrefix = append([]byte{2}, random(3)...)
	r.macPrefix[1] |= 1
	for _, k := range kinds.All() {
		r.calls[k] = k.dial(conn)
	}

	return r, nil
}

// Close ends the connection to the agent.
func (r *Runner) Close() error { return r.conn.Close() }

// cleanUpLimit is how long the run takes at most to delete what it made.
const cleanUpLimit = time.Minute

// Run runs the cases and deletes what they made, also when ctx ends before. The error says why
// nothing could be run.
func (r *Runner) Run(ctx context.Context, cases []Case) (*Report, error) {
	limited, cancel := context.WithTimeout(ctx, r.cfg.Limit)
	defer cancel()
	begin := time.Now()
	if err := r.look(limited); err != nil {
		return nil, err
	}

	report := r.newReport(begin)
	for _, c := range cases {
		result := Result{Case: c, Outcome: NotRun, Text: "the run ended before"}
		if limited.Err() == nil {
			result = r.run(limited, c)
		}
		report.add(result)
		if r.Progress != nil {
			r.Progress(result)
		}
	}

	left := r.finish(context.WithoutCancel(ctx))
	report.finish(time.Since(begin), left)
	return report, nil
}

// caseLimit is how long a case may take. Few calls are slow, and no case waits often.
const caseLimit = 5 * time.Minute

// run runs one case.
func (r *Runner) run(ctx context.Context, c Case) (result Result) {
	begin := time.Now()
	result = Result{Case: c}
	if c.Kind != nil && r.unserved[c.Kind] {
		result.Outcome = Skipped
		result.Text = fmt.Sprintf("not served: %sService", c.Kind.Type)
		return r.judged(result)
	}

	limited, cancel := context.WithTimeout(ctx, caseLimit)
	defer cancel()
	t := &T{Runner: r, ctx: limited, c: c, outcome: Passed}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer func() {
			if p := recover(); p != nil {
				t.outcome, t.text = Blocked, fmt.Sprintf("defect in the kit: %v", p)
			}
		}()
		c.Run(t)
	}()
	<-ended
	for _, wire := range t.wires {
		_ = wire.Close()
	}

	if r.lost {
		r.awaitAgent(ctx)
	}
	r.clean(context.WithoutCancel(ctx))
	result.Outcome, result.Text, result.Took = t.outcome, t.text, time.Since(begin)
	return r.judged(result)
}

// judged returns the result of a case in the light of what the vendor claims.
func (r *Runner) judged(result Result) Result {
	claims := slices.Contains(r.cfg.Declared, result.Case.Profile)
	if result.Outcome == Skipped && claims && !result.Case.Profile.crosses() &&
		strings.HasPrefix(result.Text, "not served: ") && !result.Case.optional() {
		result.Outcome = Failed
		result.Text = "the profile is declared, but " + result.Text
	}
	return result
}

// optional reports whether an agent may claim the profile of a case without serving what the case
// needs. Of ports without an id, the API says that the agent makes one. But the id is how agents
// know the function of a port.
func (c Case) optional() bool { return path.Base(c.Name) == CreateWithoutID }

// CreateWithoutID is the name of the cases about a Create without an id.
const CreateWithoutID = "create-without-id-makes-one"

// look reads what the agent has, so that the run uses nothing of it.
func (r *Runner) look(ctx context.Context) error {
	if err := r.answersSoon(ctx); err != nil {
		return fmt.Errorf("the agent at %s does not answer in %s: %s", r.cfg.Endpoint, r.cfg.Settle,
			describe(err))
	}

	for _, k := range r.Kinds.All() {
		if err := r.lookAt(ctx, k); err != nil {
			return err
		}
	}

	for _, port := range r.cfg.Ports {
		if r.unserved[r.Kinds.BridgePort] {
			break
		}
		for _, name := range r.names(r.Kinds.BridgePort, port.ID) {
			got, err := r.read(ctx, r.Kinds.BridgePort, name)
			// An agent that answers without a name knows nothing of the port.
			if err == nil && got.GetName() != "" {
				return fmt.Errorf("bridge port %s exists at the agent already: delete it, or give "+
					"others with --ports", name)
			}
		}
	}

	return nil
}

// lookAt finds out whether a kind is served and what segments its objects have.
func (r *Runner) lookAt(ctx context.Context, k *Kind) error {
	calls, token := r.calls[k], ""
	served := false
	for range maxPages {
		limited, cancel := context.WithTimeout(ctx, r.cfg.CallTimeout)
		page, next, err := calls.list(limited, 0, token)
		cancel()
		if isLost(err) {
			return fmt.Errorf("the agent at %s does not answer: %s", r.cfg.Endpoint, describe(err))
		}
		served = served || status.Code(err) != codes.Unimplemented
		for _, m := range page {
			r.avoid(k, m)
		}
		if token = next; err != nil || token == "" {
			break
		}
	}

	if served {
		return nil
	}
	// An agent without List may have the rest. Deletion of what is missing changes nothing.
	_, errGet := r.read(ctx, k, k.Collection+r.cfg.Prefix+"none")
	limited, cancel := context.WithTimeout(ctx, r.cfg.CallTimeout)
	defer cancel()
	errDelete := calls.remove(limited, k.Collection+r.cfg.Prefix+"none", true)
	r.unserved[k] = status.Code(errGet) == codes.Unimplemented &&
		status.Code(errDelete) == codes.Unimplemented

	return nil
}

// avoid notes what an object has that the run must not use.
func (r *Runner) avoid(k *Kind, m Message) {
	if id := path.Base(m.GetName()); id != m.GetName() {
		r.given[k] = strings.TrimSuffix(m.GetName(), id)
	}
	switch spec := SpecOf(m).(type) {
	case *evpn.LogicalBridgeSpec:
		r.vlans.foreign[spec.GetVlanId()] = true
		if spec.Vni != nil {
			r.vnis.foreign[spec.GetVni()] = true
		}
	case *evpn.VrfSpec:
		if spec.Vni != nil {
			r.vnis.foreign[spec.GetVni()] = true
		}
	}
}

func (r *Runner) read(ctx context.Context, k *Kind, name string) (Message, error) {
	limited, cancel := context.WithTimeout(ctx, r.cfg.CallTimeout)
	defer cancel()
	return r.calls[k].get(limited, name)
}

// serves reports whether the agent serves some call of a kind.
func (r *Runner) serves(k *Kind) bool { return !r.unserved[k] }

// patience is how long the run waits for an object to be up or gone. After three waits in vain it
// waits less, because an agent that does not do it would make the run take hours.
func (r *Runner) patience() time.Duration {
	if r.timeouts >= 3 {
		return min(r.cfg.Settle, max(r.cfg.Settle/10, 200*time.Millisecond))
	}
	return r.cfg.Settle
}

// record notes that an object may exist from now on.
func (r *Runner) record(k *Kind, id string) *made {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := &made{kind: k, id: id}
	r.made = append(r.made, m)
	return m
}

// learn notes what an agent puts before ids. The caller must hold the lock.
func (r *Runner) learn(k *Kind, id, name string) {
	if prefix, ok := strings.CutSuffix(name, id); ok && id != "" {
		r.given[k] = prefix
	}
}

// names returns the names that an object with this id may have.
func (r *Runner) names(k *Kind, id string) []string {
	names := []string{k.Collection + id}
	if prefix, ok := r.given[k]; ok && prefix != k.Collection {
		names = append([]string{prefix + id}, names...)
	}
	return names
}

// awaitAgent waits until an agent that was lost answers again. If it does not and can be restarted,
// it is.
func (r *Runner) awaitAgent(ctx context.Context) {
	if r.answersSoon(ctx) != nil && r.cfg.Hooks.Restart != nil {
		_ = r.cfg.Hooks.Restart(ctx, Killed)
		_ = r.answersSoon(ctx)
	}
	r.lost = false
}

// answersSoon waits until the agent answers. The error is its last one.
func (r *Runner) answersSoon(ctx context.Context) (last error) {
	limited, cancel := context.WithTimeout(ctx, r.cfg.Settle)
	defer cancel()
	name := r.Kinds.BridgePort.Collection + r.cfg.Prefix + "none"
	for limited.Err() == nil {
		_, err := r.calls[r.Kinds.BridgePort].get(limited, name)
		if !isLost(err) {
			return nil
		}
		if limited.Err() == nil || last == nil {
			last = err
		}

		timer := time.NewTimer(Interval)
		select {
		case <-timer.C:
		case <-limited.Done():
			timer.Stop()
		}
	}
	return last
}

// isLost reports whether an error of a call means that the agent did not answer.
func isLost(err error) bool {
	c := status.Code(err)
	return c == codes.Unavailable || c == codes.DeadlineExceeded || c == codes.Canceled
}

// clean deletes what the run made, the last first and what needs others before them. What cannot be
// deleted is tried again at the end of the run.
func (r *Runner) clean(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, cleanUpLimit)
	defer cancel()
	var left []*made
	// An object may need one of an earlier kind that was made later.
	for _, k := range slices.Backward(r.Kinds.All()) {
		for _, m := range slices.Backward(r.made) {
			if m.kind != k {
				continue
			}
			if err := r.remove(limited, m); err != nil {
				left = append(left, m)
			}
		}
	}

	r.made, r.left = nil, append(r.left, left...)
}

// remove deletes an object that the run made and waits until it is gone.
func (r *Runner) remove(ctx context.Context, m *made) error {
	names := []string{m.name}
	switch {
	case m.name != "":
	case m.id != "":
		r.findPrefix(ctx, m)
		names = r.names(m.kind, m.id)
	case m.lost:
		return errors.New("nobody knows its name")
	default:
		return nil // it has no name because Create failed
	}

	var errs []error
	for _, name := range names {
		errs = append(errs, r.removeName(ctx, m.kind, name, m.name == ""))
	}
	// One of the names that are guessed is enough.
	if slices.Contains(errs, nil) {
		return nil
	}
	return errors.Join(errs...)
}

// findPrefix finds out what the agent puts before ids, if it never said so and may have made an
// object. Names are guesses without it.
func (r *Runner) findPrefix(ctx context.Context, m *made) {
	if _, known := r.given[m.kind]; known || !m.lost {
		return
	}

	token := ""
	for range maxPages {
		limited, cancel := context.WithTimeout(ctx, r.cfg.CallTimeout)
		page, next, err := r.calls[m.kind].list(limited, 0, token)
		cancel()
		r.mu.Lock()
		for _, object := range page {
			r.learn(m.kind, m.id, object.GetName())
		}
		r.mu.Unlock()
		if token = next; err != nil || token == "" {
			return
		}
	}
}

// removeName deletes an object by its name. The name is a guess if Create gave none; then an error
// of Get means that there is no such object.
func (r *Runner) removeName(ctx context.Context, k *Kind, name string, guess bool) error {
	limited, cancel := context.WithTimeout(ctx, r.cfg.CallTimeout)
	defer cancel()
	err := r.calls[k].remove(limited, name, true)
	if c := status.Code(err); c == codes.Unimplemented || c == codes.NotFound {
		return nil
	}

	deadline := time.Now().Add(r.patience())
	for {
		got, errGet := r.read(ctx, k, name)
		switch c := status.Code(errGet); {
		case c == codes.NotFound, c == codes.Unimplemented && err == nil,
			errGet == nil && got.GetName() == "" && err == nil,
			guess && errGet != nil && !isLost(errGet):
			return nil
		case time.Now().After(deadline), ctx.Err() != nil:
			r.timeouts++
			return errors.Join(err, errGet, fmt.Errorf("%s is still there", name))
		}
		time.Sleep(Interval)
	}
}

// finish deletes what is left, and returns what could not be deleted.
func (r *Runner) finish(ctx context.Context) (left []string) {
	r.timeouts = 0
	r.made, r.left = r.left, nil
	r.clean(ctx)
	for _, m := range r.left {
		name := r.names(m.kind, m.id)[0]
		if m.id == "" && m.name == "" {
			name = "whose name is not known, because the agent did not answer its Create"
		}
		left = append(left, m.kind.Word+" "+name)
	}

	limited, cancel := context.WithTimeout(ctx, cleanUpLimit)
	defer cancel()
	for id, port := range r.interfaces {
		if r.cfg.Hooks.RemovePort == nil {
			break
		}
		if err := r.cfg.Hooks.RemovePort(limited, port); err != nil {
			left = append(left, fmt.Sprintf("interface of %s: %v", id, err))
		}
	}

	return left
}

// Restart restarts the agent and waits until it answers. It ends the case if that fails.
func (t *T) Restart(how Ending) {
	if t.cfg.Hooks.Restart == nil {
		t.Skipf("needs --restart-agent")
	}
	if err := t.cfg.Hooks.Restart(t.ctx, how); err != nil {
		t.Blockf("--restart-agent: %v", err)
	}
	if err := t.answersSoon(t.ctx); err != nil {
		t.lost = true
		t.Failf("the agent does not answer within %s of its restart: %s", t.cfg.Settle,
			describe(err))
	}
}

// RemoveInterface removes the interface of a port. It ends the case if that fails.
func (t *T) RemoveInterface(port Port) {
	if t.cfg.Hooks.RemovePort == nil {
		t.Skipf("needs --remove-port")
	}
	if err := t.cfg.Hooks.RemovePort(t.ctx, port); err != nil {
		t.Blockf("--remove-port for %s: %v", port.ID, err)
	}
}

// MakeInterface makes the interface of a port. It ends the case if that fails.
func (t *T) MakeInterface(port Port) {
	if t.cfg.Hooks.MakePort == nil {
		t.Skipf("needs --make-port")
	}
	t.mu.Lock()
	t.interfaces[port.ID] = port
	t.mu.Unlock()
	if err := t.cfg.Hooks.MakePort(t.ctx, port); err != nil {
		t.Blockf("--make-port for %s: %v", port.ID, err)
	}
}

// Config returns the configuration of the run.
func (t *T) Config() Config { return t.cfg }

// Expect notes that an object with this id may exist from now on, because of a call that is not a
// Create.
func (t *T) Expect(k *Kind, id string) { t.record(k, id) }
