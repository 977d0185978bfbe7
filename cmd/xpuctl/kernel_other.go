// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"context"
	"errors"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// errNoKernel is returned where there is no kernel to ask.
var errNoKernel = errors.New("this host does not run Linux: name a node of the cluster with --node")

func kernelState(context.Context, string) (*nodestate.State, error) { return nil, errNoKernel }

func verifiedKernelState(context.Context) (*nodestate.State, error) { return nil, errNoKernel }
