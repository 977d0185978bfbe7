package cniserver

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"sync"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceinfo"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// find returns the Function as it is now.
func (s *Server) find(id function.ID) (function.Function, error) {
	if f, known := s.Function(id); known {
		return f, nil
	}
	if _, known := s.Pools.Pools(); !known { // it may be an SF that is to be made
		return function.Function{}, fail(types.ErrTryAgainLater, "Function %s: pools have not been read yet", id)
	}
	return function.Function{}, fail(CodeNoFunction, "deviceID: Function %s is not on this node, or has gone", id)
}

// needsVF refuses what a PF enforces for VFs only. The rate of an SF can be limited by the eswitch.
func (a cniRequest) needsVF() error {
	if a.vf == nil || a.function.Kind == function.VF {
		return nil
	}
	fields, rest := "vlan, vlanQoS, vlanProto, spoofchk, trust, link_state", *a.vf
	if a.function.Kind == function.SF {
		rest.MinTxRate, rest.MaxTxRate = nil, nil
	} else {
		fields += ", min_tx_rate, max_tx_rate"
	}
	if rest == (function.VFConfig{}) {
		return nil
	}
	return a.conf.invalid("%s: need a VF; Function %s is a %s", fields, a.device, a.function.Kind)
}

// add attaches a Function: reserve, provision, attach. Each step is in the journal before it is done, so that a DEL
// finds what there is to clean wherever this ends.
func (s *Server) add(ctx context.Context, a cniRequest) (reply wire.Reply, err error) {
	ctx = logr.NewContext(ctx, logr.FromContextOrDiscard(ctx).WithValues("function", a.device.String()))
	attachment := types.GCAttachment{ContainerID: a.ContainerID, IfName: a.IfName}
	err = s.adding.run(ctx, a.device, attachment, func(ctx context.Context) error {
		record, err := s.makeReady(ctx, a)
		if err == nil && record.State != journal.Attached {
			err = s.attach(ctx, a, record)
		}
		if err == nil {
			reply, err = s.added(ctx, a)
		}
		return err
	})
	return reply, err
}

// makeReady waits until the Function is back from its last pod, and undoes what this request or an older one of the pod
// left. It returns the Function's record, which belongs to this request then: it is Attached if an earlier ADD got so far,
// or else Reserved, and the xPU serves the Function.
func (s *Server) makeReady(ctx context.Context, a cniRequest) (journal.Attachment, error) {
	admitted, err := s.Lifecycle.Admit(ctx, journal.Attachment{
		Function: a.device, Pod: a.pod, CNI: &journal.CNI{ContainerID: a.ContainerID, IfName: a.IfName},
	})
	have := admitted.Record
	switch {
	case errors.As(err, new(lifecycle.TakenError)):
		return journal.Attachment{}, fail(CodeTaken, "%w", err)
	case err != nil:
		return journal.Attachment{}, fail(types.ErrTryAgainLater, "not free yet: %w", causeOf(ctx, err))
	case have.State == journal.Attached:
		return have, s.sameAsBefore(a, have)
	}
	if a.function, err = s.find(a.device); err != nil { // it may have had the driver of its last owner until now
		return journal.Attachment{}, err
	}
	have.Resource = cmp.Or(have.Resource, admitted.Resource)
	reservation, err := s.reservation(a, have)
	if err != nil {
		return journal.Attachment{}, err
	}
	err = s.reserve(ctx, reservation)
	if err == nil && reservation.Port != nil && reservation.Claim.UID == "" {
		err = s.provision(ctx, a, reservation)
	}
	return reservation, err
}

// reserve writes the reservation down and has the Function set up. With a setup, every error gets the setup's code, as the
// setup fails more often than the journal.
func (s *Server) reserve(ctx context.Context, reservation journal.Attachment) error {
	err := s.Lifecycle.Reserve(ctx, reservation)
	switch {
	case err == nil:
		return nil
	case errors.As(err, new(lifecycle.TakenError)):
		return fail(CodeTaken, "%w", err)
	case reservation.Setup != nil:
		return fail(CodeAttach, "%w", causeOf(ctx, err))
	}
	return fail(CodeJournal, "%w", err)
}

// provision has the xPU serve the Function, and reserves it with the MTU of the network where that is smaller.
func (s *Server) provision(ctx context.Context, a cniRequest, reservation journal.Attachment) error {
	port, err := s.Provisioner.Provision(ctx, provisioning.Request{
		Function: a.function, DevicePool: reservation.Port.DevicePool, Network: reservation.Port.Network,
		MAC: reservation.Port.MAC, Pod: a.pod,
	})
	if err != nil {
		return fail(CodeProvision, "%w", causeOf(ctx, err))
	}
	mtu := smaller(reservation.Interface.MTU, port.MTU)
	if reservation.Interface.Userspace || mtu == reservation.Interface.MTU {
		return nil
	}
	reservation.Interface.MTU = mtu
	return s.reserve(ctx, reservation)
}

// attach takes the Function into the container's network namespace. If that fails, the Function is on the host again, or
// DEL brings it back.
func (s *Server) attach(ctx context.Context, a cniRequest, reservation journal.Attachment) error {
	sandbox := lifecycle.Sandbox{ID: a.ContainerID, NetNS: a.NetNS, Pod: reservation.Pod}
	if _, err := s.Lifecycle.Attach(ctx, a.device, sandbox); err != nil {
		message := causeOf(ctx, err).Error()
		if a.vf != nil {
			message = asWritten.Replace(message)
		}
		return fail(CodeAttach, "%s", message)
	}
	if _, err := s.attachedFor(a); err == nil {
		return nil
	}
	// The claim was prepared again in between, and its interface took the place of the request's.
	err := s.Lifecycle.Detach(context.WithoutCancel(ctx), a.device, a.ContainerID)
	err = errors.Join(errors.New("its claim was prepared once more meanwhile"), err)
	return fail(types.ErrTryAgainLater, "Function %s: %w", a.device, err)
}

// attachedFor returns the record of a Function that is attached as the interface that a request is about.
func (s *Server) attachedFor(a cniRequest) (journal.Attachment, error) {
	record, ok := s.Journal.Get(a.device)
	if !ok || record.State != journal.Attached || !journal.ContainerIs(a.ContainerID, a.IfName)(record) {
		return record, fail(types.ErrUnknownContainer, "Function %s is not attached as %s of container %s",
			a.device, a.IfName, a.ContainerID)
	}
	return record, nil
}

// added makes the reply for an attached Function from the journal.
func (s *Server) added(ctx context.Context, a cniRequest) (reply wire.Reply, err error) {
	record, _ := s.Journal.Get(a.device)
	if record.Observed == nil || record.CNI == nil {
		return reply, fail(types.ErrTryAgainLater, "Function %s is %s by now", a.device, record.State)
	}
	if reply.Result, err = a.encode(record); err != nil {
		return reply, err
	}
	if a.conf.Runtime.DeviceInfoFile != "" {
		if now, exists := s.Function(a.device); exists { // the request may have come while its last owner still had it
			a.function = now
		}
		p, _ := s.Pools.PoolOf(a.device)
		// The device-info specification cannot describe an SF without a vDPA device.
		if info := deviceinfo.Of(a.function, p.Options(a.function).VDPA != ""); info != nil {
			if reply.DeviceInfo, err = json.Marshal(info); err != nil {
				return reply, err
			}
		}
	}
	if record.Claim.UID != "" {
		s.Reporter.Report(journal.Claim{Namespace: record.Claim.Namespace, Name: record.Claim.Name, UID: record.Claim.UID})
	}
	logr.FromContextOrDiscard(ctx).V(1).Info("Interface added", "mac", record.Observed.MAC, "resource", record.Resource)
	return reply, nil
}

// add is an ADD that runs. done is closed when it has ended.
type add struct {
	types.GCAttachment
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// addsInProgress knows the ADDs that run. A Function has one at a time, so that the xPU is asked for one owner only.
type addsInProgress struct {
	byFunction sync.Map // *add by function.ID
}

var errDeleted = errors.New("DEL came meanwhile")

// run runs an ADD. Its context ends when a DEL for the same attachment comes.
func (a *addsInProgress) run(
	ctx context.Context, id function.ID, attachment types.GCAttachment, work func(context.Context) error,
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	running := &add{attachment, cancel, make(chan struct{})}
	if other, taken := a.byFunction.LoadOrStore(id, running); taken {
		return fail(types.ErrTryAgainLater, "Function %s: an ADD for container %s runs already", id, other.(*add).ContainerID)
	}
	defer close(running.done)
	defer a.byFunction.Delete(id)
	return work(ctx)
}

// end ends the ADDs of an attachment and waits until they have ended.
func (a *addsInProgress) end(ctx context.Context, attachment types.GCAttachment) error {
	for _, running := range a.of(attachment) {
		running.cancel(errDeleted)
		select {
		case <-running.done:
		case <-ctx.Done():
			return fail(types.ErrTryAgainLater, "an ADD of the same interface has not ended yet: %w", context.Cause(ctx))
		}
	}
	return nil
}

// of returns the ADDs of an attachment that run.
func (a *addsInProgress) of(attachment types.GCAttachment) (list []*add) {
	for _, running := range a.byFunction.Range {
		if running := running.(*add); running.GCAttachment == attachment {
			list = append(list, running)
		}
	}
	return list
}
