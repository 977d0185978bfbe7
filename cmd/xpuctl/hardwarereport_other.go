// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

var errNotLinux = errors.New("this host does not run Linux: run it on the node that has the card")

func (o *reportOptions) state(context.Context) (*nodestate.State, error) { return nil, errNotLinux }

func inUseOnHost(string) string { return errNotLinux.Error() }

func (o *reportOptions) probe(
	*cobra.Command, *nodestate.State, []nodestate.Function,
) (personality.Personality, error) {
	return personality.Personality{}, errNotLinux
}
