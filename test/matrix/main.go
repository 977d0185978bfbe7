// SPDX-License-Identifier: Apache-2.0

// Command matrix tells the demo's story on the versions of Kubernetes, container runtimes and Multus
// that are supported, and writes what came of it into docs/gen/versions.yaml. It runs at the root of
// the project; scripts/matrix builds what it needs.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/matrix/result"
)

const usage = `matrix [-names] [KUBERNETES/RUNTIME/MULTUS...]

"default", or nothing at the end, is the version of the project: 1.34.0 default/containerd-2
default/default/4.2. Without arguments these are the oldest and the newest patch release of each minor
release of Kubernetes that resolve from the Go module proxy, and the other runtimes and Multuses with
the project's Kubernetes.
`

// project stands for the version that the project uses.
const project = "default"

func main() {
	names := flag.Bool("names", false, "print the combinations, and run none")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), usage)
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	if err := run(ctx, *names, flag.Args(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "matrix:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, names bool, arguments []string, out io.Writer) error {
	all, err := combinations(ctx, goProxy(filepath.Join("test", "devcluster")), arguments)
	if err != nil {
		return err
	}
	if names {
		for _, c := range all {
			fmt.Fprintln(out, c)
		}
		return nil
	}

	commit, err := commitNow(ctx)
	if err != nil {
		return err
	}
	var failed []string
	for _, c := range all {
		r, err := c.tell(ctx)
		if err != nil {
			return err
		}
		r.Commit, r.Date = commit, time.Now().UTC().Format(time.DateOnly)
		if err := result.Add("docs/gen/versions.yaml", r); err != nil {
			return err
		}
		if r.Story != result.Holds {
			failed = append(failed, c.String())
		}
	}
	fmt.Fprintln(out, `docs/gen/versions.yaml has the results; "go run ./docs/gen" makes the table of them`)
	if len(failed) > 0 {
		return fmt.Errorf("the story does not hold on %s", strings.Join(failed, ", "))
	}
	return nil
}

// A combination of versions, as devcluster's flags name them.
type combination struct{ kubernetes, runtime, multus string }

func (c combination) String() string { return c.kubernetes + "/" + c.runtime + "/" + c.multus }

// combinations returns those that the arguments name, or without arguments all.
func combinations(ctx context.Context, from proxy, arguments []string) (all []combination, err error) {
	if len(arguments) == 0 {
		releases, err := from.releases(ctx)
		if err != nil {
			return nil, err
		}
		arguments = append(releases, project, project+"/containerd-2", project+"/cri-o",
			project+"/default/4.2", project+"/default/4.1", project+"/default/4.0")
	}

	for _, argument := range arguments {
		parts := append(strings.Split(argument, "/"), project, project)
		if len(parts) > 5 || slices.Contains(parts, "") {
			return nil, fmt.Errorf("%q: must be KUBERNETES/RUNTIME/MULTUS", argument)
		}
		all = append(all, combination{parts[0], parts[1], parts[2]})
	}
	return all, nil
}

// flags are those of devcluster and of the demo.
func (c combination) flags() []string {
	own := func(version string) string { return strings.TrimPrefix(version, project) }
	return []string{"--kubernetes=" + own(c.kubernetes), "--runtime=" + own(c.runtime),
		"--multus-version=" + own(c.multus)}
}

// tell tells the story. An error means that there is no result.
func (c combination) tell(ctx context.Context) (result.Result, error) {
	path := filepath.Join("bin", "matrix", strings.ReplaceAll(c.String(), "/", "-")+".log")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return result.Result{}, err
	}
	log, err := os.Create(path)
	if err != nil {
		return result.Result{}, err
	}
	defer log.Close()

	fmt.Fprintf(os.Stderr, "%s: building and telling the story, see %s\n", c, path)
	r := result.Result{Story: result.Unbuilt, Multus: versionIn(multus, c.multus, "plugins", "multus")}
	built := c.command(ctx, log, "bin/devcluster", append([]string{"build"}, c.flags()...)...)
	if built == nil {
		r.Story = result.Holds
		if c.command(ctx, log, "bin/demo", c.flags()...) != nil {
			r.Story = result.Fails
		}
	}
	if ctx.Err() != nil {
		return result.Result{}, context.Cause(ctx)
	}

	text, err := os.ReadFile(path)
	if err != nil {
		return result.Result{}, err
	}
	r.GatesOff = gatesOff(text)
	if r.Kubernetes, r.Runtime = ranOn(text); r.Kubernetes == "" {
		r.Kubernetes, r.Runtime = versionIn(kubernetes, c.kubernetes, "go", "kubernetes"), c.runtime
	}
	return r, nil
}

func (c combination) command(ctx context.Context, log io.Writer, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // the cluster goes
	return cmd.Run()
}

var (
	ran  = regexp.MustCompile(`(?m)Kubernetes v([^,\s]+), (containerd|cri-o) ([^\s]+)`)
	gate = regexp.MustCompile(`feature gate (DRA[A-Za-z]+)`)
	// These match a version in a module of devcluster.
	multus     = regexp.MustCompile(`multus-cni\.v4 v(\S+)`)
	kubernetes = regexp.MustCompile(`\sk8s\.io/kubernetes v(\S+)`)
)

// ranOn returns the versions that the demo's log names, or "".
func ranOn(log []byte) (kubernetes, runtime string) {
	match := ran.FindSubmatch(log)
	if match == nil {
		return "", ""
	}
	name := strings.Replace(string(match[2]), "cri-o", "CRI-O", 1)
	return string(match[1]), name + " " + string(match[3])
}

// gatesOff returns the feature gates that the demo's log says are missing, sorted.
func gatesOff(log []byte) (gates []string) {
	for _, match := range gate.FindAllSubmatch(log, -1) {
		gates = append(gates, string(match[1]))
	}
	slices.Sort(gates)
	return slices.Compact(gates)
}

// versionIn returns the version that devcluster builds for a flag, from the module that has the
// project's or from the one of that name in a directory. It returns the flag if neither says more.
func versionIn(pattern *regexp.Regexp, flag, ofProject, directory string) string {
	module := ofProject + ".mod"
	if flag != project {
		module = filepath.Join(directory, flag+".mod")
	}
	text, err := os.ReadFile(filepath.Join("test", "devcluster", module))
	if match := pattern.FindSubmatch(text); err == nil && match != nil {
		return string(match[1])
	}
	return flag
}

// commitNow returns the project's commit, with "+" if files differ from it.
func commitNow(ctx context.Context) (string, error) {
	commit, err1 := exec.CommandContext(ctx, "git", "rev-parse", "--short", "HEAD").Output()
	changes, err2 := exec.CommandContext(ctx, "git", "status", "--porcelain", "-uno").Output()
	if err := errors.Join(err1, err2); err != nil {
		return "", fmt.Errorf("commit of the project: %w", err)
	}
	if len(bytes.TrimSpace(changes)) > 0 {
		return strings.TrimSpace(string(commit)) + "+", nil
	}
	return strings.TrimSpace(string(commit)), nil
}
