// SPDX-License-Identifier: Apache-2.0

// Package personality is the file format in which this project writes down what the drivers of a
// NIC do otherwise than the rest: what they refuse, delay, forget, reset, tell wrongly or leave
// out. The simulated NIC of test/qemu plays such a file, docs/gen makes tables of it, and "xpuctl
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

// MaxSize is the largest file that [Parse] takes, in bytes.
const MaxSize = 64 << 10

// Personality is a card as its drivers show it.
type Personality struct {
	// Name is that of the file without ".yaml": small letters, digits and hyphens.
	Name string `yaml:"name"`
	// Title is what people call the card and its drivers.
	Title string `yaml:"title"`
	// PF and VF are the drivers (kernel modules) of PF and VF.
	PF string `yaml:"pf"`
	VF string `yaml:"vf"`
	// Kernel is the version that the file is about, such as "6.12.117".
	Kernel string `yaml:"kernel"`
	// Column is the column of docs/reference/hardware.md that the card belongs to; "" for none.
	Column string `yaml:"column,omitempty"`
	// Switchdev says that the eswitch is in mode switchdev.
	Switchdev bool `yaml:"switchdev,omitempty"`
	// Observed says that a real card showed the deviations, by "xpuctl hardware-report", and not
	// its source.
	Observed bool `yaml:"observed,omitempty"`
	// Deviations are what the drivers do otherwise than the rest. A card without one does all that
	// it is asked, at once.
	Deviations []Deviation `yaml:"deviations,omitempty"`
}

// Deviation is one thing that drivers do otherwise than the rest.
type Deviation struct {
	// Does is what the drivers do, as the predicate of a sentence: "resets the VF when its VLAN is
	// set".
	Does string `yaml:"does"`
	// Play are the knobs of the simulated NIC that play it; none where it cannot be played.
	Play Settings `yaml:"play,omitempty"`
	// Source shows it: function and file of the kernel, or the public report.
	Source string `yaml:"source"`
	// Quirk is the name of the quirk in pkg/kernel/quirk that says what this project does about it.
	// Answer says it where there is no such quirk. A file has one of both, unless it is Observed.
	Quirk  string `yaml:"quirk,omitempty"`
	Answer string `yaml:"answer,omitempty"`
}

// Setting is a knob of the simulated NIC, and what it is set to.
type Setting struct{ Knob, Value string }

// Settings are written as a mapping of knobs to values.
type Settings []Setting

// UnmarshalYAML keeps the order of the file, and refuses knobs and values that do not exist.
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

// MarshalYAML writes the mapping in the order of the settings.
func (s Settings) MarshalYAML() (any, error) {
	node := &yaml.Node{Kind: yaml.MappingNode}
	for _, setting := range s {
		for _, text := range []string{setting.Knob, setting.Value} {
			node.Content = append(node.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: text})
		}
	}
	return node, nil
}

// Parse reads a file. It refuses unknown keys, knobs and values, and a deviation without a source;
// the error names the line, or the deviation by its number from 1.
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

// Marshal writes a file that [Parse] reads.
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

// Value is what a knob is set to, its default where no deviation sets it. It panics for a knob that
// does not exist.
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

// Script are the lines for the simulated NIC, which play all deviations that can be played.
func (p Personality) Script() string {
	var out strings.Builder
	for _, d := range p.Deviations {
		for _, s := range d.Play {
			fmt.Fprintf(&out, "%s=%s\n", s.Knob, s.Value)
		}
	}
	return out.String()
}
