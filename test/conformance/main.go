// SPDX-License-Identifier: Apache-2.0

// Command conformance shows what the conformance test of OPI agents misses. It puts faults into
// opi-bridge, runs for each one the cases that should find it, and lists the faults that no case
// found. It does not change the files in the tree. It needs root, because each agent has a network
// namespace of its own. The faults of TRUNK ports, VRFs and SVIs are left out, because kernels may
// lack what they need: they are tried in the guest simnic (test/qemu).
//
//	go run ./test/conformance
//	go run ./test/conformance -run vlan
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"

	"github.com/opiproject/xpu-device-plugin/test/conformance/faults"
	"github.com/opiproject/xpu-device-plugin/test/conformance/trial"
)

func main() {
	only := flag.String("run", "", "only faults whose name matches")
	least := flag.Float64("least", 98, "fail if less than this share is found, in percent")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := run(ctx, *only, *least); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, only string, least float64) error {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "conformance")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	all := slices.DeleteFunc(faults.All(), func(f faults.Fault) bool {
		return f.IsVLANAware() || !wanted.MatchString(f.Name)
	})
	b := bench{dir: dir}
	if err := b.seed(ctx, all); err != nil {
		return err
	}
	found, err := trial.All(ctx, os.Stdout, b.program, all)
	if err != nil {
		return err
	}

	fmt.Printf("%d of %d faults found\n", found, len(all))
	return trial.Check(found, len(all), least)
}

// bench builds agents with faults.
type bench struct {
	dir    string
	seeded string         // the program that has any of the faults
	alone  []faults.Fault // the faults that it cannot have
}

// seed builds the agent that has any of the faults.
func (b *bench) seed(ctx context.Context, all []faults.Fault) error {
	overlay, alone, err := faults.Seed(".", b.dir, all)
	if err != nil {
		return err
	}
	b.alone = alone
	b.seeded, err = b.build(ctx, "opi-bridge", overlay)
	return err
}

// program returns an agent that has a fault.
func (b *bench) program(ctx context.Context, f faults.Fault) (string, error) {
	if !slices.ContainsFunc(b.alone, func(a faults.Fault) bool { return a.Name == f.Name }) {
		return b.seeded, nil
	}
	overlay, err := faults.Alone(".", b.dir, f)
	if err != nil {
		return "", err
	}
	return b.build(ctx, "opi-bridge-alone", overlay)
}

// build builds opi-bridge with an overlay, as a program of this name.
func (b *bench) build(ctx context.Context, name, overlay string) (string, error) {
	program := filepath.Join(b.dir, name)
	output, err := exec.CommandContext(ctx, "go", "build", "-o", program, "-overlay", overlay,
		"./cmd/opi-bridge").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build: %w\n%s", err, output)
	}
	return program, nil
}
