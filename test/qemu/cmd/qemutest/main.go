// SPDX-License-Identifier: Apache-2.0

// Qemutest runs the project's tests that need real SR-IOV, or more than the machine's own kernel
// has, in guests under QEMU, and ends with the tests' exit status.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/qemu/debian"
	"github.com/opiproject/xpu-device-plugin/test/qemu/machine"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if len(os.Args) == 3 && os.Args[1] == pipe {
		if err := runPipe(ctx, os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "qemutest pipe:", err)
			os.Exit(1)
		}
		return
	}

	status, err := run(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "qemutest:", err)
		status = 1
	}

	os.Exit(status)
}

// options are the flags of the command line.
type options struct {
	cache, output, mirror, guest, only, run string
	shell, verbose, full                    bool
	personalities                           string // names, separated by commas
	cards, vfs, lives                       int
	seed                                    uint64
	soak                                    time.Duration
}

func parse() (o options, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return options{}, err
	}

	// not the default flag set, to which libraries add flags
	flags := flag.NewFlagSet("qemutest", flag.ExitOnError)
	flags.StringVar(&o.cache, "cache", filepath.Join(cache, "xpu-device-plugin/qemu"),
		"directory of unpacked packages")
	flags.StringVar(&o.output, "output", "bin/qemu", "directory of logs and test binaries")
	flags.StringVar(&o.mirror, "mirror", "",
		"URL of a Debian archive; empty: the one that this machine's packages come from")
	flags.StringVar(&o.guest, "guest", "", "run this guest only, by name")
	flags.StringVar(&o.only, "only", "", "run these suites only, by name, with commas between")
	flags.StringVar(&o.run, "run", "", "run these tests only, as go test -run; needs -only")
	flags.BoolVar(&o.full, "full", false, "run the guests and suites that take long as well")
	flags.BoolVar(&o.shell, "shell", false,
		"instead of running the tests, give a shell in the guest that has them")
	flags.BoolVar(&o.verbose, "v", false, "show all that the tests write")
	flags.IntVar(&o.cards, "cards", 2, "igb cards of the guest")
	flags.IntVar(&o.vfs, "vfs", 3, "VFs made at each PF, at most 7")
	flags.StringVar(&o.personalities, "personalities",
		"", `drivers that simnic plays: "third", another third of them each `+
			`day; "all"; or names, with commas between. Empty: a third, all with -full`)
	flags.IntVar(&o.lives, "lives",
		0, "pods of each test that lets pods live and die; 0 is 40, and 400 with -full")
	flags.Uint64Var(&o.seed, "seed",
		0, "of what tests do at random that log one; 0 is another one each time")
	flags.DurationVar(&o.soak, "soak", 0,
		"time that each test takes which soaks; 0 is some seconds")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return options{}, err
	}
	if flags.NArg() > 0 {
		return options{}, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.run != "" && o.only == "" {
		return options{}, errors.New("-run needs -only, with the name of a suite")
	}

	if o.shell && o.guest == "" {
		o.guest = "igb"
	}

	if o.lives == 0 {
		o.lives = ordinaryLives
		if o.full {
			o.lives = fullLives
		}
	}

	if o.personalities, err = played(o.personalities, o.full, time.Now()); err != nil {
		return options{}, err
	}

	o.output, err = filepath.Abs(o.output)
	return o, err
}

func run(ctx context.Context) (status int, err error) {
	o, err := parse()
	if err != nil {
		return 0, err
	}

	selected, err := selectGuests(o)
	if err != nil {
		return 0, err
	}

	if o.mirror == "" {
		if o.mirror, err = debian.MachineMirror(ctx); err != nil {
			return 0, err
		}
	}

	if slices.ContainsFunc(selected, guest.plays) {
		fmt.Printf("simnic plays %s\n", o.personalities)
	}

	fmt.Printf("unpacking QEMU, a kernel and a compiler into %s, the first time\n", o.cache)
	root, err := o.release().Unpack(ctx, o.cache, packages...)
	if err != nil {
		return 0, err
	}

	return runGuests(ctx, o, root, selected)
}

// release returns the source of all Debian packages.
func (o options) release() debian.Release {
	return debian.Release{
		Mirror: o.mirror, Suite: "trixie",
		Keyring: "/usr/share/keyrings/debian-archive-keyring.gpg",
	}
}

// runGuests prepares one guest after the other, because builds use all processors. It then runs the
// guests at the same time, as far as each has its own processor of the machine.
func runGuests(
	ctx context.Context, o options, root debian.Root, selected []guest,
) (status int, err error) {
	var runs []*guestRun
	defer func() {
		for _, r := range runs {
			err = errors.Join(err, r.cluster.Stop())
		}
	}()

	out := &lockedWriter{to: os.Stdout}
	for _, g := range selected {
		r := &guestRun{options: o, guest: g, out: os.Stdout}
		runs = append(runs, r)
		if len(selected) > 1 {
			r.out = &linePrefixer{to: out, prefix: g.name + ": "}
		}
		if err := r.prepare(ctx, root); err != nil {
			return 0, fmt.Errorf("guest %s: %w", g.name, err)
		}
	}

	var running errgroup.Group
	running.SetLimit(runtime.NumCPU())

	for _, r := range runs {
		running.Go(func() error {
			r.status, r.err = r.boot(ctx)
			return nil
		})
	}

	_ = running.Wait()
	var total counts
	var all []string
	for _, r := range runs {
		status, all = max(status, r.status), append(all, r.guest.name)
		total.passed, total.skipped = total.passed+r.total.passed, total.skipped+r.total.skipped
		if r.err != nil {
			err = errors.Join(err, fmt.Errorf("guest %s: %w", r.guest.name, r.err))
		}
	}

	// Reasons are repeated here, because the output of other suites and guests is in between.
	for _, r := range runs {
		for _, reason := range r.reasons {
			fmt.Printf("%s: %s\n", r.guest.name, reason)
		}
	}

	if !o.shell {
		fmt.Printf("%s: %d tests passed, %d were skipped\n", strings.Join(all, ", "), total.passed,
			total.skipped)
	}

	return status, err
}

// guestRun is the run of a guest, from its preparation to its end.
type guestRun struct {
	options
	guest   guest
	out     io.Writer
	cluster *kubeapitest.Cluster // nil if the guest needs no API server
	machine machine.Machine
	// The results of the run.
	status  int
	total   counts
	reasons []string // why suites failed
	err     error
}

// prepare starts the guest's API server and makes its file system.
func (r *guestRun) prepare(ctx context.Context, root debian.Root) error {
	r.output = filepath.Join(r.output, r.guest.name)
	if err := os.MkdirAll(r.output, 0o755); err != nil {
		return err
	}

	image := filepath.Join(r.output, "initramfs.cpio")
	r.machine = machine.Machine{
		Root: root, Initramfs: image, Cards: r.guest.cards, MemoryMiB: 1536,
		Processors: cmp.Or(r.guest.processors, 1),
		Console:    filepath.Join(r.output, "console.log"), Boot: 2 * time.Minute,
		Silence: r.guest.silence(),
	}

	fmt.Fprintf(r.out, "building %s\n", strings.Join(names(r.guest.suites), ", "))
	var preparing errgroup.Group
	preparing.Go(func() error { return build(ctx, r.options, r.guest) })

	if r.guest.needAPI() {
		preparing.Go(func() (err error) {
			r.cluster, err = startAPIServer()
			return err
		})
	}

	err := preparing.Wait()
	if err == nil && r.cluster != nil {
		r.machine.Forward, err = forward(r.cluster.Admin())
	}
	if err != nil {
		return err
	}

	if r.shell {
		fmt.Fprintln(r.out, "Tests are in /root. Leave by exit or, at any time, by ctrl-a x.")
		r.machine.Console = ""
	}

	return makeImage(ctx, r.options, root, r.guest, r.cluster, image)
}

// boot runs the guest, and tries again if the guest did not start, because emulated machines were
// seen to lose a timer at boot.
func (r *guestRun) boot(ctx context.Context) (status int, err error) {
	for attempt := 0; ; attempt++ {
		log, err := os.Create(filepath.Join(r.output, "tests.log"))
		if err != nil {
			return 0, err
		}

		told := newReport(r.out, log, r.guest.suites, r.verbose)
		begin := time.Now()
		status, err = r.machine.Run(ctx, told.line)
		if closed := log.Close(); err == nil {
			err = closed
		}

		if errors.Is(err, machine.ErrNoBoot) && attempt == 0 {
			fmt.Fprintln(r.out, err)
			fmt.Fprintln(r.out, "trying once more")
			continue
		}

		r.total, r.reasons = told.total, told.reasons
		if err != nil || r.shell {
			return status, err
		}

		fmt.Fprintf(r.out,
			"guest %s ended with status %d after %.1f s, %d tests passed; logs are in %s\n",
			r.guest.name, status, time.Since(begin).Seconds(), told.total.passed, r.output)
		if wrong := told.wrong(); len(wrong) > 0 {
			return max(status, 1), errors.New(strings.Join(wrong, "; "))
		}

		return status, nil
	}
}
