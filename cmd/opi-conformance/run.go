// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/cases"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// execute lists the cases or runs them.
func (o options) execute(ctx context.Context, argv []string, out io.Writer) error {
	kinds := conformance.NewKinds()
	selected, err := o.selected(cases.All(kinds))
	if err != nil {
		return err
	}
	if o.list {
		return list(out, selected)
	}

	cfg, err := o.config()
	if err != nil {
		return err
	}
	runner, err := conformance.NewRunner(cfg, kinds)
	if err != nil {
		return err
	}
	defer runner.Close()

	runner.Progress = func(r conformance.Result) { o.progress(out, r) }
	report, err := runner.Run(ctx, selected)
	if err != nil {
		return err
	}

	report.Implementation = o.implementation
	report.Reproduce = append([]string{filepath.Base(argv[0])}, argv[1:]...)
	return o.conclude(out, report)
}

// selected returns the cases that the flags select.
func (o options) selected(all []conformance.Case) ([]conformance.Case, error) {
	wanted, err := regexp.Compile(o.run)
	if err != nil {
		return nil, fmt.Errorf("--run: %w", err)
	}

	profiles := o.declared()
	for _, p := range profiles {
		if !slices.Contains(conformance.Profiles(), p) {
			return nil, fmt.Errorf("--profiles: %q: must be of %s", p, profileList())
		}
	}

	var selected []conformance.Case
	for _, c := range all {
		if wanted.MatchString(c.ID()) &&
			(len(profiles) == 0 || slices.Contains(profiles, c.Profile)) {
			selected = append(selected, c)
		}
	}

	if len(selected) == 0 {
		return nil, errors.New("no case is selected: see --list, --profiles and --run")
	}
	return selected, nil
}

func (o options) declared() (profiles []conformance.Profile) {
	for _, p := range o.profiles {
		profiles = append(profiles, conformance.Profile(strings.ToUpper(strings.TrimSpace(p))))
	}
	return profiles
}

func profileList() string {
	var words []string
	for _, p := range conformance.Profiles() {
		words = append(words, string(p))
	}
	return strings.Join(words, ", ")
}

// config returns the configuration of the run.
func (o options) config() (cfg conformance.Config, err error) {
	cfg = conformance.Config{
		LogicalBridges: o.logicalBridges, Prefix: cmp.Or(o.prefix, conformance.NewPrefix()),
		Settle: o.settle, CallTimeout: o.callTimeout, Limit: o.limit, Scale: o.scale,
		Declared: o.declared(),
	}
	if o.endpoint == "" {
		return cfg, errors.New("--endpoint is required: host:port or unix:/path")
	}
	if cfg.Endpoint, err = conformance.ParseEndpoint(o.endpoint); err != nil {
		return cfg, fmt.Errorf("--endpoint: %w", err)
	}
	if cfg.Endpoint.TLS, err = o.tls(cfg.Endpoint); err != nil {
		return cfg, err
	}

	for _, text := range o.ports {
		port, err := conformance.ParsePort(text)
		if err != nil {
			return cfg, fmt.Errorf("--ports: %w", err)
		}
		cfg.Ports = append(cfg.Ports, port)
	}

	// A case has up to 12 logical bridges. Cases of the profile SCALE have as many as --scale says.
	least := o.scale + 12
	if cfg.VLANs, err = conformance.ParseRange(o.vlans, conformance.Range{First: 2, Last: 4093},
		least); err != nil {
		return cfg, fmt.Errorf("--vlans: %w", err)
	}
	if cfg.VNIs, err = conformance.ParseRange(o.vnis, conformance.Range{First: 1, Last: 1<<24 - 2},
		least); err != nil {
		return cfg, fmt.Errorf("--vnis: %w", err)
	}
	if o.vtep != "" {
		if cfg.VTEP, err = netip.ParsePrefix(o.vtep); err != nil {
			return cfg, fmt.Errorf("--vtep: %w", err)
		}
	}

	if o.commands.Timeout <= 0 {
		return cfg, errors.New("--hook-timeout: must be positive")
	}
	cfg.Hooks = o.commands.Hooks(cfg.Prefix, cfg.Endpoint)
	return cfg, nil
}

// tls returns the configuration of TLS, or nil for plaintext.
func (o options) tls(endpoint conformance.Endpoint) (*tls.Config, error) {
	if o.plaintext {
		return nil, nil
	}
	if o.ca == "" {
		return nil, errors.New("give --ca, or --plaintext for an agent without TLS")
	}

	pem, err := os.ReadFile(o.ca)
	if err != nil {
		return nil, fmt.Errorf("--ca: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--ca: %s has no PEM certificate", o.ca)
	}

	config := &tls.Config{
		MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: o.serverName,
	}
	if config.ServerName == "" && endpoint.Network == "tcp" {
		config.ServerName, _, _ = net.SplitHostPort(endpoint.Address)
	}
	if o.cert != "" {
		pair, err := tls.LoadX509KeyPair(o.cert, o.key)
		if err != nil {
			return nil, fmt.Errorf("--cert and --key: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}

	return config, nil
}

// list prints the cases.
func list(out io.Writer, all []conformance.Case) error {
	rows := make([][]string, len(all))
	for i, c := range all {
		rows[i] = []string{c.ID(), string(cmp.Or(c.Level, conformance.Must)), c.Source}
	}
	for _, line := range terminal.Columns(2, rows) {
		if _, err := io.WriteString(out, line); err != nil {
			return err
		}
	}
	return nil
}

// progress prints the result of a case.
func (o options) progress(out io.Writer, r conformance.Result) {
	isFine := r.Outcome == conformance.Passed || r.Outcome == conformance.Skipped
	if o.quiet && isFine {
		return
	}

	_ = terminal.Line(out, "%-8s %s (%s)", r.Outcome, r.Case.ID(), r.Took.Round(time.Millisecond))
	if r.Text != "" {
		_ = terminal.Line(out, "         %s", r.Text)
	}
	if !isFine && r.Outcome != conformance.NotRun {
		_ = terminal.Line(out, "         %s: %s", r.Case.Source, r.Case.Says)
		_ = terminal.Line(out, "         %s", r.Case.Violation)
	}
}

// conclude prints the verdicts and writes the files.
func (o options) conclude(out io.Writer, report *conformance.Report) error {
	rows := [][]string{{
		"PROFILE", "VERDICT", "PASSED", "FAILED", "BLOCKED", "DEVIATES", "SKIPPED", "NOT RUN",
	}}
	for _, p := range report.Profiles {
		if p.Passed+p.Failed+p.Blocked+p.Deviates+p.Skipped+p.NotRun == 0 {
			continue
		}
		row := []string{string(p.Name), string(p.Verdict)}
		for _, n := range []int{p.Passed, p.Failed, p.Blocked, p.Deviates, p.Skipped, p.NotRun} {
			row = append(row, fmt.Sprint(n))
		}
		rows = append(rows, row)
	}

	_ = terminal.Line(out, "")
	for _, line := range terminal.Columns(2, rows) {
		_, _ = io.WriteString(out, line)
	}
	_ = terminal.Line(out, "%d cases in %.1f s", len(report.Cases), report.Seconds)
	for _, left := range report.LeftBehind {
		_ = terminal.Line(out, "left behind, delete it by hand: %s", left)
	}

	err := errors.Join(writeFile(o.report, report.WriteJSON), writeFile(o.junit, report.WriteJUnit))
	if err != nil {
		return err
	}
	if !report.OK() || len(report.LeftBehind) > 0 {
		return errNo
	}
	return nil
}
