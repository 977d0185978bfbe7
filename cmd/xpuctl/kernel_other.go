// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"context"
	"errors"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

func kernelState(context.Context, string) (*nodestate.State, error) {
	return nil, errors.New("this host does not run Linux: name a node of the cluster with --node")
}
