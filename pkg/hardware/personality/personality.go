// SPDX-License-Identifier: Apache-2.0

// Package personality is the file format for what the drivers of a NIC do differently from others:
// what they reject, delay, forget, reset, report wrongly or leave out. The simulated NIC of
// test/qemu behaves according to such a file, docs/gen makes tables of it, and "xpuctl
// hardware-report" writes one about a real card.
package personality

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// MaxSize is the maximum size of a file for [Parse], in bytes.
const MaxSize = 64 << 10

// Personality describes a card by the behaviour of its drivers.
type Personality struct {
	// Name is the file's name without ".yaml": lower-case letters, digits and hyphens.
	Name string `yaml:"name"`
	// Title names the card and its drivers for people.
	Title string `yaml:"title"`
	// PF and VF are the drivers (kernel modules) of PF and VF.
	PF string `yaml:"pf"`
	VF string `yaml:"vf"`
	// Kernel is the version that the file describes, such as "6.12.117".
	Kernel string `yaml:"kernel"`
	// Column is the card's column in docs/reference/hardware.md; "" if it has none.
	Column string `yaml:"column,omitempty"`
	// Switchdev is set if the eswitch is in mode switchdev.
	Switchdev bool `yaml:"switchdev,omitempty"`
	// Observed is set if the deviations were observed on a real card by "xpuctl hardware-report",
	// not found in source code.
	Observed bool `yaml:"observed,omitempty"`
	// Deviations list what the drivers do differently. A card without deviations does everything it
	// is asked, at once.
	Deviations []Deviation `yaml:"deviations,omitempty"`
}

// Deviation is one difference in the drivers' behaviour.
type Deviation struct {
	// Does describes the behaviour as the predicate of a sentence: "resets the VF when its VLAN is
	// set".
	Does string `yaml:"does"`
	// Play are the settings of the simulated NIC that reproduce the behaviour; empty if it cannot
	// be reproduced.
	Play Settings `yaml:"play,omitempty"`
	// Source is the evidence: function and file of the kernel, or a public report.
	Source string `yaml:"source"`
	// Quirk is the name of the quirk in pkg/kernel/quirk that handles the behaviour. Answer
	// describes the handling if there is no such quirk. A deviation has exactly one of both, unless
	// the file is Observed.
	Quirk  string `yaml:"quirk,omitempty"`
	Answer string `yaml:"answer,omitempty"`
}

// Setting is a knob of the simulated NIC with its value.
type Setting struct{ Knob, Value string }

// Settings are encoded as a mapping of knobs to values.
type Settings []Setting

// UnmarshalYAML keeps the order of the file, and rejects unknown knobs and values.
func (s *Settings) UnmarshalYAML(node *yaml.Node) error {
	if node.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: must be a mapping of knobs to values", node.Line)
	}

	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		if value.Kind != yaml.ScalarNode {
			return fmt.Errorf("line %d: knob %q: the value must be a word or a number",
				value.Line, key.Value)
		}

		setting := Setting{key.Value, value.Value}
		if err := setting.validate(); err != nil {
			return fmt.Errorf("line %d: %w", key.Line, err)
		}

		*s = append(*s, setting)
	}

	return nil
}

// MarshalYAML encodes the mapping in the order of the settings.
func (s Settings) MarshalYAML() (any, error) {
	node := &yaml.Node{Kind: yaml.MappingNode}
	for _, setting := range s {
		for _, text := range []string{setting.Knob, setting.Value} {
			node.Content = append(node.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: text})
		}
	}
	return node, nil
}

// Parse parses a file. It rejects unknown keys, knobs and values, and a deviation without a source.
// The error names the line, or the number of the deviation from 1.
func Parse(content []byte) (Personality, error) {
	if len(content) > MaxSize {
		return Personality{}, fmt.Errorf("%d bytes are too many: at most %d", len(content), MaxSize)
	}

	var p Personality
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	decoder.KnownFields(true)

	if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
		return Personality{}, errors.New("the file is empty")
	} else if err != nil {
		return Personality{}, err
	}

	if err := decoder.Decode(new(Personality)); !errors.Is(err, io.EOF) {
		return Personality{}, errors.New("the file must have one document")
	}

	return p, p.validate()
}

// Marshal returns a file that [Parse] accepts.
func (p Personality) Marshal() ([]byte, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}

	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	err := errors.Join(encoder.Encode(p), encoder.Close())

	return out.Bytes(), err
}

var nameForm = regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`)

func (p Personality) validate() error {
	switch {
	case !nameForm.MatchString(p.Name):
		return fmt.Errorf("name: %q must be of small letters, digits and hyphens", p.Name)
	case p.Title == "" || p.PF == "" || p.VF == "" || p.Kernel == "":
		return errors.New("title, pf, vf and kernel: must not be empty")
	}

	seen := map[string]bool{}
	for i, d := range p.Deviations {
		switch {
		case d.Does == "":
			return fmt.Errorf("deviation %d: does: must not be empty", i+1)
		case d.Source == "":
			return fmt.Errorf("deviation %d (%s): source: must name what shows it", i+1, d.Does)
		case !p.Observed && (d.Quirk == "") == (d.Answer == ""):
			return fmt.Errorf("deviation %d (%s): must have either quirk or answer", i+1, d.Does)
		}
		for _, s := range d.Play {
			if seen[s.Knob] {
				return fmt.Errorf("deviation %d (%s): knob %s is set twice", i+1, d.Does, s.Knob)
			}
			seen[s.Knob] = true
			if err := s.validate(); err != nil {
				return fmt.Errorf("deviation %d (%s): %w", i+1, d.Does, err)
			}
		}
	}

	return nil
}

// Value returns the value of a knob: its default if no deviation sets it. It panics for an unknown
// knob.
func (p Personality) Value(knob string) string {
	k, ok := byName(knob)
	if !ok {
		panic("no knob " + knob)
	}

	for _, d := range p.Deviations {
		for _, s := range d.Play {
			if s.Knob == knob {
				return s.Value
			}
		}
	}

	return k.Default
}

// Script returns the commands for the simulated NIC that reproduce all deviations with settings.
func (p Personality) Script() string {
	var out strings.Builder
	for _, d := range p.Deviations {
		for _, s := range d.Play {
			fmt.Fprintf(&out, "%s=%s\n", s.Knob, s.Value)
		}
	}
	return out.String()
}
