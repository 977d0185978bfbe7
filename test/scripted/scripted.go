// SPDX-License-Identifier: Apache-2.0

// Package scripted runs the scripts of a package's testdata: txtar archives whose comment is a
// script, and whose files are its input and the output that it compares with. The commands are those
// of rsc.io/script, and:
//
//	PROGRAM ARGUMENTS... [< FILE]   runs the program, with the file as its input
//	status N                        checks the exit status of the last program
//
// A command that begins with ! must fail. $ROOT is the repository, two folders above the package.
package scripted

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"
	"rsc.io/script"
	"rsc.io/script/scripttest"
)

// asProgram is set in the environment of a test binary that runs as the package's program.
const asProgram = "XPU_SCRIPTED_PROGRAM"

// Main is for TestMain of the package of a program. It calls program if a script runs the program,
// and the tests otherwise.
func Main(m *testing.M, program func()) {
	if os.Getenv(asProgram) != "" {
		program()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var update = flag.Bool("update", false,
	"write what programs print into the files that tests compare it with")

// Updating reports whether tests write what programs print into the files that they compare it with:
// go test -update.
func Updating() bool { return *update }

// Program runs the package's program as a script's command does.
type Program func(s *script.State, args []string, input []byte) (stdout, stderr string, err error)

// Run runs each testdata/*.txtar as a subtest, side by side. name is what scripts call the package's
// program; the package's TestMain must call [Main]. own returns more commands for a script; it may
// be nil.
func Run(t *testing.T, name string, own func(*testing.T, Program) map[string]script.Cmd) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("testdata has no scripts: %v", err)
	}

	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			t.Parallel()
			run(t, name, file, own)
		})
	}
}

func run(
	t *testing.T, name, file string, own func(*testing.T, Program) map[string]script.Cmd,
) {
	archive, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}

	state, err := script.NewState(t.Context(), t.TempDir(), os.Environ())
	if err == nil {
		err = state.ExtractFiles(archive)
	}
	if err != nil {
		t.Fatal(err)
	}

	root, err := filepath.Abs("../..")
	if err == nil {
		err = state.Setenv("ROOT", root)
	}
	if err != nil {
		t.Fatal(err)
	}

	p := &program{name: name}
	engine := &script.Engine{Cmds: scripttest.DefaultCmds(), Conds: scripttest.DefaultConds()}
	engine.Cmds[name], engine.Cmds["status"] = p.command(), p.statusCommand()
	if own != nil {
		maps.Copy(engine.Cmds, own(t, p.run))
	}
	if *update {
		engine.Cmds["cmp"] = updating(archive, engine.Cmds["cmp"])
	}

	scripttest.Run(t, engine, state, file, bytes.NewReader(archive.Comment))
	if *update {
		if err := os.WriteFile(file, txtar.Format(archive), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// program runs the package's program and remembers its exit status.
type program struct {
	name   string
	status int
}

func (p *program) command() script.Cmd {
	usage := script.CmdUsage{Summary: "run " + p.name, Args: "[arguments...] [< file]"}
	return script.Command(usage, func(s *script.State, args ...string) (script.WaitFunc, error) {
		var input []byte
		if i := len(args) - 2; i >= 0 && args[i] == "<" {
			var err error
			if input, err = os.ReadFile(s.Path(args[i+1])); err != nil {
				return nil, err
			}
			args = args[:i]
		}

		return func(s *script.State) (stdout, stderr string, err error) {
			return p.run(s, args, input)
		}, nil
	})
}

func (p *program) run(
	s *script.State, args []string, input []byte,
) (stdout, stderr string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", "", err
	}

	var out, notes bytes.Buffer
	command := exec.CommandContext(s.Context(), self)
	command.Args, command.Dir = append([]string{p.name}, args...), s.Getwd()
	// The race detector sleeps for a second when a program ends, unless GORACE says otherwise.
	command.Env = slices.Concat([]string{"GORACE=atexit_sleep_ms=0"}, s.Environ(),
		[]string{asProgram + "=1"})
	command.Stdin, command.Stdout, command.Stderr = bytes.NewReader(input), &out, &notes
	err = command.Run()
	p.status = command.ProcessState.ExitCode()

	return ended(out.String()), ended(notes.String()), err
}

// ended returns an output with a newline at its end, because a file of a script has one.
func ended(text string) string {
	if text == "" || strings.HasSuffix(text, "\n") {
		return text
	}
	return text + "\n"
}

func (p *program) statusCommand() script.Cmd {
	usage := script.CmdUsage{Summary: "check the exit status of the last program", Args: "N"}
	return script.Command(usage, func(_ *script.State, args ...string) (script.WaitFunc, error) {
		if len(args) != 1 {
			return nil, script.ErrUsage
		}
		if got := fmt.Sprint(p.status); got != args[0] {
			return nil, fmt.Errorf("the exit status is %s, want %s", got, args[0])
		}
		return nil, nil
	})
}

// updating returns a cmp that writes the first file's content into the second one, a file of the
// archive.
func updating(archive *txtar.Archive, compare script.Cmd) script.Cmd {
	usage := *compare.Usage()
	return script.Command(usage, func(s *script.State, args ...string) (script.WaitFunc, error) {
		if len(args) != 2 {
			return nil, script.ErrUsage
		}

		var content []byte
		switch args[0] {
		case "stdout":
			content = []byte(s.Stdout())
		case "stderr":
			content = []byte(s.Stderr())
		default:
			var err error
			if content, err = os.ReadFile(s.Path(args[0])); err != nil {
				return nil, err
			}
		}

		for i, file := range archive.Files {
			if file.Name == args[1] {
				archive.Files[i].Data = content
				return nil, nil
			}
		}
		return nil, errors.New(args[1] + " is no file of the script")
	})
}
