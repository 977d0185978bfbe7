// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceinfo"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/optional"
)

func (s *Server) find(id function.ID) (function.Function, error) {
	if f, known := s.Function(id); known {
		return f, nil
	}
	// The Function may be an SF that is still to be made.
	if _, known := s.Pools.Pools(); !known {
		return function.Function{}, fail(types.ErrTryAgainLater,
			"Function %s: pools have not been read yet", id)
	}
	return function.Function{}, fail(CodeNoFunction,
		"deviceID: Function %s is not on this node, or has gone", id)
}

// checkVF refuses settings that a PF enforces for VFs only. The rate of an SF can be limited by the
// eswitch.
func (a cniRequest) checkVF() error {
	if a.vf == nil || a.function.Kind == function.VF {
		return nil
	}

	fields, rest := "vlan, vlanQoS, vlanProto, spoofchk, trust, link_state, infinibandGUID", *a.vf
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

// checkLinkType refuses what only Functions of another link type have.
func (a cniRequest) checkLinkType(mac function.MAC, network string) error {
	err := a.function.CheckLinkType(function.Interface{MAC: mac, VF: a.vf}, network)
	if err != nil {
		return a.conf.invalid("%s", asWritten.Replace(err.Error()))
	}
	return nil
}

// Reasons for which an ADD is ended.
var (
	errDeleted    = errors.New("DEL came meanwhile")
	errAddedAgain = errors.New("another ADD of the same interface came meanwhile")
)

// add attaches a Function: it reserves, provisions and attaches it. Each step is written to the
// journal before it is carried out, so that a DEL finds what to clean up, wherever the ADD ends.
func (s *Server) add(ctx context.Context, a cniRequest) (record journal.Attachment, err error) {
	if other, taken := s.adding.LoadOrStore(a.device, a.ContainerID); taken {
		return record, fail(types.ErrTryAgainLater,
			"Function %s: an ADD for container %s runs already", a.device, other)
	}

	ctx, end, err := s.takeOver(ctx, a.Request, errAddedAgain)
	if err != nil {
		s.adding.Delete(a.device)
		return record, err
	}

	defer func() {
		// This comes first, because the DEL that waits for the end may be followed by an ADD.
		s.adding.Delete(a.device)
		end()
	}()

	if record, err = s.makeReady(ctx, a); err == nil && record.State != journal.Attached {
		record, err = s.attach(ctx, a, record)
	}

	return record, err
}

// takeOver ends a running ADD of the same interface, and waits for its end. The context that it
// returns ends when a later request for the interface takes over.
func (s *Server) takeOver(
	ctx context.Context, r wire.Request, reason error,
) (_ context.Context, end func(), err error) {
	ctx, end, err = s.adds.TakeOver(ctx,
		types.GCAttachment{ContainerID: r.ContainerID, IfName: r.IfName}, reason)
	if err != nil {
		err = fail(types.ErrTryAgainLater, "an ADD of the same interface has not ended yet: %w",
			err)
	}
	return ctx, end, err
}

// makeReady waits until the Function is back from its last pod, and undoes what this request or an
// older request of the pod left. The record that it returns belongs to this request. Its state is
// Attached if an earlier ADD got that far. Otherwise it is Reserved, and the xPU serves the
// Function.
func (s *Server) makeReady(ctx context.Context, a cniRequest) (journal.Attachment, error) {
	owner := journal.Attachment{
		Function: a.device, Pod: a.pod,
		CNI: &journal.CNI{ContainerID: a.ContainerID, IfName: a.IfName},
	}

	var reservation journal.Attachment
	// refused is what is wrong with the request.
	var refused error
	admitted := false
	have, err := s.Lifecycle.ReserveAs(ctx,
		owner, func(have journal.Attachment) (journal.Attachment, error) {
			admitted = true
			// until now, the Function may have had the driver of its last owner
			if a.function, refused = s.find(a.device); refused == nil {
				reservation, refused = s.reservation(a, have)
			}

			if refused == nil {
				refused = s.checkPrivileged(a, reservation)
			}

			if refused == nil {
				refused = a.checkResult(reservation)
			}

			return reservation, refused
		})

	switch {
	case refused != nil:
		return journal.Attachment{}, refused
	case err != nil && !admitted && !errors.As(err, new(lifecycle.TakenError)):
		return journal.Attachment{}, fail(types.ErrTryAgainLater, "not free yet: %w",
			loop.WithCause(ctx, err))
	case err != nil:
		return journal.Attachment{}, reservationError(ctx, reservation, err)
	case have.State == journal.Attached:
		return have, s.checkRepeated(a, have)
	case reservation.Port != nil && reservation.Claim.UID == "":
		return reservation, s.provision(ctx, a, reservation)
	}

	return reservation, nil
}

// reservationError returns the error for a Function that could not be reserved or set up. If there
// is a setup, all errors get its code, because the setup fails more often than the journal.
func reservationError(ctx context.Context, reservation journal.Attachment, err error) error {
	switch {
	case errors.As(err, new(lifecycle.TakenError)):
		return fail(CodeTaken, "%w", err)
	case errors.As(err, new(lifecycle.UnusableError)):
		return fail(CodeAttach, "%w", err)
	case reservation.Setup != nil:
		return fail(CodeAttach, "%w", loop.WithCause(ctx, err))
	}
	return fail(CodeJournal, "%w", err)
}

// provision makes the xPU serve the Function. It then reserves the Function with the MTU of the
// network, if this is smaller, and with addresses from the network's address book, if the request
// asks for them.
func (s *Server) provision(
	ctx context.Context, a cniRequest, reservation journal.Attachment,
) error {
	done, err := s.Provisioner.Provision(ctx, reservation)
	if err != nil {
		return fail(CodeProvision, "%w", loop.WithCause(ctx, err))
	}

	before := reservation.Interface
	if reservation.Port.AssignAddresses {
		if reservation, err = a.withAddresses(reservation, done.Addresses); err != nil {
			return err
		}
		if err := a.checkResult(reservation); err != nil {
			return err
		}
	}

	if !reservation.Interface.Userspace {
		reservation.Interface.MTU = optional.Min(reservation.Interface.MTU, done.MTU)
	}
	if reflect.DeepEqual(reservation.Interface, before) && !reservation.Port.AssignAddresses {
		return nil
	}
	if err := s.Lifecycle.Reserve(ctx, reservation); err != nil {
		return reservationError(ctx, reservation, err)
	}

	return nil
}

// attach moves the Function into the container's network namespace. After an error, the Function is
// on the host, or DEL brings it back.
func (s *Server) attach(
	ctx context.Context, a cniRequest, reservation journal.Attachment,
) (journal.Attachment, error) {
	sandbox := lifecycle.Sandbox{ID: a.ContainerID, NetNS: a.NetNS, Pod: reservation.Pod}
	if _, err := s.Lifecycle.Attach(ctx, a.device, sandbox); err != nil {
		message := loop.WithCause(ctx, err).Error()
		if a.vf != nil {
			message = asWritten.Replace(message)
		}
		return journal.Attachment{}, fail(CodeAttach, "%s", message)
	}

	record, err := s.attachedFor(a)
	// The claim was prepared again in between, and its interface replaced the interface of the
	// request.
	if err != nil {
		err = s.Lifecycle.Detach(context.WithoutCancel(ctx), a.device, a.ContainerID)
		err = errors.Join(errors.New("its claim was prepared once more meanwhile"), err)
		err = fail(types.ErrTryAgainLater, "Function %s: %w", a.device, err)
	}

	return record, err
}

// attachedFor returns the record of a Function that is attached as the interface of a request.
func (s *Server) attachedFor(a cniRequest) (journal.Attachment, error) {
	record, ok := s.Journal.Get(a.device)
	if !ok || record.State != journal.Attached ||
		!journal.ContainerIs(a.ContainerID, a.IfName)(record) {
		return record, fail(types.ErrUnknownContainer,
			"Function %s is not attached as %s of container %s",
			a.device, a.IfName, a.ContainerID)
	}
	return record, nil
}

// addReply returns the reply for a Function that is attached for the request.
func (s *Server) addReply(
	ctx context.Context, a cniRequest, record journal.Attachment,
) (reply wire.Reply, err error) {
	if reply.Result, err = a.encode(record); err != nil {
		return reply, err
	}

	if a.conf.Runtime.DeviceInfoFile != "" {
		// when the request arrived, the last owner may still have had the Function
		if now, exists := s.Function(a.device); exists {
			a.function = now
		}

		p, _ := s.Pools.PoolOf(a.device)
		promised := p.Options(a.function)
		if record.Devices != nil {
			promised = pool.Options(*record.Devices)
		}
		// The device-info specification cannot describe an SF without a vDPA device.
		if info := deviceinfo.Of(a.function, promised.VDPA != ""); info != nil {
			if reply.DeviceInfo, err = json.Marshal(info); err != nil {
				return reply, err
			}
		}
	}

	s.Report(record.Claim)
	logr.FromContextOrDiscard(ctx).V(1).Info("Interface added", "mac", record.Observed.MAC,
		"resource", record.Resource)

	return reply, nil
}
