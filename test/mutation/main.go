// SPDX-License-Identifier: Apache-2.0

// Command mutation shows what the tests of a package miss. It changes one place of the package's
// code at a time, runs the package's tests and then the tests of the packages that import it, and
// lists the changes that no test noticed. It does not change the files in the tree. The seed alone
// selects the changes, so that two runs are comparable. Programs that killed tests leave behind are
// ended.
//
//	go run ./test/mutation ./pkg/node/lifecycle ./pkg/node/journal
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// options are the flags.
type options struct {
	seed    uint64
	most    int
	timeout time.Duration
	least   float64
	run     string
	alone   bool
}

func main() {
	var o options
	flag.Uint64Var(&o.seed, "seed", 1, "which mutants are taken")
	flag.IntVar(&o.most, "most", 60, "how many mutants of a package are tried, at most")
	flag.DurationVar(&o.timeout, "timeout", 2*time.Minute,
		"how long the tests may take with one mutant; longer counts as noticed")
	flag.Float64Var(&o.least, "least", 0, "fail if a package's score is below this, in percent")
	flag.StringVar(&o.run, "run", "", "only tests that match, as with go test")

	flag.BoolVar(&o.alone, "alone", false,
		"run only the package's own tests, and not the tests of the packages that import it")

	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), "Usage: mutation [flags] PACKAGE...\n\n"+
			"Changes one thing of each package at a time and lists what its tests do not "+
			"notice.\n\n"+
			"  mutation ./pkg/node/journal                 # the table and the survivors of one "+
			"package\n"+
			"  mutation -most 200 -seed 7 ./pkg/node/hooks # others, and more of them\n\n")
		flag.PrintDefaults()
	}

	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(context.Background(), o, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "mutation:", err)
		os.Exit(1)
	}
}

// score has the numbers of a package's mutants by outcome.
type score struct {
	pkg           string
	tried, killed int
	survivors     []string
	took          time.Duration
}

func (s score) percent() float64 { return 100 * float64(s.killed) / float64(max(s.tried, 1)) }

func run(ctx context.Context, o options, packages []string) error {
	if err := adoptOrphans(); err != nil {
		return err
	}

	var scores []score
	for _, pkg := range packages {
		s, err := try(ctx, o, pkg)
		if err != nil {
			return fmt.Errorf("%s: %w", pkg, err)
		}
		scores = append(scores, s)
	}

	return report(o, scores)
}

// try runs a package's tests with one mutant after the other.
func try(ctx context.Context, o options, pkg string) (score, error) {
	s, begin := score{pkg: pkg}, time.Now()
	files, err := sources(pkg)
	if err != nil {
		return s, err
	}

	var all []mutant
	for _, file := range files {
		found, err := mutants(file)
		if err != nil {
			return s, err
		}
		all = append(all, found...)
	}

	dir, err := os.MkdirTemp("", "mutation")
	if err != nil {
		return s, err
	}
	defer os.RemoveAll(dir)

	if out, err := test(ctx, o, pkg, ""); err != nil {
		return s, fmt.Errorf("its tests fail as it is: %w\n%s", err, out)
	}

	packages := []string{pkg}
	if !o.alone {
		importers, err := importersOf(ctx, pkg)
		if err != nil {
			return s, err
		}
		packages = append(packages, importers...)
	}

	for _, m := range choose(all, o, pkg) {
		outcome, err := m.test(ctx, o, packages, dir)
		if err != nil {
			return s, err
		}
		if outcome == invalid {
			continue
		}

		s.tried++
		if outcome == killed {
			s.killed++
		} else {
			s.survivors = append(s.survivors, m.String())
		}

		fmt.Fprintf(os.Stderr, "\r%s: %d tried, %d survive ", pkg, s.tried, len(s.survivors))
	}

	fmt.Fprintln(os.Stderr)
	s.took = time.Since(begin)
	return s, nil
}

// sources returns the Go files of the package, without tests and generated files.
func sources(pkg string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(pkg, "*.go"))
	if err != nil {
		return nil, err
	}

	files = slices.DeleteFunc(files, func(f string) bool {
		return strings.HasSuffix(f, "_test.go") || strings.Contains(f, "zz_generated")
	})
	if len(files) == 0 {
		return nil, errors.New("has no Go files")
	}

	return files, nil
}

// choose selects some of the mutants. The same seed selects the same mutants.
func choose(all []mutant, o options, pkg string) []mutant {
	h := fnv.New64a()
	h.Write([]byte(pkg))
	random := rand.New(rand.NewPCG(o.seed, h.Sum64()))
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:min(o.most, len(all))]
}

type outcome int

const (
	survived outcome = iota
	killed
	invalid // the mutant does not compile
)

// test runs tests with the mutant in place of its file. The first package is the mutant's own.
func (m mutant) test(
	ctx context.Context, o options, packages []string, dir string,
) (outcome, error) {
	changed := filepath.Join(dir, "mutant.go")
	if err := os.WriteFile(changed, m.source(), 0o600); err != nil {
		return invalid, err
	}

	path, err := filepath.Abs(m.file)
	if err != nil {
		return invalid, err
	}

	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	if err != nil {
		return invalid, err
	}

	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return invalid, err
	}
	if exec.CommandContext(ctx, "go", "build", "-overlay", file, packages[0]).Run() != nil {
		return invalid, nil
	}

	for _, pkg := range packages {
		if _, err := test(ctx, o, pkg, file); err != nil {
			return killed, nil
		}
	}

	return survived, nil
}

func test(ctx context.Context, o options, pkg, overlay string) (output []byte, err error) {
	args := []string{"test", "-count=1", "-failfast", "-vet=off", "-timeout", o.timeout.String()}
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	if o.run != "" {
		args = append(args, "-run", o.run)
	}

	output, err = exec.CommandContext(ctx, "go", append(args, pkg)...).CombinedOutput()
	return output, errors.Join(err, endOrphans())
}

// report prints the table and the survivors.
func report(o options, scores []score) error {
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "package\tmutants\tnoticed\tscore\ttook")
	var low []string
	for _, s := range scores {
		fmt.Fprintf(out, "%s\t%d\t%d\t%.0f %%\t%s\n", s.pkg, s.tried, s.killed, s.percent(),
			s.took.Round(time.Second))
		if s.percent() < o.least {
			low = append(low, s.pkg)
		}
	}

	if err := out.Flush(); err != nil {
		return err
	}

	for _, s := range scores {
		for _, survivor := range s.survivors {
			fmt.Println(survivor)
		}
	}

	if len(low) > 0 {
		return fmt.Errorf("below %.0f %%: %s", o.least, strings.Join(low, ", "))
	}

	return nil
}
