// Package cni is xpu-cni, the shim between a container runtime and the node's agent. It runs to completion for each
// CNI command: it has the IPAM plugin give addresses, passes the command to the agent in one request over a unix
// socket, and passes the reply back. It knows nothing of devices. The agent has the truth; what is particular here is
// that DEL and GC succeed while the agent is away, by a file that the agent finds.
//
// Many shims run at the same time; all they share is the spool directory.
package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
)

// DefaultDeviceInfoDir is where runtimes look for what plugins say about devices, by the device-info specification of
// k8snetworkplumbingwg.
const DefaultDeviceInfoDir = "/var/run/k8s.cni.cncf.io/devinfo/cni"

// Plugin does CNI commands. Its errors are [types.Error]s.
type Plugin struct {
	// DeviceInfoDir is the one directory in which files that runtimeConfig.CNIDeviceInfoFile names are written and
	// removed: anybody who may write a NetworkAttachmentDefinition may write a path into it.
	DeviceInfoDir string
	// Stdout takes the result of ADD.
	Stdout io.Writer
	// Stderr takes what is for a person: the words of IPAM plugins, and that a request was spooled.
	Stderr io.Writer
	// Now is the clock that requests are dated by.
	Now func() time.Time
}

// Funcs are the commands.
func (p Plugin) Funcs() skel.CNIFuncs {
	return skel.CNIFuncs{Add: p.Add, Del: p.Del, Check: p.Check, GC: p.GC, Status: p.Status}
}

// Add attaches an interface and prints the result. On an error nothing is left behind: neither addresses nor what the
// agent did.
func (p Plugin) Add(args *skel.CmdArgs) error {
	c, err := p.newCall(args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(c.config.Timeout))
	defer cancel()
	result, err := c.add(ctx)
	if err != nil {
		return err
	}
	if err := result.PrintTo(p.Stdout); err != nil {
		return types.NewError(types.ErrIOFailure, "result", err.Error())
	}
	return nil
}

// Del gives an interface and its addresses back. It may be repeated, it does not need the agent to be there, and it
// makes do with what it understands of the configuration.
func (p Plugin) Del(args *skel.CmdArgs) error {
	c, wrong := salvageConfig(args.StdinData)
	if elsewhere := c.checkDeviceInfoFile(p.DeviceInfoDir); elsewhere != nil {
		c.RuntimeConfig.DeviceInfoFile, wrong = "", errors.Join(wrong, elsewhere)
	}
	if wrong != nil {
		_, _ = fmt.Fprintf(p.Stderr, "xpu-cni: DEL goes on without what is wrong: %v\n", wrong)
	}
	return p.newCallOf(c, args).del()
}

// Check fails if the interface is not as ADD left it, or its addresses are no longer reserved.
func (p Plugin) Check(args *skel.CmdArgs) error {
	c, err := p.newCall(args)
	if err != nil {
		return err
	}
	return all(c.tellIPAM("CHECK"), c.tellAgent(wire.Check, types.ErrTryAgainLater))
}

// GC gives back what belongs to attachments that the runtime does not know. It does not need the agent to be there.
func (p Plugin) GC(args *skel.CmdArgs) error {
	c, err := p.newCall(args)
	if err != nil {
		return err
	}
	return all(c.collect, c.tellIPAM("GC"))
}

// Status fails if ADD would now.
func (p Plugin) Status(args *skel.CmdArgs) error {
	c, err := p.newCall(args)
	if err != nil {
		return err
	}
	return all(c.tellAgent(wire.Status, types.ErrPluginNotAvailable), c.tellIPAM("STATUS"))
}

// call is one command.
type call struct {
	config config
	args   *skel.CmdArgs
	ipam   delegate
	// at is the date of requests: when the runtime asked.
	at     time.Time
	now    func() time.Time
	stderr io.Writer
}

func (p Plugin) newCall(args *skel.CmdArgs) (call, error) {
	c, err := parseConfig(args.StdinData)
	if err == nil {
		err = c.checkDeviceInfoFile(p.DeviceInfoDir)
	}
	if err != nil {
		return call{}, err
	}
	return p.newCallOf(c, args), nil
}

func (p Plugin) newCallOf(c config, args *skel.CmdArgs) call {
	return call{
		config: c,
		args:   args,
		ipam:   delegate{config: c, args: args, stderr: p.Stderr},
		at:     p.Now(),
		now:    p.Now,
		stderr: p.Stderr,
	}
}

// add is ADD, in the order that the IPAM plugin needs.
func (c call) add(ctx context.Context) (types.Result, error) {
	if c.config.IPAM.needsInterface() {
		return c.addThenAddress(ctx)
	}
	given, err := c.ipam.add(ctx)
	if err != nil {
		if reply, unknown := c.ask(ctx, wire.Result, nil); unknown == nil {
			return c.result(reply) // ADD was done before; its addresses are in use
		}
		return nil, undo(err, c.tellIPAM("DEL")) // by the specification, although it failed
	}
	result, err := c.attach(ctx, given)
	if err != nil {
		return nil, undo(err, c.tellIPAM("DEL"))
	}
	return result, nil
}

func (c call) addThenAddress(ctx context.Context) (types.Result, error) {
	if _, err := c.attach(ctx, nil); err != nil {
		return nil, err
	}
	given, err := c.ipam.add(ctx)
	if err != nil {
		return nil, undo(err, c.tellIPAM("DEL"), c.detach, c.forgetDevice)
	}
	reply, err := c.ask(ctx, wire.Address, given)
	if err != nil {
		return nil, undo(c.explain(err, types.ErrTryAgainLater), c.tellIPAM("DEL"), c.detach, c.forgetDevice)
	}
	result, err := c.result(reply)
	if err != nil {
		return nil, undo(err, c.tellIPAM("DEL"), c.detach, c.forgetDevice)
	}
	return result, nil
}

// del is DEL, in the order that the IPAM plugin needs.
func (c call) del() error {
	steps := []step{c.detach, c.tellIPAM("DEL"), c.forgetDevice}
	if c.config.IPAM.needsInterface() {
		steps = []step{c.tellIPAM("DEL"), c.detach, c.forgetDevice}
	}
	return all(steps...)
}

// attach has the agent attach the interface, and describes the device where the runtime wants that. What failed is
// undone.
func (c call) attach(ctx context.Context, given json.RawMessage) (types.Result, error) {
	reply, err := c.ask(ctx, wire.Add, given)
	if errors.Is(err, wire.ErrNoReply) {
		return nil, undo(c.explain(err, types.ErrTryAgainLater), c.detach)
	}
	if err != nil {
		return nil, c.explain(err, types.ErrTryAgainLater)
	}
	result, err := c.result(reply)
	if err != nil {
		return nil, undo(err, c.detach)
	}
	if file := c.config.RuntimeConfig.DeviceInfoFile; file != "" && reply.DeviceInfo != nil {
		if err := writeDeviceInfo(file, reply.DeviceInfo); err != nil {
			return nil, undo(types.NewError(types.ErrIOFailure, c.name(), err.Error()), c.detach)
		}
	}
	return result, nil
}

// result is that of a reply, in the version of the configuration.
func (c call) result(reply wire.Reply) (types.Result, error) {
	if reply.Result == nil {
		return nil, types.NewError(types.ErrInternal, c.name(), "xpu-agent gave no result")
	}
	result, err := DecodeResult(reply.Result, c.config.CNIVersion)
	if err == nil {
		result, err = result.GetAsVersion(c.config.CNIVersion)
	}
	if err != nil {
		return nil, types.NewError(types.ErrInternal, c.name(), "the result of xpu-agent: "+err.Error())
	}
	return result, nil
}

// detach gives the interface back, now or when the agent is there. What this call attached itself, before something
// failed, is meant too, so the date is that of now.
func (c call) detach(ctx context.Context) error {
	c.at = c.now()
	return c.deliver(ctx, wire.Del)
}

// collect has the agent give back what the runtime does not know, now or when the agent is there.
func (c call) collect(ctx context.Context) error { return c.deliver(ctx, wire.GC) }

// deliver passes a command to the agent, through the spool where the agent cannot take it. A request of which it is not
// known whether the agent has done it is spooled too: both may be repeated.
func (c call) deliver(ctx context.Context, command wire.Command) error {
	_, err := c.ask(ctx, command, nil)
	if !unheard(err) {
		return c.explain(err, types.ErrTryAgainLater)
	}
	path, failed := spool(c.config.SpoolDir, c.request(command, nil), c.config.Name)
	if failed != nil {
		return types.NewError(types.ErrIOFailure, c.name(), fmt.Sprintf("%v; %v", err, failed))
	}
	_, _ = fmt.Fprintf(c.stderr, "xpu-cni: %s is left for xpu-agent in %s: %v\n", command, path, err)
	return nil
}

// unheard says that the agent did not answer, in words that the shim understands.
func unheard(err error) bool {
	return errors.Is(err, wire.ErrAway) || errors.Is(err, wire.ErrNoReply) || errors.Is(err, wire.ErrVersion)
}

// forgetDevice removes the description of the device.
func (c call) forgetDevice(context.Context) error {
	if err := removeDeviceInfo(c.config.RuntimeConfig.DeviceInfoFile); err != nil {
		return types.NewError(types.ErrIOFailure, c.name(), err.Error())
	}
	return nil
}

// tellIPAM is a command of the IPAM plugin that has no result.
func (c call) tellIPAM(command string) step {
	return func(ctx context.Context) error { return c.ipam.tell(ctx, command) }
}

// tellAgent is a command of the agent that has no result. away is the code of the error if the agent cannot be asked.
func (c call) tellAgent(command wire.Command, away uint) step {
	return func(ctx context.Context) error {
		_, err := c.ask(ctx, command, nil)
		return c.explain(err, away)
	}
}

// ask sends the agent a request. The error is what the agent said, as a [types.Error], or that of [agent.Call].
func (c call) ask(ctx context.Context, command wire.Command, given json.RawMessage) (wire.Reply, error) {
	reply, err := wire.Call(ctx, c.config.Socket, c.request(command, given))
	if err != nil {
		return wire.Reply{}, err
	}
	if said := reply.Error; said != nil {
		if said.Code == types.ErrUnknown {
			said.Code = types.ErrInternal
		}
		return wire.Reply{}, types.NewError(said.Code, said.Msg, said.Details)
	}
	return reply, nil
}

func (c call) request(command wire.Command, given json.RawMessage) wire.Request {
	request := wire.Request{Command: command, Config: c.args.StdinData, IPAM: given, At: c.at}
	if command != wire.GC && command != wire.Status {
		request.ContainerID, request.NetNS = c.args.ContainerID, c.args.Netns
		request.IfName, request.Args = c.args.IfName, c.args.Args
	}
	return request
}

// explain makes an error of ask one for the runtime. away is the code if the agent cannot be asked.
func (c call) explain(err error, away uint) error {
	var said *types.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &said):
		return said
	case unheard(err):
		return types.NewError(away, c.name(), err.Error())
	default:
		return types.NewError(types.ErrInvalidNetworkConfig, c.name(), err.Error())
	}
}

func (c call) name() string { return "network " + c.config.Name }

// step is a part of a command. It has [askTimeout].
type step func(context.Context) error

// all takes every step, whether or not those before succeeded.
func all(steps ...step) error {
	var failures []*types.Error
	for _, next := range steps {
		if err := bounded(next); err != nil {
			failures = append(failures, asError(err))
		}
	}
	if len(failures) == 0 {
		return nil
	}
	first := failures[0]
	details := []string{first.Details}
	if first.Details == "" {
		details = nil
	}
	for _, failure := range failures[1:] {
		details = append(details, failure.Error())
	}
	return types.NewError(first.Code, first.Msg, strings.Join(details, "; "))
}

// undo takes every step after a failure, and is that failure.
func undo(failure error, steps ...step) error {
	err := all(steps...)
	if err == nil {
		return failure
	}
	said := asError(failure)
	details := "and not all of it is undone: " + err.Error()
	if said.Details != "" {
		details = said.Details + "; " + details
	}
	return types.NewError(said.Code, said.Msg, details)
}

func bounded(next step) error {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	return next(ctx)
}

func asError(err error) *types.Error {
	var said *types.Error
	if errors.As(err, &said) {
		return said
	}
	return types.NewError(types.ErrInternal, err.Error(), "")
}
