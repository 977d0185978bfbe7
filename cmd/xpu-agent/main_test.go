// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// parse parses flags as the program does.
func parse(t *testing.T, args ...string) (*options, error) {
	t.Helper()
	var o options
	flags := pflag.NewFlagSet("xpu-agent", pflag.ContinueOnError)
	o.addFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return &o, o.complete(flags.Changed("config-file"))
}

func TestCompleteRefuses(t *testing.T) {
	t.Setenv("NODE_NAME", "")
	for _, test := range []struct{ arg, want string }{
		{"--provision-timeout=0s", "--provision-timeout"},
		{"--hook-timeout=-1s", "--hook-timeout"},
		{"--hook-attempts=0", "--hook-attempts"},
		{"--provisioner=opi", "crd or direct"},
		{"--provisioner=crd", "--node-name"},
		{"--provisioner=direct --metrics-secure", "--metrics-secure"},
	} {
		if _, err := parse(t, strings.Fields(test.arg)...); err == nil ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one with %q", test.arg, err, test.want)
		}
	}

	if _, err := parse(t, "--node-name=n", "--direct-config=d"); err == nil ||
		!strings.Contains(err.Error(), "--direct-config") {
		t.Errorf("--direct-config without direct mode: error %v, want one", err)
	}
}

// TestCompleteDirect: a node needs nothing but the mode, and the flags of
// sriov-network-device-plugin are accepted.
func TestCompleteDirect(t *testing.T) {
	t.Setenv("NODE_NAME", "")
	o, err := parse(t, "--provisioner=direct", "--log-dir=sriovdp", "--log-level=10",
		"--logtostderr")
	if err != nil || o.NodeName == "" || o.Kubernetes != nil {
		t.Errorf("node %q, API server %v, %v; want the host's name and no API server", o.NodeName,
			o.Kubernetes, err)
	}

	missing := filepath.Join(t.TempDir(), "config.json")
	if o, err = parse(t, "--provisioner=direct", "--config-file="+missing); err != nil ||
		o.ConfigFile != missing {
		t.Errorf("configuration %q, %v; want the one that was named, though it is not there",
			o.ConfigFile, err)
	}
}
