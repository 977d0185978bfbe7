// SPDX-License-Identifier: Apache-2.0

// Command conformance shows what the conformance test of OPI agents misses. It puts one fault at a
// time into opi-bridge, runs the cases that should find it, and lists the faults that no case
// found. It does not change the files in the tree. It needs root, because each agent has a network
// namespace of its own.
//
//	go run ./test/conformance
//	go run ./test/conformance -run vlan
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/test/netns"
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

	b := bench{dir: dir}
	if err := b.build(ctx, "opi-conformance", ""); err != nil {
		return err
	}

	tried, found := 0, 0
	for _, f := range faults() {
		if !wanted.MatchString(f.name) {
			continue
		}
		begin := time.Now()
		cases, err := b.try(ctx, f)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		tried++
		switch {
		case err != nil:
			fmt.Printf("%s: not tried: %v\n", f.name, err)
		case len(cases) == 0:
			fmt.Printf("%s: not found by %s\n", f.name, f.cases)
		default:
			found++
			fmt.Printf("%s: found by %s in %s\n", f.name, strings.Join(cases, ", "),
				time.Since(begin).Round(100*time.Millisecond))
		}
	}

	fmt.Printf("%d of %d faults found\n", found, tried)
	if tried == 0 || 100*float64(found)/float64(tried) < least {
		return fmt.Errorf("less than %.0f %% are found", least)
	}
	return nil
}

// bench builds agents with faults and tests them.
type bench struct{ dir string }

// build builds a program, with an overlay if there is one.
func (b bench) build(ctx context.Context, program, overlay string) error {
	args := []string{"build", "-o", filepath.Join(b.dir, program)}
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	output, err := exec.CommandContext(ctx, "go", append(args, "./cmd/"+program)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("build: %w\n%s", err, output)
	}
	return nil
}

// apply returns the source with the fault in it.
func (f fault) apply(source string) (string, error) {
	for _, e := range f.edits {
		if n := strings.Count(source, e.old); n != 1 {
			return "", fmt.Errorf("%s has %q %d times, want once", f.file, e.old, n)
		}
		source = strings.Replace(source, e.old, e.new, 1)
	}
	return source, nil
}

// try returns the cases that find a fault.
func (b bench) try(ctx context.Context, f fault) ([]string, error) {
	source, err := os.ReadFile(f.file)
	if err != nil {
		return nil, err
	}
	changed, err := f.apply(string(source))
	if err != nil {
		return nil, err
	}

	path, err := filepath.Abs(f.file)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(b.dir, "changed.go")
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {path: file}})
	if err != nil {
		return nil, err
	}
	overlayFile := filepath.Join(b.dir, "overlay.json")
	if err := errors.Join(os.WriteFile(file, []byte(changed), 0o600),
		os.WriteFile(overlayFile, overlay, 0o600)); err != nil {
		return nil, err
	}

	if err := b.build(ctx, "opi-bridge", overlayFile); err != nil {
		return nil, err
	}
	return b.test(ctx, f)
}

// test runs the cases that should find a fault, and returns those that did.
func (b bench) test(ctx context.Context, f fault) (found []string, err error) {
	work, err := os.MkdirTemp(b.dir, "agent")
	if err != nil {
		return nil, err
	}
	n, err := netns.Make(filepath.Join(work, "netns"))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := makeUplink(n); err != nil {
		return nil, err
	}

	hooks, err := filepath.Abs("examples/opi-conformance")
	if err != nil {
		return nil, err
	}
	env := append(os.Environ(), "AGENT_DIR="+work, "OPI_BRIDGE="+filepath.Join(b.dir, "opi-bridge"),
		"AGENT_ARGS=--uplink=p0 --representor=conf01* --data-plane=bridge-per-network")
	defer endAgent(filepath.Join(work, "pid"))
	if output, err := in(ctx, n, env, hooks+"/start-agent"); err != nil {
		return nil, fmt.Errorf("start-agent: %w\n%s", err, output)
	}

	report := filepath.Join(work, "report.json")
	// The profile is claimed, so that it is a failure if the agent does not serve it.
	output, err := in(ctx, n, env, filepath.Join(b.dir, "opi-conformance"),
		"--endpoint", "127.0.0.1:50151", "--plaintext", "--prefix", "conf01", "--report", report,
		"--make-port", hooks+"/make-port", "--remove-port", hooks+"/remove-port",
		"--restart-agent", hooks+"/restart-agent", "--settle", "3s", "--scale", "24", "--vtep", "198.51.100.1/24",
		"--profiles", strings.SplitN(f.cases, "/", 2)[0], "--run", "^("+f.pattern()+")$")
	if exit := (*exec.ExitError)(nil); err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
		return nil, fmt.Errorf("opi-conformance: %w\n%s", err, output)
	}
	return failures(report)
}

// failures returns the cases of a report that failed.
func failures(file string) (names []string, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var report conformance.Report
	if err := json.Unmarshal(text, &report); err != nil {
		return nil, err
	}
	for _, c := range report.Cases {
		if c.Outcome == conformance.Failed || c.Outcome == conformance.Deviates {
			names = append(names, c.Name)
		}
	}
	return names, nil
}

// makeUplink makes a netdev p0 with a carrier and an address.
func makeUplink(n *netns.Namespace) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "p0"
	if err := n.Handle().LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "p1"}); err != nil {
		return err
	}
	for _, name := range []string{"lo", "p0", "p1"} {
		link, err := n.Handle().LinkByName(name)
		if err == nil {
			err = n.Handle().LinkSetUp(link)
		}
		if err != nil {
			return err
		}
	}

	uplink, err := n.Handle().LinkByName("p0")
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr("198.51.100.1/24")
	if err != nil {
		return err
	}
	return n.Handle().AddrAdd(uplink, address)
}

// in runs a command in a network namespace and returns its output.
func in(ctx context.Context, n *netns.Namespace, env []string, argv ...string) ([]byte, error) {
	command := exec.CommandContext(ctx, argv[0], argv[1:]...)
	command.Env, command.WaitDelay = env, time.Second
	var output []byte
	err := n.Do(func() (err error) {
		output, err = command.CombinedOutput()
		return err
	})
	return output, err
}

// endAgent ends the agent whose process number is in a file.
func endAgent(file string) {
	text, err := os.ReadFile(file)
	if err != nil {
		return
	}
	if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// fault is a mistake in opi-bridge.
type fault struct {
	name  string
	file  string
	edits []edit
	cases string // regexp of the names of cases that find it
}

// pattern returns the regexp of the cases. Those of VRFs are left out, because the kernel may have
// none.
func (f fault) pattern() string {
	return strings.ReplaceAll(f.cases, ".*", "(logical-bridge|bridge-port)")
}

// edit replaces a text that a file has once.
type edit struct{ old, new string }

// faults are all faults.
func faults() []fault {
	return slices.Concat(collectionFaults(), resourceFaults(), networkFaults(), portFaults(),
		otherFaults())
}
