package bridge

import (
	"fmt"
	"maps"
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"go.etcd.io/bbolt"
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

type (
	network = object[*evpn.LogicalBridgeSpec]
	port    = object[*evpn.BridgePortSpec]
)

// collection is all networks or all ports: it serves the calls about them, keeps them in the state file and brings the data
// plane to them. Its create, get, list, update and delete take the agent's lock. All other methods, and the functions in its
// fields, need the lock held once the agent serves calls. M is a LogicalBridge or a BridgePort of the API, and S its spec.
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

	keys        func(spec S) []string                       // what objects are looked for by
	check       func(id string, spec S) (S, error)          // the spec in the form that is kept, or a gRPC status
	checkUnused func(id string) error                       // a gRPC status if other objects need this one
	realise     func(id string, spec S, changed bool) error // brings the data plane to a spec; changed: from another one
	remove      func(id string) error                       // removes an object from the data plane
	failureOf   func(*object[S]) error                      // why an object, or one that it needs, is not in service
	describe    func(S) string                              // what a spec is, for error messages
	operStatus  func(M) state                               // the status of a message, 0 if it has none
	// message makes a message of the API. It has no status if oper is zero.
	message func(name string, spec S, oper state, components ...*evpn.Component) M
}

func (c *collection[S, M]) create(id string, spec S) (reply M, err error) {
	if err := c.checkID(id); err != nil {
		return reply, err
	}
	c.agent.mu.Lock()
	defer c.agent.mu.Unlock()
	return c.add(id, spec)
}

// add makes an object, or returns the one that is there already if it is the same.
func (c *collection[S, M]) add(id string, spec S) (reply M, err error) {
	spec, err = c.check(id, spec)
	if err != nil {
		return reply, err
	}
	if have := c.objects[id]; have != nil {
		switch {
		case have.deleting:
			return reply, c.beingDeleted(id)
		case !proto.Equal(have.spec, spec):
			return reply, status.Errorf(codes.AlreadyExists, "%s %s exists %s", c.word, id, c.describe(have.spec))
		}
		return c.reply(id), nil
	}
	if err := c.put(id, spec, 0); err != nil {
		return reply, err
	}
	c.keep(id, &object[S]{spec: spec})
	c.reconcile(id, false)
	return c.reply(id), nil
}

func (c *collection[S, M]) get(name string) (reply M, err error) {
	c.agent.mu.RLock()
	defer c.agent.mu.RUnlock()
	id, _, err := c.lookup(name)
	if err != nil {
		return reply, err
	}
	return c.reply(id), nil
}

func (c *collection[S, M]) list(size int32, token string) (replies []M, next string, err error) {
	c.agent.mu.RLock()
	defer c.agent.mu.RUnlock()
	ids, next, err := page(c.ids, size, token)
	for _, id := range ids {
		replies = append(replies, c.reply(id))
	}
	return replies, next, err
}

// update changes the fields of the spec that the mask names. If nothing changes it tries again to realise the object.
func (c *collection[S, M]) update(to M, mask *fieldmaskpb.FieldMask, allowMissing bool) (reply M, err error) {
	c.agent.mu.Lock()
	defer c.agent.mu.Unlock()
	id, o, err := c.lookup(to.GetName())
	if status.Code(err) == codes.NotFound && allowMissing {
		return c.add(id, to.GetSpec())
	}
	if err != nil {
		return reply, err
	}
	if o.deleting {
		return reply, c.beingDeleted(id)
	}
	spec, err := masked(o.spec, to.GetSpec(), mask)
	if err == nil {
		spec, err = c.check(id, spec)
	}
	if err != nil {
		return reply, err
	}
	changed := !proto.Equal(spec, o.spec)
	if changed {
		if err := c.put(id, spec, 0); err != nil {
			return reply, err
		}
		c.by.remove(id, c.keys(o.spec))
		c.by.add(id, c.keys(spec))
		o.spec = spec
	}
	c.reconcile(id, changed)
	return c.reply(id), nil
}

// delete writes to the state file that the object is being deleted before it touches the data plane.
func (c *collection[S, M]) delete(name string, allowMissing bool) (*emptypb.Empty, error) {
	c.agent.mu.Lock()
	defer c.agent.mu.Unlock()
	id, o, err := c.lookup(name)
	if status.Code(err) == codes.NotFound && allowMissing {
		return &emptypb.Empty{}, nil
	}
	if err != nil {
		return nil, err
	}
	if err := c.checkUnused(id); err != nil {
		return nil, err
	}
	if !o.deleting {
		if err := c.put(id, o.spec, stateDeleting); err != nil {
			return nil, err
		}
		o.deleting = true
	}
	c.reconcile(id, false)
	if o.failure != nil {
		return nil, status.Errorf(codes.Internal, "%s %s is not deleted yet, the agent keeps trying: %v", c.word, id, o.failure)
	}
	return &emptypb.Empty{}, nil
}

// lookup returns the object that has a resource name. If there is none the status is NotFound, and the id is valid.
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

func (c *collection[S, M]) beingDeleted(id string) error {
	return status.Errorf(codes.FailedPrecondition, "%s %s is being deleted", c.word, id)
}

// reply is the message about an object that clients get.
func (c *collection[S, M]) reply(id string) M {
	o := c.objects[id]
	failure := c.failureOf(o)
	component := &evpn.Component{Name: c.component, Status: evpn.CompStatus_COMP_STATUS_SUCCESS}
	if failure != nil {
		component.Status, component.Details = evpn.CompStatus_COMP_STATUS_ERROR, failure.Error()
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
	c.objects[id] = o
	at, _ := slices.BinarySearch(c.ids, id)
	c.ids = slices.Insert(c.ids, at, id)
	c.by.add(id, c.keys(o.spec))
}

// drop removes an object.
func (c *collection[S, M]) drop(id string) {
	c.by.remove(id, c.keys(c.objects[id].spec))
	if at, found := slices.BinarySearch(c.ids, id); found {
		c.ids = slices.Delete(c.ids, at, at+1)
	}
	delete(c.objects, id)
	delete(c.failed, id)
}

// reconcileEach reconciles some objects, in their order.
func (c *collection[S, M]) reconcileEach(ids []string) {
	for _, id := range ids {
		c.reconcile(id, false)
	}
}

// reconcileFailed reconciles the objects that failed.
func (c *collection[S, M]) reconcileFailed() { c.reconcileEach(slices.Sorted(maps.Keys(c.failed))) }

// reconcile brings the data plane to an object, if it exists, and keeps the failure. A new failure is logged, and Run is told
// to try again. changed says that the object's spec was another one before.
func (c *collection[S, M]) reconcile(id string, changed bool) {
	o := c.objects[id]
	if o == nil {
		return
	}
	before := o.failure
	if o.deleting {
		o.failure = c.finish(id)
	} else {
		o.failure = c.realise(id, o.spec, changed)
	}
	if c.objects[id] == o && o.failure != nil {
		c.failed[id] = true
	} else {
		delete(c.failed, id)
	}
	switch {
	case o.failure != nil && (before == nil || before.Error() != o.failure.Error()):
		c.agent.log.Info(c.noun+" is down", "id", id, "reason", o.failure.Error())
		c.agent.retrySoon()
	case o.failure == nil && before != nil:
		c.agent.log.Info(c.noun+" is as wanted again", "id", id)
	}
}

// finish removes an object that is being deleted from the data plane, and then from the state file.
func (c *collection[S, M]) finish(id string) error {
	if err := c.remove(id); err != nil {
		return err
	}
	err := c.agent.state.Update(func(tx *bbolt.Tx) error { return tx.Bucket([]byte(c.bucket)).Delete([]byte(id)) })
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
		err = c.agent.state.Update(func(tx *bbolt.Tx) error { return tx.Bucket([]byte(c.bucket)).Put([]byte(id), data) })
	}
	if err != nil {
		return status.Errorf(codes.Internal, "state: %s %s: %v", c.bucket, id, err)
	}
	return nil
}

// load reads the objects from the state file.
func (c *collection[S, M]) load(bucket *bbolt.Bucket) error {
	return bucket.ForEach(func(id, data []byte) error {
		m := c.message("", *new(S), 0)
		if err := proto.Unmarshal(data, m); err != nil {
			return fmt.Errorf("%w (%s %q: %w)", boltfile.ErrCorrupt, c.bucket, id, err)
		}
		c.keep(string(id), &object[S]{spec: m.GetSpec(), deleting: c.operStatus(m) == stateDeleting})
		return nil
	})
}
