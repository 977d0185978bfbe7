// Qemutest runs the project's tests that need real SR-IOV, or more than the machine's own kernel has, in guests under
// QEMU, and ends with their exit status.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/qemu/debian"
	"github.com/opiproject/xpu-device-plugin/test/qemu/machine"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	status, err := run(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "qemutest:", err)
		status = 1
	}
	os.Exit(status)
}

// options are those of the command line.
type options struct {
	cache, output, mirror, guest, only, run string
	shell, verbose                          bool
	cards, vfs                              int
	limit                                   time.Duration
}

func parse() (o options, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return options{}, err
	}
	flag.StringVar(&o.cache, "cache", filepath.Join(cache, "xpu-device-plugin/qemu"), "directory of unpacked packages")
	flag.StringVar(&o.output, "output", "bin/qemu", "directory of logs and test binaries")
	flag.StringVar(&o.mirror, "mirror", "", "URL of a Debian archive; empty: the one that this machine's packages come from")
	flag.StringVar(&o.guest, "guest", "", "run this guest only, by name")
	flag.StringVar(&o.only, "only", "", "run these suites only, by name, with commas between")
	flag.StringVar(&o.run, "run", "", "run these tests only, as go test -run; needs -only")
	flag.BoolVar(&o.shell, "shell", false, "instead of running the tests, give a shell in the guest that has them")
	flag.BoolVar(&o.verbose, "v", false, "show all that the tests write")
	flag.IntVar(&o.cards, "cards", 2, "igb cards of the guest")
	flag.IntVar(&o.vfs, "vfs", 3, "VFs made at each PF, at most 7")
	flag.DurationVar(&o.limit, "limit", 5*time.Minute, "time that a guest may take; not for a shell")
	flag.Parse()
	if flag.NArg() > 0 {
		return options{}, fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}
	if o.run != "" && o.only == "" {
		return options{}, errors.New("-run needs -only, with the name of a suite")
	}
	if o.shell && o.guest == "" {
		o.guest = "igb"
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
	fmt.Printf("unpacking QEMU, a kernel and a compiler into %s, the first time\n", o.cache)
	release := debian.Release{
		Mirror: o.mirror, Suite: "trixie", Keyring: "/usr/share/keyrings/debian-archive-keyring.gpg",
	}
	root, err := release.Unpack(ctx, o.cache, packages...)
	if err != nil {
		return 0, err
	}
	for _, g := range selected {
		this, err := runGuest(ctx, o, root, g)
		if err != nil {
			return 0, fmt.Errorf("guest %s: %w", g.name, err)
		}
		status = max(status, this)
	}
	return status, nil
}

func runGuest(ctx context.Context, o options, root debian.Root, g guest) (status int, err error) {
	o.output = filepath.Join(o.output, g.name)
	if err := os.MkdirAll(o.output, 0o755); err != nil {
		return 0, err
	}
	fmt.Printf("building %s for guest %s\n", strings.Join(names(g.suites), ", "), g.name)
	file := filepath.Join(o.output, "initramfs.cpio")
	if err := makeImage(ctx, o, root, g, file); err != nil {
		return 0, err
	}
	m := machine.Machine{
		Root: root, Initramfs: file, Cards: o.cards, MemoryMiB: 768,
		Console: filepath.Join(o.output, "console.log"), Boot: time.Minute, Limit: o.limit,
	}
	if o.shell {
		fmt.Println("Tests are in /root. Leave by exit or, at any time, by ctrl-a x.")
		m.Console, m.Limit = "", 0
	}
	return boot(ctx, m, o, g)
}

// boot runs the guest, a second time if it did not come up: emulated machines were seen to lose a timer at boot.
func boot(ctx context.Context, m machine.Machine, o options, g guest) (status int, err error) {
	for attempt := 0; ; attempt++ {
		log, err := os.Create(filepath.Join(o.output, "tests.log"))
		if err != nil {
			return 0, err
		}
		r := newReport(os.Stdout, log, g.suites, o.verbose)
		begin := time.Now()
		status, err = m.Run(ctx, r.line)
		if closed := log.Close(); err == nil {
			err = closed
		}
		if errors.Is(err, machine.ErrNoBoot) && attempt == 0 {
			fmt.Println(err)
			fmt.Println("trying once more")
			continue
		}
		if err != nil || o.shell {
			return status, err
		}
		fmt.Printf("guest %s ended with status %d after %.1f s; logs are in %s\n",
			g.name, status, time.Since(begin).Seconds(), o.output)
		if wrong := r.wrong(); len(wrong) > 0 {
			return max(status, 1), errors.New(strings.Join(wrong, "; "))
		}
		return status, nil
	}
}
