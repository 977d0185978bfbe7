// SPDX-License-Identifier: Apache-2.0

package bridge

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
)

// object is a LogicalBridge or a BridgePort that a client asked for. S is its spec in the API.
type object[S proto.Message] struct {
	spec     S // never changed in place
	deleting bool
	failure  error // why it is not realised, or not removed; nil if it is
}

// errNotYet is the failure of an object that nobody has tried to realise.
var errNotYet = errors.New("the agent is at work on it")

// options are what an [optionStore] has.
type options interface {
	delete(tx *boltfile.Tx, id string) error
	forget(id string)
}

type (
	network = object[*evpn.LogicalBridgeSpec]
	port    = object[*evpn.BridgePortSpec]
)

// collection is all networks or all ports: it serves the calls about them, keeps them in the state
// file and brings the data plane to them. Its create, update and delete are work of the agent (see
// [Agent.begin]), and so is what calls its other methods once the agent serves calls. Work alone
// changes objects, under the agent's lock: it reads them without. get, list and count take the lock
// and wait for no work. M is a LogicalBridge or a BridgePort of the API, and S its spec.
type collection[S proto.Message, M interface {
	proto.Message
	GetName() string
	GetSpec() S
}] struct {
	kind
	agent   *Agent
	objects map[string]*object[S]
	ids     []string        // of objects, sorted
	by      index           // ids by keys
	failed  map[string]bool // ids of those that are not realised, or not removed

	// what objects are looked for by
	keys func(spec S) []string
	// what an object is for authorization; a network is no port
	scope func(id string, spec S) (port string, networks []string)
	// a spec by itself, whatever else there is
	valid func(spec S) error
	// the spec in the form that is kept, or a gRPC status
	check func(who client, id string, spec S) (S, error)
	// a gRPC status if other objects need this one
	checkUnused func(who client, id string) error
	// how many objects a rule lets its client have
	most func(Rule) *int
	// what clients have set beside the specs
	options options
	// brings the data plane to a spec; changed: from another one
	realise func(id string, spec S, changed bool) error
	// removes an object from the data plane
	remove func(id string) error
	// why an object, or one that it needs, is not in service
	failureOf func(*object[S]) error
	// what a spec is, for error messages
	describe func(S) string
	// the status of a message, 0 if it has none
	operStatus func(M) state
	// message makes a message of the API. It has no status if oper is zero.
	message func(name string, spec S, oper state, components ...*evpn.Component) M
}

func (c *collection[S, M]) create(ctx context.Context, id string, spec S) (reply M, err error) {
	if err := c.checkID(id); err != nil {
		return reply, err
	}
	if err := c.permitID(clientOf(ctx), id); err != nil {
		return reply, err
	}

	end, err := c.agent.begin(ctx)
	if err != nil {
		return reply, err
	}
	defer end()

	return c.add(ctx, id, spec)
}

// add makes an object, or returns the one that is there already if it is the same.
func (c *collection[S, M]) add(ctx context.Context, id string, spec S) (reply M, err error) {
	who, have := clientOf(ctx), c.objects[id]
	err = c.permit(who, true, id, spec)
	if err == nil && have != nil {
		err = c.permit(who, true, id, have.spec) // its networks may be another client's
	}

	if err == nil {
		spec, err = c.check(who, id, spec)
	}
	if err != nil {
		return reply, err
	}

	if have != nil {
		switch {
		case have.deleting:
			return reply, c.beingDeleted(id)
		case !proto.Equal(have.spec, spec):
			return reply, status.Errorf(codes.AlreadyExists, "%s %s exists %s", c.word, id,
				c.describe(have.spec))
		}
		return c.reply(who, id), nil
	}

	if err := c.room(who, id); err != nil {
		return reply, err
	}
	if err := c.put(id, spec, 0); err != nil {
		return reply, err
	}

	c.keep(id, &object[S]{spec: spec, failure: errNotYet})
	c.reconcile(id, false)

	return c.reply(who, id), nil
}

func (c *collection[S, M]) get(ctx context.Context, name string) (reply M, err error) {
	c.agent.mu.RLock()
	defer c.agent.mu.RUnlock()
	id, _, err := c.permitted(ctx, false, name)
	if err != nil {
		return reply, err
	}
	return c.reply(clientOf(ctx), id), nil
}

func (c *collection[S, M]) list(
	ctx context.Context, size int32, token string,
) (replies []M, next string, err error) {
	c.agent.mu.RLock()
	defer c.agent.mu.RUnlock()

	who := clientOf(ctx)
	ids, next, err := page(c.visible(who), size, token)
	bytes := 0
	for i, id := range ids {
		reply := c.reply(who, id)
		if bytes += proto.Size(reply); bytes > maxPage && i > 0 {
			return replies, pageToken(ids[i-1]), nil
		}
		replies = append(replies, reply)
	}

	return replies, next, err
}

// visible returns the ids of the objects that a client may know of, sorted.
func (c *collection[S, M]) visible(who client) []string {
	if !who.restricted {
		return c.ids
	}

	var ids []string
	for _, id := range c.ids {
		if who.sees(c.scope(id, c.objects[id].spec)) {
			ids = append(ids, id)
		}
	}

	return ids
}

// update changes the fields of the spec that the mask names. If nothing changes it tries again to
// realise the object.
func (c *collection[S, M]) update(
	ctx context.Context, to M, mask *fieldmaskpb.FieldMask, allowMissing bool,
) (reply M, err error) {
	end, err := c.agent.begin(ctx)
	if err != nil {
		return reply, err
	}
	defer end()

	id, o, err := c.permitted(ctx, true, to.GetName())
	if status.Code(err) == codes.NotFound && allowMissing {
		return c.add(ctx, id, to.GetSpec())
	}
	if err != nil {
		return reply, err
	}
	if o.deleting {
		return reply, c.beingDeleted(id)
	}

	who := clientOf(ctx)
	spec, err := masked(o.spec, to.GetSpec(), mask)
	if err == nil {
		err = c.permit(who, true, id, spec)
	}

	if err == nil {
		spec, err = c.check(who, id, spec)
	}
	if err != nil {
		return reply, err
	}

	changed := !proto.Equal(spec, o.spec)
	if changed {
		if err := c.put(id, spec, 0); err != nil {
			return reply, err
		}
		c.agent.mu.Lock()
		c.by.remove(id, c.keys(o.spec))
		c.by.add(id, c.keys(spec))
		o.spec = spec
		c.agent.mu.Unlock()
	}

	c.reconcile(id, changed)
	return c.reply(who, id), nil
}

// delete writes to the state file that the object is being deleted before it touches the data
// plane.
func (c *collection[S, M]) delete(
	ctx context.Context, name string, allowMissing bool,
) (*emptypb.Empty, error) {
	end, err := c.agent.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()

	id, o, err := c.permitted(ctx, true, name)
	if status.Code(err) == codes.NotFound && allowMissing {
		return &emptypb.Empty{}, nil
	}
	if err != nil {
		return nil, err
	}

	who := clientOf(ctx)
	if err := c.checkUnused(who, id); err != nil {
		return nil, err
	}

	if !o.deleting {
		if err := c.put(id, o.spec, stateDeleting); err != nil {
			return nil, err
		}
		c.agent.mu.Lock()
		o.deleting = true
		c.agent.mu.Unlock()
	}

	c.reconcile(id, false)
	if o.failure != nil {
		return nil, status.Errorf(codes.Internal,
			"%s %s is not deleted yet, the agent keeps trying: %s",
			c.word, id, c.agent.tell(who, o.failure))
	}

	return &emptypb.Empty{}, nil
}

// lookup returns the object that has a resource name. If there is none the status is NotFound, and
// the id is valid.
func (c *collection[S, M]) lookup(name string) (string, *object[S], error) {
	id, err := c.parseName(name)
	if err != nil {
		return "", nil, err
	}
	if c.objects[id] == nil {
		return id, nil, status.Errorf(codes.NotFound, "%s %s does not exist", c.word, id)
	}
	return id, c.objects[id], nil
}

// permitted is lookup for a client that may see the object, and change it if change is set. Only an
// id that is for the client may be NotFound.
func (c *collection[S, M]) permitted(
	ctx context.Context, change bool, name string,
) (string, *object[S], error) {
	who := clientOf(ctx)
	id, o, err := c.lookup(name)
	if id != "" {
		if denied := c.permitID(who, id); denied != nil {
			return id, nil, denied
		}
	}

	if err == nil {
		err = c.permit(who, change, id, o.spec)
	}

	return id, o, err
}

func (c *collection[S, M]) beingDeleted(id string) error {
	return status.Errorf(codes.FailedPrecondition, "%s %s is being deleted", c.word, id)
}

// reply is the message about an object that a client gets.
func (c *collection[S, M]) reply(who client, id string) M {
	o := c.objects[id]
	failure := c.failureOf(o)
	component := &evpn.Component{Name: c.component, Status: evpn.CompStatus_COMP_STATUS_SUCCESS}
	if failure != nil {
		component.Status, component.Details = evpn.CompStatus_COMP_STATUS_ERROR, c.agent.tell(who,
			failure)
	}
	return c.message(c.prefix+id, o.spec, stateOf(o.deleting, failure), component)
}

// count returns how many objects are in each state.
func (c *collection[S, M]) count() map[state]int {
	n := map[state]int{}
	for _, o := range c.objects {
		n[stateOf(o.deleting, c.failureOf(o))]++
	}
	return n
}

// keep adds an object.
func (c *collection[S, M]) keep(id string, o *object[S]) {
	c.agent.mu.Lock()
	defer c.agent.mu.Unlock()
	c.objects[id] = o
	at, _ := slices.BinarySearch(c.ids, id)
	c.ids = slices.Insert(c.ids, at, id)
	c.by.add(id, c.keys(o.spec))
}

// drop removes an object.
func (c *collection[S, M]) drop(id string) {
	c.agent.mu.Lock()
	defer c.agent.mu.Unlock()

	c.by.remove(id, c.keys(c.objects[id].spec))
	if at, found := slices.BinarySearch(c.ids, id); found {
		c.ids = slices.Delete(c.ids, at, at+1)
	}

	delete(c.objects, id)
	delete(c.failed, id)
	c.options.forget(id)
}

// reconcileEach reconciles some objects, in their order.
func (c *collection[S, M]) reconcileEach(ids []string) {
	for _, id := range ids {
		c.reconcile(id, false)
	}
}

// reconcileFailed reconciles the objects that failed.
func (c *collection[S, M]) reconcileFailed() { c.reconcileEach(slices.Sorted(maps.Keys(c.failed))) }

// reconcile brings the data plane to an object, if it exists, and keeps the failure. A new failure
// is logged, and Run is told to try again. changed says that the object's spec was another one
// before.
func (c *collection[S, M]) reconcile(id string, changed bool) {
	o := c.objects[id]
	if o == nil {
		return
	}

	before, after := o.failure, error(nil)
	if o.deleting {
		after = c.finish(id)
	} else {
		after = c.realise(id, o.spec, changed)
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
	case after == nil && before != nil && before != errNotYet:
		c.agent.log.Info(c.noun+" is as wanted again", "id", id)
	}
}

// finish removes an object that is being deleted from the data plane, and then from the state file.
func (c *collection[S, M]) finish(id string) error {
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
	c.agent.retrySoon() // another network may want its VLAN, another port its representor

	return nil
}

// put writes an object to the state file. The error is a gRPC status.
func (c *collection[S, M]) put(id string, spec S, oper state) error {
	data, err := proto.Marshal(c.message("", spec, oper))
	if err == nil {
		err = c.agent.state.Update(func(tx *boltfile.Tx) error {
			return tx.Put(c.bucket, []byte(id), data)
		})
	}

	if err != nil {
		return status.Errorf(codes.Internal, "state: %s %s: %v", c.bucket, id, err)
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
		if err := cmp.Or(c.checkID(string(id)), c.valid(m.GetSpec())); err != nil {
			return fmt.Errorf("%w (%s %q: %s)", boltfile.ErrCorrupt, c.bucket, id,
				status.Convert(err).Message())
		}

		c.keep(string(id),
			&object[S]{spec: m.GetSpec(), deleting: c.operStatus(m) == stateDeleting,
				failure: errNotYet})

		return nil
	})
}
