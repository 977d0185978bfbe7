// SPDX-License-Identifier: Apache-2.0

// Package cni implements xpu-cni, the shim between a container runtime and the node's agent. The
// shim runs once for each CNI command: it asks the IPAM plugin for addresses, sends the command to
// the agent in one request over a unix socket, and returns the agent's reply. It does not know
// devices, and keeps no state. If the agent does not run, the shim leaves DELs and GCs as files in
// the spool directory.
package cni

import (
	"cmp"
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
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
)

// DefaultDeviceInfoDir is where runtimes look for descriptions of devices (device-info-spec of
// k8snetworkplumbingwg).
const DefaultDeviceInfoDir = "/var/run/k8s.cni.cncf.io/devinfo/cni"

// Plugin runs CNI commands. Its errors are [types.Error]s.
type Plugin struct {
	// DeviceInfoDir is the only directory in which files named by runtimeConfig.CNIDeviceInfoFile
	// are written and removed, because every user who may write a NetworkAttachmentDefinition may
	// write a path into it.
	DeviceInfoDir string
	// Paths returns where the node's agent is. It is called once for each command.
	Paths func() (Paths, error)

	// Stdout receives the result of ADD.
	Stdout io.Writer
	// Stderr receives messages for people: messages of IPAM plugins, and messages about spooled
	// requests.
	Stderr io.Writer
	// Now returns the time of requests to the agent.
	Now func() time.Time
	// Asked returns their time since the boot. If it is nil, requests do not have it.
	Asked func() uptime.Moment
}

// Funcs returns the commands. DEL and GC succeed even if the agent does not run.
func (p Plugin) Funcs() skel.CNIFuncs {
	return skel.CNIFuncs{
		Add: p.strict(call.add),
		Del: p.del,
		Check: p.strict(func(c call) error {
			return runAll(c.ipamStep("CHECK"),
				c.agentStep(wire.Check))
		}),
		GC: p.strict(func(c call) error { return runAll(c.agentStep(wire.GC), c.ipamStep("GC")) }),
		Status: p.strict(func(c call) error {
			return runAll(c.agentStep(wire.Status),
				c.ipamStep("STATUS"))
		}),
	}
}

// call is one command.
type call struct {
	Plugin
	paths  Paths
	config config
	args   *skel.CmdArgs
}

// newCall reads the input of a command. wrong says what is wrong with the network configuration.
// The call can be used without the invalid parts.
func (p Plugin) newCall(args *skel.CmdArgs) (c call, wrong, err error) {
	paths, err := p.Paths()
	if err != nil {
		return call{}, nil, types.NewError(types.ErrIOFailure, "where xpu-agent is on this node",
			err.Error())
	}
	config, wrong := parseConfig(args.StdinData, site{paths, p.DeviceInfoDir, args.ContainerID})
	return call{p, paths, config, args}, wrong, nil
}

// strict returns a command that refuses an invalid network configuration.
func (p Plugin) strict(command func(call) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		c, wrong, err := p.newCall(args)
		if err := cmp.Or(err, wrong); err != nil {
			return err
		}
		return command(c)
	}
}

// del releases an interface and its addresses. It uses the valid parts of the configuration,
// because ADD has failed with an invalid one, and the runtime would repeat for ever a DEL that
// refuses it too.
func (p Plugin) del(args *skel.CmdArgs) error {
	c, wrong, err := p.newCall(args)
	if err != nil {
		return err
	}

	if wrong != nil {
		_, _ = fmt.Fprintf(p.Stderr, "xpu-cni: DEL goes on without what is wrong: %v\n", wrong)
	}

	if c.config.interfaceFirst() {
		return runAll(c.ipamStep("DEL"), c.agentStep(wire.Del), c.removeDeviceInfo)
	}

	return runAll(c.agentStep(wire.Del), c.ipamStep("DEL"), c.removeDeviceInfo)
}

// add attaches an interface and prints the result. After an error it undoes what the IPAM plugin
// and the agent did.
func (c call) add() error {
	ctx, cancel := context.WithTimeout(context.Background(), c.config.Timeout)
	defer cancel()

	attach := c.addressAndAttach
	if !c.config.IPAM.IsEmpty() {
		if _, err := c.findIPAM(); err != nil { // before anything is attached
			return err
		}
	}

	if c.config.interfaceFirst() {
		attach = c.attachAndAddress
	}

	result, err := attach(ctx)
	if err != nil {
		return err
	}
	if err := result.PrintTo(c.Stdout); err != nil {
		return types.NewError(types.ErrIOFailure, "result", err.Error())
	}

	return nil
}

// addressAndAttach is the order for most IPAM plugins.
func (c call) addressAndAttach(ctx context.Context) (result types.Result, err error) {
	addresses, err := c.requestAddresses(ctx)
	if err == nil {
		result, err = c.attach(ctx, addresses)
	} else if reply, notAttached := c.ask(ctx, c.request(wire.Result, nil)); notAttached == nil {
		return c.result(reply, nil) // this ADD was done before, and its addresses are in use
	}

	if err != nil {
		// The specification requires DEL even if the plugin's ADD failed.
		return nil, undo(err, c.ipamStep("DEL"))
	}

	return result, nil
}

// attachAndAddress is the order for an IPAM plugin that needs the interface.
func (c call) attachAndAddress(ctx context.Context) (result types.Result, err error) {
	if _, err := c.attach(ctx, nil); err != nil {
		return nil, err
	}

	addresses, err := c.requestAddresses(ctx)
	if err == nil {
		result, err = c.result(c.ask(ctx, c.request(wire.Address, addresses)))
	}
	if err != nil {
		return nil, undo(err, c.ipamStep("DEL"), c.agentStep(wire.Del), c.removeDeviceInfo)
	}

	return result, nil
}

// attach makes the agent attach the interface, and writes the description of the device. After an
// error it undoes this.
func (c call) attach(ctx context.Context, addresses json.RawMessage) (types.Result, error) {
	reply, agentErr := c.ask(ctx, c.request(wire.Add, addresses))
	result, err := c.result(reply, agentErr)
	if err == nil {
		err = c.writeDeviceInfo(reply.DeviceInfo)
	}
	if err == nil {
		return result, nil
	}

	// the interface is attached, or may be
	if agentErr == nil || errors.Is(agentErr, wire.ErrNoReply) {
		err = undo(err, c.agentStep(wire.Del))
	}

	return nil, err
}

// result converts the result of ask: it returns the agent's result in the version of the
// configuration, or the error for the runtime.
func (c call) result(reply wire.Reply, err error) (types.Result, error) {
	if err != nil {
		return nil, c.cniError(err)
	}
	if reply.Result == nil {
		return nil, c.networkError(types.ErrInternal, "xpu-agent gave no result")
	}

	var result types.Result
	decoded, err := DecodeResult(reply.Result, c.config.CNIVersion)
	if err == nil {
		result, err = decoded.GetAsVersion(c.config.CNIVersion)
	}
	if err != nil {
		return nil, c.networkError(types.ErrInternal, "the result of xpu-agent: "+err.Error())
	}

	return result, nil
}

// agentStep returns the step that sends the agent a command without a result. If the agent does not
// answer, DEL and GC are spooled, even if the agent may have done them, because both can be
// repeated.
func (c call) agentStep(command wire.Command) step {
	return func(ctx context.Context) error {
		request := c.request(command, nil)
		_, err := c.ask(ctx, request)
		switch {
		case unanswered(err) && (command == wire.Del || command == wire.GC):
			path, spoolErr := c.spool(request)
			if spoolErr != nil {
				return c.networkError(types.ErrIOFailure, fmt.Sprintf("%v; %v", err, spoolErr))
			}
			_, _ = fmt.Fprintf(c.Stderr, "xpu-cni: %s is left for xpu-agent in %s: %v\n",
				command, path, err)
			return nil
		case unanswered(err) && command == wire.Status:
			return c.networkError(types.ErrPluginNotAvailable, err.Error())
		}

		return c.cniError(err)
	}
}

// request returns a request with the current time, so that a DEL that undoes an ADD is later than
// the attachment.
func (c call) request(command wire.Command, addresses json.RawMessage) wire.Request {
	request := wire.Request{
		Version: wire.Version, Command: command, Config: c.args.StdinData, IPAM: addresses,
		At: c.Now(),
	}

	if c.Asked != nil {
		request.Asked = c.Asked()
	}

	switch command {
	case wire.GC:
		request.Config = gcConfig(c.args.StdinData)
		return request
	case wire.Status:
		request.Config = nil
		return request
	case wire.Del:
		request.Config = nil // the interface is released, whatever the configuration is
	}

	request.ContainerID, request.NetNS = c.args.ContainerID, c.args.Netns
	request.IfName, request.Args = c.args.IfName, c.args.Args
	if command == wire.Del && len(request.Args) > maxDelArgs {
		request.Args = ""
	}

	return request
}

// maxDelArgs is how many bytes of CNI_ARGS a DEL may have. The agent only needs them to log the
// pod's name.
const maxDelArgs = 64 << 10

// gcConfig returns the fields of a network configuration that the agent needs for GC, because the
// whole configuration may be too large for a request. Data that is no configuration is returned
// unchanged, so that the agent reports the error.
func gcConfig(data []byte) json.RawMessage {
	var needed struct {
		CNIVersion string          `json:"cniVersion,omitempty"`
		Name       string          `json:"name"`
		Valid      json.RawMessage `json:"cni.dev/valid-attachments,omitempty"`
	}

	if json.Unmarshal(data, &needed) != nil {
		return data
	}

	text, err := json.Marshal(needed)
	if err != nil {
		return data
	}

	return text
}

// ask sends the agent a request. The error is the agent's error, as a [types.Error], or an error of
// [wire.Call].
func (c call) ask(ctx context.Context, request wire.Request) (wire.Reply, error) {
	reply, err := wire.Call(ctx, c.paths.Socket, request)
	if err != nil {
		return wire.Reply{}, err
	}
	if reply.Error != nil {
		reply.Error.Code = cmp.Or(reply.Error.Code, types.ErrInternal)
		return wire.Reply{}, reply.Error
	}
	return reply, nil
}

// cniError converts an error of ask to an error for the runtime.
func (c call) cniError(err error) error {
	switch {
	case err == nil || errors.As(err, new(*types.Error)):
		return err
	case unanswered(err):
		return c.networkError(types.ErrTryAgainLater, err.Error())
	}
	return c.networkError(types.ErrInvalidNetworkConfig, err.Error()) // it cannot be sent
}

// unanswered reports whether the agent did not answer, or answered in a version that the shim does
// not understand.
func unanswered(err error) bool {
	return errors.Is(err, wire.ErrAway) || errors.Is(err, wire.ErrNoReply) ||
		errors.Is(err, wire.ErrVersion)
}

func (c call) networkError(code uint, details string) error {
	return types.NewError(code, "network "+c.config.Name, details)
}

// step is a part of a command. It has [askTimeout].
type step func(context.Context) error

// runAll runs every step, whether or not the steps before succeeded. It returns the first error,
// and adds the others to its details.
func runAll(steps ...step) (failure error) {
	for _, next := range steps {
		ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
		err := next(ctx)
		cancel()
		if failure != nil && err != nil {
			err = withDetails(failure, err.Error())
		}
		failure = cmp.Or(err, failure)
	}
	return failure
}

// undo runs every step after a failure, and returns the failure.
func undo(failure error, steps ...step) error {
	if err := runAll(steps...); err != nil {
		return withDetails(failure, "and not all of it is undone: "+err.Error())
	}
	return failure
}

// withDetails adds text to the details of an error.
func withDetails(err error, more string) error {
	e, coded := errors.AsType[*types.Error](err)
	if !coded {
		e = types.NewError(types.ErrInternal, err.Error(), "")
	}
	return types.NewError(e.Code, e.Msg, strings.TrimPrefix(e.Details+"; "+more, "; "))
}
