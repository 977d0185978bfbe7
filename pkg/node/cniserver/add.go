package cniserver

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// addRequest is an ADD with all that is known about it.
type addRequest struct {
	requested
	request  wire.Request
	ipam     addressing
	function function.Function
	// resource is the extended resource by which the kubelet gave the Function to the pod, "" where it does not say.
	resource string
}

// add attaches a Function: reserve, provision, attach. Each step is in the journal before it is done, so that a DEL
// finds what there is to clean wherever this ends.
func (s *Server) add(ctx context.Context, r wire.Request) (wire.Reply, error) {
	a, err := s.read(r)
	if err != nil {
		return wire.Reply{}, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.AddTimeout, fmt.Errorf("the agent waited %s", s.AddTimeout))
	defer cancel()
	ctx = logr.NewContext(ctx, logr.FromContextOrDiscard(ctx).WithValues("function", a.device.String()))
	ctx, leave, err := s.adding.enter(ctx, a.device, attachmentKey{r.ContainerID, r.IfName})
	if err != nil {
		return wire.Reply{}, err
	}
	defer leave()
	record, err := s.makeReady(ctx, a)
	if err != nil {
		return wire.Reply{}, err
	}
	if record.State != journal.Attached {
		if err := s.attach(ctx, a, record); err != nil {
			return wire.Reply{}, err
		}
	}
	return s.added(ctx, a)
}

// read reads the request and finds the Function.
func (s *Server) read(r wire.Request) (a addRequest, err error) {
	a.request = r
	if a.requested, err = parse(r, s.AllowKeys); err != nil {
		return a, err
	}
	if a.ipam, err = parseIPAM(r.IPAM); err != nil {
		return a, err
	}
	if a.function, err = s.find(a.device); err != nil {
		return a, err
	}
	return a, a.needsVF()
}

// find returns the Function as it is now.
func (s *Server) find(id function.ID) (function.Function, error) {
	if f, known := s.Functions.Get(id); known {
		return f, nil
	}
	if _, known := s.Pools.Pools(); !known { // it may be an SF that is to be made
		return function.Function{}, fail(types.ErrTryAgainLater, "Function %s: pools have not been read yet", id)
	}
	return function.Function{}, fail(CodeNoFunction, "deviceID: Function %s is not on this node, or has gone", id)
}

// makeReady returns the record of the Function once it is this request's: Attached, where an ADD before got as far, or
// Reserved and served by the xPU.
func (s *Server) makeReady(ctx context.Context, a addRequest) (journal.Attachment, error) {
	settled, err := s.settle(ctx, a)
	if err != nil {
		return journal.Attachment{}, err
	}
	have := settled.Record
	if have.State == journal.Attached {
		return have, s.sameAsBefore(a, have)
	}
	if a.function, err = s.find(a.device); err != nil { // it may have had the driver of its last owner until now
		return journal.Attachment{}, err
	}
	a.resource = settled.Resource
	want, err := s.want(a, have)
	if err != nil {
		return journal.Attachment{}, err
	}
	if err := s.reserve(ctx, want); err != nil {
		return journal.Attachment{}, err
	}
	if want.Port == nil || want.Claim.UID != "" {
		return want, nil
	}
	return s.provision(ctx, a, want)
}

// settle makes way for the request: it waits until the Function is back from its last pod, and undoes what this request
// or an older one of the pod left before.
func (s *Server) settle(ctx context.Context, a addRequest) (lifecycle.Decision, error) {
	settled, err := s.Lifecycle.Admit(ctx, journal.Attachment{
		Function: a.device, Pod: a.pod, CNI: &journal.CNI{ContainerID: a.request.ContainerID, IfName: a.request.IfName},
	})
	if _, taken := errors.AsType[lifecycle.TakenError](err); taken {
		return settled, fail(CodeTaken, "%w", err)
	}
	if err != nil {
		return settled, fail(types.ErrTryAgainLater, "not free yet: %w", causeOf(ctx, err))
	}
	return settled, nil
}

// reserve writes the reservation down and has the Function set up. Where that is to be done, it is more likely to
// fail than the journal is.
func (s *Server) reserve(ctx context.Context, want journal.Attachment) error {
	err := s.Lifecycle.Reserve(ctx, want)
	_, taken := errors.AsType[lifecycle.TakenError](err)
	switch {
	case err == nil:
		return nil
	case taken:
		return fail(CodeTaken, "%w", err)
	case want.Setup != nil:
		return fail(CodeAttach, "%w", causeOf(ctx, err))
	}
	return fail(CodeJournal, "%w", err)
}

// provision has the xPU serve the Function, and takes the MTU of the network over.
func (s *Server) provision(ctx context.Context, a addRequest, want journal.Attachment) (journal.Attachment, error) {
	port, err := s.Provisioner.Provision(ctx, provisioning.Request{
		Function: a.function, DevicePool: want.Port.DevicePool, Network: want.Port.Network, MAC: want.Port.MAC, Pod: a.pod,
	})
	if err != nil {
		return journal.Attachment{}, fail(CodeProvision, "%w", causeOf(ctx, err))
	}
	mtu := smaller(want.Interface.MTU, port.MTU)
	if want.Interface.Userspace || mtu == want.Interface.MTU {
		return want, nil
	}
	want.Interface.MTU = mtu
	if err := s.reserve(ctx, want); err != nil {
		return journal.Attachment{}, err
	}
	return want, nil
}

// needsVF refuses what a PF enforces for VFs only. The rate of an SF can be limited by the eswitch.
func (a addRequest) needsVF() error {
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
	return fail(types.ErrInvalidNetworkConfig, "network configuration %s: %s: need a VF; Function %s is a %s",
		a.conf, fields, a.device, a.function.Kind)
}

// attach takes the Function into the container's network namespace. If that fails, it is on the host again, or DEL
// brings it back.
func (s *Server) attach(ctx context.Context, a addRequest, want journal.Attachment) error {
	sandbox := lifecycle.Sandbox{ID: a.request.ContainerID, NetNS: a.request.NetNS, Pod: want.Pod}
	if _, err := s.Lifecycle.Attach(ctx, a.device, sandbox); err != nil {
		return fail(CodeAttach, "%s", a.asWritten(causeOf(ctx, err)))
	}
	record, _ := s.Journal.Get(a.device)
	if record.State == journal.Attached && journal.ContainerIs(a.request.ContainerID, a.request.IfName)(record) {
		return nil
	}
	// The claim was prepared again in between, and its own wishes took the place of the request's.
	err := s.Lifecycle.Detach(context.WithoutCancel(ctx), a.device, a.request.ContainerID)
	return fail(types.ErrTryAgainLater, "Function %s: %w", a.device, errors.Join(errReservedAgain, err))
}

// asWritten names fields as the network configuration does, where other packages name them as an InterfaceConfig does.
func (a addRequest) asWritten(err error) string {
	if a.vf == nil {
		return err.Error()
	}
	return strings.NewReplacer(
		"vf.vlanProtocol", "vlanProto", "vf.vlan", "vlan", "vf.qos", "vlanQoS", "vf.trust", "trust", "vf.spoofCheck", "spoofchk",
		"vf.minTxRate", "min_tx_rate", "vf.maxTxRate", "max_tx_rate", "vf.linkState", "link_state",
	).Replace(err.Error())
}

var errReservedAgain = errors.New("its claim was prepared once more meanwhile")

// added answers from the journal.
func (s *Server) added(ctx context.Context, a addRequest) (reply wire.Reply, err error) {
	record, _ := s.Journal.Get(a.device)
	if record.Observed == nil || record.CNI == nil {
		return reply, fail(types.ErrTryAgainLater, "Function %s is %s by now", a.device, record.State)
	}
	if reply.Result, err = a.encode(record); err != nil {
		return reply, err
	}
	if a.wantsDeviceInfo {
		if reply.DeviceInfo, err = s.deviceInfo(a); err != nil {
			return reply, err
		}
	}
	if record.Claim.UID != "" {
		s.Reporter.Report(journal.Claim{Namespace: record.Claim.Namespace, Name: record.Claim.Name, UID: record.Claim.UID})
	}
	logr.FromContextOrDiscard(ctx).V(1).Info("Interface added", "mac", record.Observed.MAC, "resource", record.Resource)
	return reply, nil
}
