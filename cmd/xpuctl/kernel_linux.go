// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/cardid"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// kernelState returns what the kernel shows of a host whose file system is at root. For other users
// than root, some fields are missing.
func kernelState(ctx context.Context, root string) (*nodestate.State, error) {
	sys := filepath.Join(root, "sys")
	if _, err := os.Stat(filepath.Join(sys, "bus")); err != nil {
		return nil, fmt.Errorf("--root %s: no sysfs there: %w", root, err)
	}

	options := inventory.Options{SysRoot: sys, Log: logr.Discard()}
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}

	if filepath.Clean(root) != "/" { // another host has other netdevs
		options.HostNetdevs = func() (hostuse.Netdevs, error) { return nil, nil }
		host = ""
	}

	functions := inventory.New(options)
	ctx, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- functions.Run(ctx) }()
	known := functions.Synced(ctx)
	stop()
	if err := <-done; err != nil {
		return nil, err
	}
	if !known {
		return nil, ctx.Err()
	}

	state := &nodestate.State{Node: host, Time: time.Now().UTC()}
	for _, f := range functions.Snapshot() {
		told := nodestate.NewFunction(f)
		if f.Kind == function.PF {
			card, _ := cardid.Read(sys, f.PF) // an error means that this user may not ask
			told.Serial, told.Board = card.Serial, card.Board
		}
		state.Functions = append(state.Functions, told)
	}

	return state, nil
}
