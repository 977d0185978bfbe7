// SPDX-License-Identifier: Apache-2.0

// Package logging gives every program of the project the same flags and the same form of log.
package logging

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
)

// Options are what the flags say.
type Options struct {
	format    string
	verbosity int
}

// AddFlags adds --log-format and --log-verbosity.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.format, "log-format", "text", "text or json")
	flags.IntVarP(&o.verbosity, "log-verbosity", "v", 0,
		"0 logs what changes, 1 also attempts and calls, more also the libraries' details")
}

// Logger writes to w. The error names the flag that is wrong.
func (o *Options) Logger(w io.Writer) (logr.Logger, error) {
	// logr's verbosity n is slog's level -n.
	settings := &slog.HandlerOptions{Level: slog.Level(-o.verbosity)}
	switch o.format {
	case "text":
		return logr.FromSlogHandler(slog.NewTextHandler(w, settings)), nil
	case "json":
		return logr.FromSlogHandler(slog.NewJSONHandler(w, settings)), nil
	}

	return logr.Logger{}, fmt.Errorf("--log-format %q: must be text or json", o.format)
}
