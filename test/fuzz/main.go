// SPDX-License-Identifier: Apache-2.0

// Command fuzz gives every fuzz target of the repository some time, one after the other. It ends
// with the first that fails, and says where the failing input is.
//
//	go run ./test/fuzz -time 30s
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// options are the flags.
type options struct {
	time     time.Duration
	run      string
	parallel int
}

func main() {
	var o options
	flag.DurationVar(&o.time, "time", 30*time.Second,
		"how long each target is fuzzed, without what building it takes")
	flag.StringVar(&o.run, "run", "", "only targets whose names match, a regular expression")
	flag.IntVar(&o.parallel, "parallel", 0,
		"how many inputs are tried at a time; 0 is as many as there are CPUs")

	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), "Usage: fuzz [flags] [DIRECTORY...]\n\n"+
			"Fuzzes the targets below the directories; if none is named, those of all modules.\n\n"+
			"  fuzz -time 5m ./pkg/kernel         # some packages, for longer\n"+
			"  fuzz -run '^FuzzParse' -parallel 1 # some targets, while the machine does "+
			"something else\n\n")
		flag.PrintDefaults()
	}

	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()

	if err := run(ctx, o, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
		os.Exit(1)
	}
}

// outcome is what became of a target.
type outcome struct {
	target
	execs string // inputs that were tried
	took  time.Duration
}

func run(ctx context.Context, o options, directories []string) error {
	if o.time <= 0 {
		return fmt.Errorf("-time is %s: must be more than 0, such as 30s", o.time)
	}

	pattern, err := regexp.Compile(o.run)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}

	if len(directories) == 0 {
		directories = []string{"."}
	}

	all, err := targets(directories)
	if err != nil {
		return err
	}

	all = slices.DeleteFunc(all, func(t target) bool { return !pattern.MatchString(t.name) })
	if len(all) == 0 {
		return fmt.Errorf("no fuzz target that matches %q below %s",
			o.run, strings.Join(directories, ", "))
	}

	var done []outcome
	for i, t := range all {
		fmt.Fprintf(os.Stderr, "%d of %d: %s\n", i+1, len(all), t)
		var result outcome
		if result, err = t.fuzz(ctx, o); err != nil {
			break
		}
		done = append(done, result)
	}

	return errors.Join(list(done), err)
}

// fuzz gives the target its time. The error says which input fails.
func (t target) fuzz(ctx context.Context, o options) (outcome, error) {
	// Inputs that reach new code are made shorter first, each for a minute unless it is said, which
	// is more than a target has.
	args := []string{
		"test", "-run=^$", "-fuzz=^" + t.name + "$",
		"-fuzztime=" + o.time.String(), "-fuzzminimizetime=1s",
	}

	if o.parallel > 0 {
		args = append(args, fmt.Sprintf("-parallel=%d", o.parallel))
	}

	cmd := exec.CommandContext(ctx, "go", append(args, ".")...)
	cmd.Dir = t.dir
	// Packages with other tests than fuzz targets would start API servers, each worker its own.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "KUBEBUILDER_ASSETS=")
	})
	// The go command does not end the test that it runs: both are interrupted.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second

	begin := time.Now()
	output, err := cmd.CombinedOutput()
	result := outcome{target: t, execs: lastOf(execs, output), took: time.Since(begin)}
	switch {
	case ctx.Err() != nil:
		return result, fmt.Errorf("%s: interrupted", t)
	case err != nil && !onlyLate.Match(output):
		return result, t.failure(output, err)
	case result.execs == "" && bytes.Contains(output, []byte("gathering baseline coverage")):
		return result, fmt.Errorf("%s: trying the inputs that are known took all of %s, "+
			"and nothing was fuzzed; give it longer", t, o.time)
	case result.execs == "":
		return result, fmt.Errorf("%s: go test says nothing of fuzzing:\n%s", t, output)
	}

	return result, nil
}

// What go test says.
var (
	execs = regexp.MustCompile(`execs: ([0-9]+)`)
	input = regexp.MustCompile(`Failing input written to (\S+)`)
	seed  = regexp.MustCompile(`testing seed corpus entry: (\S+)|--- FAIL: (Fuzz\w+/\S+)`)
	// onlyLate is a failure without an input: up to Go 1.26 the end of the time can be taken for
	// one (go.dev/issue/75804).
	onlyLate = regexp.MustCompile(
		`(?m)^--- FAIL: Fuzz\w+ \(.*\)\n    context deadline exceeded\nFAIL$`)
)

// lastOf is what the expression's groups match last; "" if it never matches.
func lastOf(expression *regexp.Regexp, output []byte) string {
	all := expression.FindAllSubmatch(output, -1)
	if len(all) == 0 {
		return ""
	}

	last := all[len(all)-1]
	for _, group := range last[1:] {
		if len(group) > 0 {
			return string(group)
		}
	}

	return ""
}

// failure says which input fails, and how it is tried again.
func (t target) failure(output []byte, err error) error {
	again := "cd " + t.dir + " && go test -run='^" + t.name + "$"
	if file := lastOf(input, output); file != "" {
		return fmt.Errorf("%s fails on the input in %s; keep it beside the fix, as a seed. "+
			"Again: %s/%s$'\n%s", t, filepath.Join(t.dir, file), again, filepath.Base(file), output)
	}
	if entry := lastOf(seed, output); entry != "" {
		return fmt.Errorf("%s fails on %s, one of its seeds. Again: %s'\n%s",
			t, entry, again, output)
	}

	return fmt.Errorf("%s: %w, without an input that fails:\n%s", t, err, output)
}

// list prints what was fuzzed.
func list(done []outcome) error {
	if len(done) == 0 {
		return nil
	}

	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "package\ttarget\tinputs\ttook")

	for _, d := range done {
		fmt.Fprintf(out, "%s\t%s\t%s\t%s\n", d.dir, d.name, d.execs, d.took.Round(time.Second))
	}
	return out.Flush()
}
