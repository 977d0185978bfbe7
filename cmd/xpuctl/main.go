// SPDX-License-Identifier: Apache-2.0

// Command xpuctl is the command line for administrators of xpu-device-plugin.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// Exit codes, as grep and diff have them.
const (
	exitNo     = 1 // the answer is no
	exitFailed = 2 // there is no answer
)

// errNo is returned by a command whose answer is no, and which has printed why.
var errNo = errors.New("the answer is no")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second signal ends a command that cleans up
	// API servers send warnings, which client-go would log.
	warnings := rest.WarningWriterOptions{Deduplicate: true}
	rest.SetDefaultWarningHandler(rest.NewWarningWriter(terminal.NewWriter(os.Stderr), warnings))
	ctrllog.SetLogger(logr.Discard()) // it would complain after 30 s without one
	err := execute(ctx, command(filepath.Base(os.Args[0])), os.Stdin, os.Stdout, os.Stderr)
	stop()

	switch {
	case errors.Is(err, errNo):
		os.Exit(exitNo)
	case err != nil:
		os.Exit(exitFailed)
	}
}

// execute runs the command with writers that escape terminal control characters. Output for
// programs goes to [terminal.Raw].
func execute(ctx context.Context, c *cobra.Command, in io.Reader, out, notes io.Writer) error {
	c.SetIn(in)
	c.SetOut(terminal.NewWriter(out))
	c.SetErr(terminal.NewWriter(notes))
	return c.ExecuteContext(ctx)
}

// pluginName is the program's name as a kubectl plugin, which makes it "kubectl xpu".
const pluginName = "kubectl-xpu"

// command returns the root command for the given program name.
func command(program string) *cobra.Command {
	c := &cobra.Command{
		Use:   "xpuctl",
		Short: "Help people who run xpu-device-plugin",
		Long: `Helps people who run xpu-device-plugin. A link to it that is called ` + pluginName +
			` and is on PATH makes it "kubectl xpu".

"xpuctl options" has the flags that say which cluster is asked and as whom.

Exit codes: 0 for success, 1 if the answer is no (pods that stay pending, for example), 2 for bad input and failures.`,
		Version:      version.String(),
		SilenceUsage: true,
	}

	if strings.TrimSuffix(program, ".exe") == pluginName {
		c.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl xpu"}
	}

	c.AddCommand(statusCommand(), testCommand(), scheduleCommand(), generateCommand(), serveCommand(), convertCommand(),
		discoverCommand(), hardwareReportCommand(),
		explainCommand(), dashboardCommand(), cordonCommand(), uncordonCommand(), deadLettersCommand(),
		releaseCommand(), uninstallCommand(), bundleCommand(), manCommand(), optionsCommand(),
		versionCommand())
	c.AddCommand(objectsCommands()...)
	addCompletions(c)
	addUsage(c)
	return c
}

// addUsage adds to errors of arguments and flags how a command is used, for c and all below it. Cobra
// would print the whole help.
func addUsage(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			if err := check(c, args); err != nil {
				return fmt.Errorf("%w; usage: %s", err, c.UseLine())
			}
			return nil
		}
	}
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, c.CommandPath())
	})
	for _, below := range c.Commands() {
		addUsage(below)
	}
}

// answerNo ends a command whose answer is no, and which has printed why.
func answerNo(c *cobra.Command) error {
	c.SilenceErrors = true
	return errNo
}
