// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
)

// object is a LogicalBridge, BridgePort, Vrf or Svi that a client asked for. S is its spec in the
// API.
type object[S proto.Message] struct {
	spec     S // never changed in place
	deleting bool
	failure  error // why it is not applied, or not removed; nil if it is
}

// errPending is the failure of an object that the agent has not tried to apply yet.
var errPending = errors.New("the agent is at work on it")

type (
	network = object[*evpn.LogicalBridgeSpec]
	port    = object[*evpn.BridgePortSpec]
	vrf     = object[*evpn.VrfSpec]
	svi     = object[*evpn.SviSpec]
)

// downBecause returns the failure of an object that needs another one, which is nil if it is
// missing.
func downBecause[S proto.Message](id string, other *object[S]) error {
	if other == nil {
		return fmt.Errorf("%s is missing", id)
	}
	return fmt.Errorf("%s is down: %w", id, other.failure)
}

// message is a LogicalBridge, BridgePort, Vrf or Svi in the API. S is its spec.
type message[S proto.Message] interface {
	proto.Message
	GetName() string
	GetSpec() S
}

// schema describes one kind of objects in the API. Its answers depend on the arguments only.
type schema[S proto.Message, M message[S]] interface {
	// keys returns the keys by which the agent looks for an object.
	keys(spec S) []string
	// validate returns what is wrong with a spec, whatever other objects there are.
	validate(spec S) error
	// describe returns the text of a spec for error messages.
	describe(spec S) string
	// canSee reports whether a client may know of an object. A zero spec stands for any spec.
	canSee(client access.Client, id string, spec S) bool
	// canSeeAll reports whether a client may know of each object, whatever id it has.
	canSeeAll(client access.Client) bool
	// limit returns how many objects a client may have.
	limit(client access.Client) int
	// message returns the message of an object. It has no status if oper is zero.
	message(name string, spec S, oper state, components ...*evpn.Component) M
	// operStatus returns the status of a message, or zero if it has none.
	operStatus(M) state
}

// controller brings the data plane to objects of one kind. It knows the other objects of the agent.
type controller[S proto.Message] interface {
	// check returns the spec in the form that is stored, or a gRPC status if it is wrong.
	check(client access.Client, id string, spec S) (S, error)
	// checkUnused returns a gRPC status if other objects need this one.
	checkUnused(client access.Client, id string) error
	// apply brings the data plane to a spec. changed says that the spec was another one before.
	apply(id string, spec S, changed bool) error
	// remove removes an object from the data plane.
	remove(id string) error
	// effectiveFailure returns why an object, or another object that it needs, is not in service.
	effectiveFailure(*object[S]) error
}

// options are the options of a collection's objects: see [optionStore].
type options interface {
	delete(tx *boltfile.Tx, id string) error
	forget(id string)
}

// collection has all objects of one kind. It serves the calls about them, keeps them in the state
// file and brings the data plane to them.
//
// The methods create, update and delete acquire the right to work: see [Agent.acquire]. Once the
// agent serves calls, the callers of all methods that change objects must have it. The methods get,
// list and count do not wait for work. Only work changes objects, and does so under the agent's
// lock, so work may read them without the lock.
type collection[S proto.Message, M message[S]] struct {
	names
	schema[S, M]
	controller[S]
	agent   *Agent
	options options
	objects map[string]*object[S]
	ids     []string                      // of objects, sorted
	byKey   multimap.Sets[string, string] // ids, by schema.keys
	failed  map[string]bool               // ids of the objects that are not applied, or not removed
}

func newCollection[S proto.Message, M message[S]](
	a *Agent, n names, s schema[S, M], c controller[S], o options,
) *collection[S, M] {
	return &collection[S, M]{
		names: n, schema: s, controller: c, agent: a, options: o,
		objects: map[string]*object[S]{}, failed: map[string]bool{},
	}
}

func (c *collection[S, M]) create(ctx context.Context, id string, spec S) (reply M, err error) {
	if err := c.checkID(id); err != nil {
		return reply, err
	}
	if err := c.authorizeID(access.FromContext(ctx), id); err != nil {
		return reply, err
	}

	release, err := c.agent.acquire(ctx)
	if err != nil {
		return reply, err
	}
	defer release()

	return c.add(ctx, id, spec)
}

// add makes an object. If the same object exists already, it returns that object.
func (c *collection[S, M]) add(ctx context.Context, id string, spec S) (reply M, err error) {
	client, have := access.FromContext(ctx), c.objects[id]
	err = c.authorizeChange(client, id, spec)
	if err == nil && have != nil {
		// The existing object may be in networks of another client.
		err = c.authorizeChange(client, id, have.spec)
	}

	if err == nil {
		spec, err = c.check(client, id, spec)
	}
	if err != nil {
		return reply, err
	}

	if have != nil {
		switch {
		case have.deleting:
			return reply, c.beingDeleted(id)
		case !proto.Equal(have.spec, spec):
			return reply, refusal.New(codes.AlreadyExists, refusal.OtherSpec,
				"%s %s exists %s", c.word, id, c.describe(have.spec))
		}
		return c.reply(client, id), nil
	}

	if err := c.checkLimit(client, id); err != nil {
		return reply, err
	}
	if err := c.store(id, spec, 0); err != nil {
		return reply, err
	}

	c.insert(id, &object[S]{spec: spec, failure: errPending})
	c.reconcile(id, false)

	return c.reply(client, id), nil
}

func (c *collection[S, M]) get(ctx context.Context, name string) (reply M, err error) {
	c.agent.mu.RLock()
	defer c.agent.mu.RUnlock()
	id, _, err := c.find(ctx, name)
	if err != nil {
		return reply, err
	}
	return c.reply(access.FromContext(ctx), id), nil
}

func (c *collection[S, M]) list(
	ctx context.Context, size int32, token string,
) (replies []M, next string, err error) {
	c.agent.mu.RLock()
	defer c.agent.mu.RUnlock()

	client := access.FromContext(ctx)
	ids, next, err := page(c.visible(client), size, token)
	bytes := 0
	for i, id := range ids {
		reply := c.reply(client, id)
		if bytes += proto.Size(reply); bytes > maxPageBytes && i > 0 {
			return replies, pageToken(ids[i-1]), nil
		}
		replies = append(replies, reply)
	}

	return replies, next, err
}

// visible returns the ids of the objects that a client may know of, sorted.
func (c *collection[S, M]) visible(client access.Client) []string {
	if c.canSeeAll(client) {
		return c.ids
	}

	var ids []string
	for _, id := range c.ids {
		if c.canSee(client, id, c.objects[id].spec) {
			ids = append(ids, id)
		}
	}

	return ids
}

// update changes the fields of the spec that the mask names. If nothing changes, it tries again to
// apply the object.
func (c *collection[S, M]) update(
	ctx context.Context, to M, mask *fieldmaskpb.FieldMask, allowMissing bool,
) (reply M, err error) {
	release, err := c.agent.acquire(ctx)
	if err != nil {
		return reply, err
	}
	defer release()

	id, o, err := c.findForChange(ctx, to.GetName())
	if status.Code(err) == codes.NotFound && allowMissing {
		return c.add(ctx, id, to.GetSpec())
	}
	if err != nil {
		return reply, err
	}
	if o.deleting {
		return reply, c.beingDeleted(id)
	}

	client := access.FromContext(ctx)
	spec, err := masked(o.spec, to.GetSpec(), mask)
	if err == nil {
		err = c.authorizeChange(client, id, spec)
	}

	if err == nil {
		spec, err = c.check(client, id, spec)
	}
	if err != nil {
		return reply, err
	}

	changed := !proto.Equal(spec, o.spec)
	if changed {
		if err := c.store(id, spec, 0); err != nil {
			return reply, err
		}
		c.agent.mu.Lock()
		c.unindex(id, o.spec)
		c.index(id, spec)
		o.spec = spec
		c.agent.mu.Unlock()
	}

	c.reconcile(id, changed)
	return c.reply(client, id), nil
}

// delete writes to the state file that the object is being deleted before it changes the data
// plane.
func (c *collection[S, M]) delete(
	ctx context.Context, name string, allowMissing bool,
) (*emptypb.Empty, error) {
	release, err := c.agent.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()

	id, o, err := c.findForChange(ctx, name)
	if status.Code(err) == codes.NotFound && allowMissing {
		return &emptypb.Empty{}, nil
	}
	if err != nil {
		return nil, err
	}

	client := access.FromContext(ctx)
	if err := c.checkUnused(client, id); err != nil {
		return nil, err
	}

	if !o.deleting {
		if err := c.store(id, o.spec, stateDeleting); err != nil {
			return nil, err
		}
		c.agent.mu.Lock()
		o.deleting = true
		c.agent.mu.Unlock()
	}

	c.reconcile(id, false)
	if o.failure != nil {
		return nil, refusal.New(codes.Internal, refusal.NotDeletedYet,
			"%s %s is not deleted yet, the agent keeps trying: %s",
			c.word, id, c.agent.errorText(client, o.failure))
	}

	return &emptypb.Empty{}, nil
}

// find returns the object with a resource name, if the client may see it. The status is NotFound
// only if the client may see an object with this id, and then the id is valid.
func (c *collection[S, M]) find(ctx context.Context, name string) (string, *object[S], error) {
	client := access.FromContext(ctx)
	id, err := c.parseName(name)
	if err != nil {
		return "", nil, err
	}
	if err := c.authorizeID(client, id); err != nil {
		return id, nil, err
	}

	o := c.objects[id]
	if o == nil {
		return id, nil, refusal.New(codes.NotFound, refusal.Missing, "%s %s does not exist",
			c.word, id)
	}

	return id, o, c.authorize(client, id, o.spec)
}

// findForChange is find for a client that wants to change the object.
func (c *collection[S, M]) findForChange(
	ctx context.Context, name string,
) (string, *object[S], error) {
	id, o, err := c.find(ctx, name)
	if err == nil {
		err = c.authorizeChange(access.FromContext(ctx), id, o.spec)
	}
	return id, o, err
}

func (c *collection[S, M]) beingDeleted(id string) error {
	return refusal.New(codes.FailedPrecondition, refusal.BeingDeleted, "%s %s is being deleted",
		c.word, id)
}

// reply returns the message about an object for a client.
func (c *collection[S, M]) reply(client access.Client, id string) M {
	o := c.objects[id]
	failure := c.effectiveFailure(o)
	component := &evpn.Component{Name: c.component, Status: evpn.CompStatus_COMP_STATUS_SUCCESS}
	if failure != nil {
		component.Status = evpn.CompStatus_COMP_STATUS_ERROR
		component.Details = c.agent.errorText(client, failure)
	}
	return c.message(c.prefix+id, o.spec, stateOf(o.deleting, failure), component)
}

// count returns how many objects are in each state.
func (c *collection[S, M]) count() map[state]int {
	n := map[state]int{}
	for _, o := range c.objects {
		n[stateOf(o.deleting, c.effectiveFailure(o))]++
	}
	return n
}

// index makes an object found by the keys of its spec.
func (c *collection[S, M]) index(id string, spec S) {
	for _, key := range c.keys(spec) {
		c.byKey.Add(key, id)
	}
}

// unindex reverses index.
func (c *collection[S, M]) unindex(id string, spec S) {
	for _, key := range c.keys(spec) {
		c.byKey.Remove(key, id)
	}
}

// withKey returns the ids of the objects that have a key, sorted.
func (c *collection[S, M]) withKey(key string) []string {
	return slices.Sorted(c.byKey.All(key))
}

// otherWithKey returns the id of some object that has a key and is not except, or "" if there is no
// such object.
func (c *collection[S, M]) otherWithKey(key, except string) string {
	for id := range c.byKey.All(key) {
		if id != except {
			return id
		}
	}
	return ""
}

// insert adds an object to the collection.
func (c *collection[S, M]) insert(id string, o *object[S]) {
	c.agent.mu.Lock()
	defer c.agent.mu.Unlock()
	c.objects[id] = o
	at, _ := slices.BinarySearch(c.ids, id)
	c.ids = slices.Insert(c.ids, at, id)
	c.index(id, o.spec)
}

// drop takes an object out of the collection.
func (c *collection[S, M]) drop(id string) {
	c.agent.mu.Lock()
	defer c.agent.mu.Unlock()

	c.unindex(id, c.objects[id].spec)
	if at, found := slices.BinarySearch(c.ids, id); found {
		c.ids = slices.Delete(c.ids, at, at+1)
	}

	delete(c.objects, id)
	delete(c.failed, id)
	c.options.forget(id)
}

// reconcileEach reconciles objects in the given order.
func (c *collection[S, M]) reconcileEach(ids []string) {
	for _, id := range ids {
		c.reconcile(id, false)
	}
}

// reconcileFailed reconciles the objects that failed.
func (c *collection[S, M]) reconcileFailed() { c.reconcileEach(slices.Sorted(maps.Keys(c.failed))) }

// reconcile brings the data plane to an object, if the object exists, and records the failure. A
// new failure is logged, and Run tries again soon. changed says that the object's spec was another
// one before.
func (c *collection[S, M]) reconcile(id string, changed bool) {
	o := c.objects[id]
	if o == nil {
		return
	}

	before, after := o.failure, error(nil)
	if o.deleting {
		after = c.finalize(id)
	} else {
		after = c.apply(id, o.spec, changed)
	}

	c.agent.mu.Lock()
	o.failure = after
	if c.objects[id] == o && after != nil {
		c.failed[id] = true
	} else {
		delete(c.failed, id)
	}

	c.agent.mu.Unlock()
	switch {
	case after != nil && (before == nil || before.Error() != after.Error()):
		c.agent.log.Info(c.noun+" is down", "id", id, "reason", after.Error())
		c.agent.retrySoon()
	case after == nil && before != nil && before != errPending:
		c.agent.log.Info(c.noun+" is as wanted again", "id", id)
	}
}

// finalize removes an object that is being deleted from the data plane, and then from the state
// file.
func (c *collection[S, M]) finalize(id string) error {
	if err := c.remove(id); err != nil {
		return err
	}

	err := c.agent.state.Update(func(tx *boltfile.Tx) error {
		return errors.Join(tx.Delete(c.bucket, []byte(id)), c.options.delete(tx, id))
	})
	if err != nil {
		return fmt.Errorf("state: %s %s: %w", c.bucket, id, err)
	}

	c.drop(id)
	// Another network may want the VLAN id of this one, or another port its representor.
	c.agent.retrySoon()

	return nil
}

// store writes an object to the state file. The error is a gRPC status.
func (c *collection[S, M]) store(id string, spec S, oper state) error {
	data, err := proto.Marshal(c.message("", spec, oper))
	if err == nil {
		err = c.agent.state.Update(func(tx *boltfile.Tx) error {
			// The file may come from a version of the agent without this kind of objects.
			if err := tx.CreateBucket(c.bucket); err != nil {
				return err
			}
			return tx.Put(c.bucket, []byte(id), data)
		})
	}

	if err != nil {
		return refusal.New(codes.Internal, refusal.StateFileFails, "state: %s %s: %v",
			c.bucket, id, err)
	}

	return nil
}

// load reads the objects from the state file.
func (c *collection[S, M]) load(tx *boltfile.Tx) error {
	return tx.ForEach(c.bucket, func(id, data []byte) error {
		m := c.message("", *new(S), 0)
		if err := proto.Unmarshal(data, m); err != nil {
			return fmt.Errorf("%w (%s %q: %w)", boltfile.ErrCorrupt, c.bucket, id, err)
		}
		if err := cmp.Or(c.checkID(string(id)), c.validate(m.GetSpec())); err != nil {
			return fmt.Errorf("%w (%s %q: %s)", boltfile.ErrCorrupt, c.bucket, id,
				status.Convert(err).Message())
		}

		c.insert(string(id),
			&object[S]{spec: m.GetSpec(), deleting: c.operStatus(m) == stateDeleting,
				failure: errPending})

		return nil
	})
}
