// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
)

// killAfter is how long an IPAM plugin has from SIGTERM to SIGKILL. A plugin that is killed while
// it writes its files may leave an address that no interface has.
const killAfter = 5 * time.Second

// requestAddresses returns the IPAM plugin's result in the version of the configuration; nil
// without a plugin. After an error the plugin may have reserved addresses.
func (c call) requestAddresses(ctx context.Context) (json.RawMessage, error) {
	if c.config.IPAM.IsEmpty() {
		return nil, nil
	}

	output, err := c.runIPAM(ctx, "ADD")
	if err != nil {
		return nil, err
	}

	var converted types.Result
	result, err := DecodeResult(output, c.config.CNIVersion)
	switch {
	case err != nil:
	case len(result.IPs) == 0:
		err = errors.New("there is no address in it; without a need for addresses, leave ipam out")
	default:
		converted, err = result.GetAsVersion(c.config.CNIVersion)
	}

	if err != nil {
		return nil, c.ipamError(types.ErrInvalidNetworkConfig, "its result: "+err.Error())
	}

	return json.Marshal(converted)
}

// ipamStep returns the step that runs a command of the IPAM plugin without a result. Without a
// plugin it does nothing.
func (c call) ipamStep(command string) step {
	return func(ctx context.Context) error {
		if c.config.IPAM.IsEmpty() {
			return nil
		}
		_, err := c.runIPAM(ctx, command)
		return err
	}
}

// runIPAM executes the IPAM plugin according to section 4 of the CNI specification, and returns its
// output. The error is a [types.Error], with the plugin's code if it has one. A result that is too
// long for a request to the agent is an error.
//
// Package invoke of containernetworking/cni is not used: it links OpenTelemetry and net/http, a
// third of the shim's size, and waits without limit for a plugin whose children keep its output
// open.
func (c call) runIPAM(ctx context.Context, command string) ([]byte, error) {
	path, err := c.findIPAM()
	if err != nil {
		return nil, err
	}

	stdout, stderr := output{most: wire.MaxMessage}, output{most: maxDetails}
	plugin := exec.CommandContext(ctx, path)
	plugin.Env = append(os.Environ(),
		"CNI_COMMAND="+command,
		"CNI_CONTAINERID="+c.args.ContainerID,
		"CNI_NETNS="+c.args.Netns,
		"CNI_IFNAME="+c.args.IfName,
		"CNI_ARGS="+c.args.Args,
		"CNI_PATH="+c.args.Path,
	)

	plugin.Stdin = bytes.NewReader(c.args.StdinData)
	plugin.Stdout, plugin.Stderr = &stdout, io.MultiWriter(&stderr, c.Stderr)
	plugin.Cancel = func() error { return plugin.Process.Signal(syscall.SIGTERM) }
	plugin.WaitDelay = killAfter
	err = plugin.Run()
	if err == nil && stdout.cut && command == "ADD" {
		return nil, c.ipamError(types.ErrInvalidNetworkConfig,
			fmt.Sprintf("its result: has more than %d bytes", stdout.most))
	}
	if err == nil {
		return stdout.kept, nil
	}
	if ctx.Err() != nil {
		return nil, c.ipamError(types.ErrTryAgainLater, command+" took too long")
	}

	var printed types.Error
	if json.Unmarshal(stdout.kept, &printed) == nil && printed.Msg != "" {
		return nil, c.ipamError(printed.Code, printed.Error())
	}

	return nil, c.ipamError(types.ErrInternal,
		fmt.Sprintf("%v: %s", err, bytes.TrimSpace(stderr.kept)))
}

// output keeps the beginning of what a plugin writes. It takes the rest too, so that the plugin
// does not wait.
type output struct {
	most int // bytes
	kept []byte
	cut  bool // the plugin wrote more
}

// Write never fails.
func (o *output) Write(p []byte) (int, error) {
	room := o.most - len(o.kept)
	o.cut = o.cut || len(p) > room
	o.kept = append(o.kept, p[:min(len(p), room)]...)
	return len(p), nil
}

// findIPAM looks for the plugin in the directories of CNI_PATH.
func (c call) findIPAM() (string, error) {
	for _, dir := range filepath.SplitList(c.args.Path) {
		path := filepath.Join(dir, c.config.IPAM.Type)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", c.ipamError(types.ErrInvalidNetworkConfig,
		fmt.Sprintf("ipam.type: there is no such file in CNI_PATH (%s)", c.args.Path))
}

func (c call) ipamError(code uint, details string) error {
	return types.NewError(cmp.Or(code, types.ErrInternal), "IPAM plugin "+c.config.IPAM.Type,
		bounded(details))
}
