// SPDX-License-Identifier: Apache-2.0

// Command gen writes the parts of the documents that follow from the programs and their source:
// flags.md, metrics.md, chart.md, quirks.md, opi-conformance.md and schedule.schema.json of
// docs/reference, the tables in docs/reference/hardware.md, docs/reference/opi-agents.md, docs/reference/versions.md,
// docs/explanation/lifecycle.md and docs/explanation/attach-and-release.md, and the list in docs/how-to/configure-interface.md. It tidies
// api.md. Run it at the root of the project; "make generate" runs it after crd-ref-docs.
package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/test/qemu/zoo"
)

func main() {
	if err := run("docs/reference"); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	flags, err := flagsPage([]string{
		"xpu-agent", "xpu-agent install-cni", "xpu-agent state", "xpu-agent release",
		"xpu-controller", "opi-bridge", "opi-conformance", "opi-conformance wire",
		"xpuctl", "xpuctl options", "xpuctl status", "xpuctl test",
		"xpuctl explain pod", "xpuctl dashboard",
		"xpuctl discover", "xpuctl hardware-report", "xpuctl pools",
		"xpuctl ports", "xpuctl networks", "xpuctl xpus",
		"xpuctl dead-letters", "xpuctl release", "xpuctl bundle", "xpuctl schedule",
		"xpuctl generate", "xpuctl serve", "xpuctl convert", "xpuctl convert sriovdp",
		"xpuctl convert dranet", "xpuctl convert dra-driver-sriov", "xpuctl convert prototypes",
	})

	if err != nil {
		return err
	}

	metrics, err := metricsPage([]program{
		{"xpu-agent", []string{
			"pkg/node/inventory", "pkg/node/health", "pkg/node/pool/source",
			"pkg/node/deviceplugin", "pkg/node/dra",
			"pkg/node/provisioning", "pkg/node/cniserver", "pkg/node/hooks", "pkg/node/lifecycle",
			"pkg/node/sriov", "pkg/node/traffic", "pkg/monitoring",
		}},
		{"xpu-controller", []string{
			"pkg/controller", "pkg/controller/webhook", "pkg/broker", "pkg/monitoring",
		}},
		{"opi-bridge", []string{"pkg/bridge/service", "pkg/monitoring"}},
	})

	if err != nil {
		return err
	}

	schema, err := scheduleSchema()
	if err != nil {
		return err
	}

	wrong, err := mistakesPage()
	if err != nil {
		return err
	}

	chart, err := chartPage("deploy/chart/values.yaml")
	if err != nil {
		return err
	}

	cards, err := zoo.All()
	if err != nil {
		return err
	}

	for name, page := range map[string][]byte{
		"flags.md": flags, "metrics.md": metrics, "quirks.md": quirksPage(cards), "chart.md": chart, "mistakes.md": wrong,
		"opi-conformance.md":   conformancePage(),
		"schedule.schema.json": schema,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), page, 0o644); err != nil {
			return err
		}
	}

	if err := hardwareTables(filepath.Join(dir, "hardware.md"), "docs/gen/hardware.yaml",
		cards); err != nil {
		return err
	}
	if err := lifecycleTable("docs/explanation/lifecycle.md"); err != nil {
		return err
	}
	if err := sysctlsList("docs/how-to/configure-interface.md"); err != nil {
		return err
	}
	if err := propertyTables("docs/explanation/attach-and-release.md"); err != nil {
		return err
	}
	if err := agentsTable(filepath.Join(dir, "opi-agents.md")); err != nil {
		return err
	}
	if err := versionsTable(filepath.Join(dir, "versions.md"),
		"docs/gen/versions.yaml"); err != nil {
		return err
	}

	return tidyAPI(filepath.Join(dir, "api.md"))
}

// tidyAPI removes the escapes of crd-ref-docs from patterns, which are in code, and line breaks at
// the end of cells.
func tidyAPI(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	tidy := strings.NewReplacer(`\{`, "{", `\}`, "}", "<br /> |", " |").Replace(string(page))
	tidy = regexp.MustCompile(`\n{3,}`).ReplaceAllString(tidy, "\n\n")
	return os.WriteFile(path, []byte(tidy), 0o644)
}

// flagsPage returns the output of --help of the programs and their subcommands.
func flagsPage(programs []string) ([]byte, error) {
	var page bytes.Buffer
	page.WriteString("# Flags\n\n<!-- Made by docs/gen from --help. Do not edit. -->\n")

	for _, name := range programs {
		arguments := name + " --help"
		if name == "xpuctl options" { // it shows flags itself
			arguments = name
		}
		cmd := exec.Command("go",
			append([]string{"run"}, strings.Fields("./cmd/"+arguments)...)...)
		// Without these, defaults would come from this machine's environment.
		cmd.Env = append(os.Environ(), "NODE_NAME=", "POD_NAMESPACE=", "POD_NAME=")
		cmd.Stderr = os.Stderr
		help, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("%s --help: %w", name, err)
		}

		fmt.Fprintf(&page, "\n## %s\n\n```text\n%s\n```\n", name, bytes.TrimSpace(help))
	}

	return page.Bytes(), nil
}

// quirksPage lists the quirks of single drivers, and the behaviour of the cards in the zoo.
func quirksPage(cards []personality.Personality) []byte {
	var page bytes.Buffer
	page.WriteString(`# Quirks of drivers

<!-- Made by docs/gen from pkg/kernel/quirk and test/qemu/zoo. Do not edit. -->

What single drivers do otherwise than the rest, and what this project does about it. Which card shows it is in
[hardware.md](hardware.md), in the row that is named.

| driver | quirk | what it does | what is done about it | source in the kernel | row |
| --- | --- | --- | --- | --- | --- |
`)

	for _, q := range quirk.All() {
		fmt.Fprintf(&page, "| %s | %s | %s | %s | %s | %s |\n", q.Driver, q.Name, q.Does, q.Answer,
			q.Source, q.Row)
	}

	page.WriteString(`
## Cards

What the drivers of a card do otherwise than the rest, by the kernel's source or a report. What is played is played by
[simnic](../../test/qemu/simnic/README.md), with these knobs, in suite ` + "`personalities`" + ` of the guests; the
[knobs are described there](../../test/qemu/simnic/README.md#knobs).
`)

	page.WriteString(deviations(cards))
	return page.Bytes()
}
