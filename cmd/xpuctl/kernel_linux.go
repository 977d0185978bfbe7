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
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory/witness"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// kernelState returns what the kernel shows of a host whose file system is at root. For other users
// than root, some fields are missing.
func kernelState(ctx context.Context, root string) (*nodestate.State, error) {
	functions, err := kernelFunctions(ctx, root)
	if err != nil {
		return nil, err
	}

	host := ""
	if filepath.Clean(root) == "/" {
		if host, err = os.Hostname(); err != nil {
			return nil, err
		}
	}

	state := &nodestate.State{Node: host, Time: time.Now().UTC()}
	for _, f := range functions {
		told := nodestate.NewFunction(f)
		if f.Kind == function.PF {
			// an error means that this user may not ask
			card, _ := cardid.Read(filepath.Join(root, "sys"), f.PF)
			told.Serial, told.Board = card.Serial, card.Board
		}
		state.Functions = append(state.Functions, told)
	}

	return state, nil
}

// verifiedKernelState compares what the kernel shows of this host with what sriovnet says, and
// returns a state with the result and without Functions.
func verifiedKernelState(ctx context.Context) (*nodestate.State, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}

	conn, err := devlink.Dial("")
	if err != nil {
		return nil, err
	}
	defer conn.Close()

	verification := witness.Verify(ctx, witness.Source{
		SysRoot: "/sys", Ports: conn.Ports,
		Functions: func(ctx context.Context) ([]function.Function, error) {
			return kernelFunctions(ctx, "/")
		},
	})
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}

	return &nodestate.State{Node: host, Time: time.Now().UTC(), Verification: &verification}, nil
}

// kernelFunctions returns the Functions of a host whose file system is at root.
func kernelFunctions(ctx context.Context, root string) ([]function.Function, error) {
	sys := filepath.Join(root, "sys")
	if _, err := os.Stat(filepath.Join(sys, "bus")); err != nil {
		return nil, fmt.Errorf("--root %s: no sysfs there: %w", root, err)
	}

	options := inventory.Options{SysRoot: sys, WaitForCards: true, Log: logr.Discard()}
	if filepath.Clean(root) != "/" { // another host has other netdevs
		options.HostNetdevs = func() (hostuse.Netdevs, error) { return nil, nil }
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

	return functions.Snapshot(), nil
}
