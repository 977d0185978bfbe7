// SPDX-License-Identifier: Apache-2.0

// Command cast records what commands print, and draws the recording as an animated SVG: make cast.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/opiproject/xpu-device-plugin/test/cast"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cast:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("cast", flag.ContinueOnError)
	title := flags.String("title", "", "what the recording shows")
	width := flags.Int("width", 100, "columns of the terminal")
	height := flags.Int("height", 28, "lines of the terminal")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "cast [flags] FILE.cast [COMMAND...]: records the commands, if "+
			"there are some, and draws FILE.svg")
		flags.PrintDefaults()
	}

	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() < 1 || filepath.Ext(flags.Arg(0)) != ".cast" {
		return errors.New("name a file that ends with .cast")
	}

	if commands := flags.Args()[1:]; len(commands) > 0 {
		recording, err := cast.Record(ctx, os.Stdout, *title, *width, *height, commands)
		if err != nil {
			return err
		}
		var out bytes.Buffer
		if err := recording.Write(&out); err != nil {
			return err
		}
		if err := os.WriteFile(flags.Arg(0), out.Bytes(), 0o644); err != nil {
			return err
		}
	}

	return draw(flags.Arg(0))
}

// draw draws the SVG beside a recording.
func draw(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()

	recording, err := cast.Read(file)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}

	picture, err := recording.SVG()
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return os.WriteFile(strings.TrimSuffix(path, ".cast")+".svg", picture, 0o644)
}
