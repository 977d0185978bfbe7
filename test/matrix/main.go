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

// results is the file of what was found.
const results = "docs/gen/versions.yaml"

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
	var unknown error
	for _, c := range all {
		r, err := c.tell(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil { // the last result of these versions stays
			unknown = errors.Join(unknown, err)
			continue
		}
		r.Commit, r.Date = commit, time.Now().UTC().Format(time.DateOnly)
		if err := result.Add(results, r); err != nil {
			return err
		}
		if r.Story != result.Holds {
			failed = append(failed, c.String())
		}
	}
	fmt.Fprintln(out, results+` has the results; "go run ./docs/gen" makes the table of them`)
	if len(failed) > 0 {
		unknown = errors.Join(unknown,
			fmt.Errorf("the story does not hold on %s", strings.Join(failed, ", ")))
	}
	return unknown
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

// tell tells the story. An error means that there is no result, because nothing was found out about
// these versions.
func (c combination) tell(ctx context.Context) (result.Result, error) {
	path := filepath.Join("bin", "matrix", strings.ReplaceAll(c.String(), "/", "-")+".log")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return result.Result{}, err
	}
	runtime, err := c.runtimeVersion(ctx, path)
	if err != nil {
		return result.Result{}, err
	}

	fmt.Fprintf(os.Stderr, "%s: building and telling the story, see %s\n", c, path)
	r := result.Result{
		Kubernetes: versionIn(kubernetes, c.kubernetes, "go", "kubernetes"), Runtime: runtime,
		Multus: versionIn(multus, c.multus, "plugins", "multus"), Story: result.Holds,
	}
	log, built := c.logged(ctx, path, "bin/devcluster", append([]string{"build"}, c.flags()...)...)
	if built != nil {
		if ctx.Err() != nil {
			return result.Result{}, context.Cause(ctx)
		}
		if !isVersionsFault(log) {
			return result.Result{}, fmt.Errorf("%s: is not built, and the log %s does not say that the "+
				"versions are why: %w", c, path, built)
		}
		r.Story = result.Unbuilt
		return r, nil
	}

	log, err = c.logged(ctx, path, "bin/demo", c.flags()...)
	if ctx.Err() != nil {
		return result.Result{}, context.Cause(ctx)
	}
	if err != nil {
		r.Story = result.Fails
	}
	r.GatesOff = gatesOff(log)
	if kubernetes, runtime := ranOn(log); kubernetes != "" {
		r.Kubernetes, r.Runtime = kubernetes, runtime
	}

	return r, nil
}

// runtimeVersion returns the version of the container runtime, as results name it, before anything
// depends on the versions of the others: devcluster builds it with the project's Kubernetes.
func (c combination) runtimeVersion(ctx context.Context, path string) (string, error) {
	if err := os.RemoveAll(path); err != nil {
		return "", err
	}

	alone := combination{project, c.runtime, project}
	log, err := c.logged(ctx, path, "bin/devcluster", append([]string{"build"}, alone.flags()...)...)
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	if version := moduleOf(c.runtime); err != nil && version != "" && isVersionsFault(log) {
		return version, nil
	}
	if err != nil {
		return "", fmt.Errorf("version of runtime %s: %w, see %s", c.runtime, err, path)
	}

	_, version := ranOn(log)
	if version == "" {
		return "", fmt.Errorf("version of runtime %s: devcluster does not say it, see %s", c.runtime,
			path)
	}
	return version, nil
}

// moduleOf returns the version of a runtime that is built from its module, as results name it, or "".
func moduleOf(runtime string) string {
	file, pattern, name := "containerd", containerd, "containerd"
	switch runtime {
	case "containerd-2":
	case "cri-o":
		file, pattern, name = "crio", crio, "CRI-O"
	default:
		return ""
	}
	return name + " " + versionIn(pattern, project, file, "")
}

// logged runs a command. It returns what the command says, and appends it to a log.
func (c combination) logged(
	ctx context.Context, path, name string, args ...string,
) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer file.Close()

	var said bytes.Buffer
	err = c.command(ctx, io.MultiWriter(file, &said), name, args...)
	return said.Bytes(), err
}

// isVersionsFault reports whether the log of a build says that these versions cannot be built: there
// is no such version, or its source does not compile. A full disk and the network are not the
// versions' fault, even if the compiler complains too.
func isVersionsFault(log []byte) bool {
	return (compiler.Match(log) || saysThereIsNone(string(log))) && !machine.Match(log)
}

func (c combination) command(ctx context.Context, log io.Writer, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // the cluster goes
	return cmd.Run()
}

var (
	// Debian's version of containerd ends with "~ds1".
	ran  = regexp.MustCompile(`(?m)Kubernetes v([^,\s]+), (containerd|cri-o) v?([^~\s]+)`)
	gate = regexp.MustCompile(`feature gate (DRA[A-Za-z]+)`)
	// These match what a build says of the source, and of the machine.
	compiler = regexp.MustCompile(`(?m)\.(go|c|s):[0-9]+:[0-9]+: `)
	machine  = regexp.MustCompile(`(?i)no space left|disk space|disk quota|out of memory|` +
		`cannot allocate memory|signal: killed|dial tcp|i/o timeout|handshake timeout|` +
		`temporary failure|could not resolve|connection (refused|reset)|unreachable`)
	// These match a version in a module of devcluster.
	multus     = regexp.MustCompile(`multus-cni\.v4 v(\S+)`)
	containerd = regexp.MustCompile(`containerd/containerd/v2 v(\S+)`)
	crio       = regexp.MustCompile(`cri-o/cri-o v(\S+)`)
	kubernetes = regexp.MustCompile(`\sk8s\.io/kubernetes v(\S+)`)
)

// ranOn returns the versions that a log names last, or "".
func ranOn(log []byte) (kubernetes, runtime string) {
	all := ran.FindAllSubmatch(log, -1)
	if all == nil {
		return "", ""
	}
	match := all[len(all)-1]
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

// commitNow returns the project's commit, with "+" if files differ from it. Those of earlier results
// may differ.
func commitNow(ctx context.Context) (string, error) {
	commit, err1 := exec.CommandContext(ctx, "git", "rev-parse", "--short", "HEAD").Output()
	changes, err2 := exec.CommandContext(ctx, "git", "status", "--porcelain", "-uno", "--", ".",
		":!"+results, ":!docs/reference/versions.md").Output()
	if err := errors.Join(err1, err2); err != nil {
		return "", fmt.Errorf("commit of the project: %w", err)
	}
	if len(bytes.TrimSpace(changes)) > 0 {
		return strings.TrimSpace(string(commit)) + "+", nil
	}
	return strings.TrimSpace(string(commit)), nil
}
