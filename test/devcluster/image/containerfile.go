// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"
)

// Source has the inputs of an image build, as in container engines.
type Source struct {
	Containerfile string
	Context       string // directory for COPY
	// values of ARGs by name; TARGETOS and TARGETARCH are set from the platform
	Args map[string]string
}

// Read returns the Spec of the image for an architecture in Go's notation (amd64, arm64). It
// supports what an image of static binaries needs: one stage "FROM scratch" with ARG, COPY, LABEL,
// USER and ENTRYPOINT. It rejects everything else, so that a container engine builds the same
// image.
func (s Source) Read(arch string) (Spec, error) {
	stage, err := s.stage()
	if err != nil {
		return Spec{}, fmt.Errorf("%s: %w", s.Containerfile, err)
	}

	given := maps.Clone(s.Args)
	if given == nil {
		given = map[string]string{}
	}

	given["TARGETOS"], given["TARGETARCH"] = "linux", arch
	b := builder{
		context: s.Context, given: given, args: map[string]string{}, spec: Spec{Arch: arch},
	}
	for _, command := range stage.Commands {
		if err := b.apply(command); err != nil {
			return Spec{}, fmt.Errorf("%s: line %d: %w", s.Containerfile,
				command.Location()[0].Start.Line, err)
		}
	}

	return b.spec, nil
}

func (s Source) stage() (instructions.Stage, error) {
	text, err := os.ReadFile(s.Containerfile)
	if err != nil {
		return instructions.Stage{}, err
	}

	parsed, err := parser.Parse(bytes.NewReader(text))
	if err != nil {
		return instructions.Stage{}, err
	}

	stages, _, err := instructions.Parse(parsed.AST, nil)
	if err != nil {
		return instructions.Stage{}, err
	}
	if len(stages) != 1 || stages[0].BaseName != "scratch" {
		return instructions.Stage{}, errors.New("must have one stage, FROM scratch")
	}

	return stages[0], nil
}

// A builder executes the instructions of a stage in order.
type builder struct {
	context string
	given   map[string]string // values available to ARG
	args    map[string]string // values declared by ARG so far
	spec    Spec
}

func (b *builder) apply(command instructions.Command) error {
	if c, ok := command.(instructions.SupportsSingleWordExpansion); ok {
		if err := c.Expand(b.expand); err != nil {
			return fmt.Errorf("%s: %w", strings.ToUpper(command.Name()), err)
		}
	}

	switch c := command.(type) {
	case *instructions.ArgCommand:
		return b.arg(c)
	case *instructions.CopyCommand:
		return b.copy(c)
	case *instructions.LabelCommand:
		if b.spec.Labels == nil {
			b.spec.Labels = map[string]string{}
		}
		for _, label := range c.Labels {
			b.spec.Labels[label.Key] = label.Value
		}
		return nil
	case *instructions.UserCommand:
		b.spec.User = c.User
		return nil
	case *instructions.EntrypointCommand:
		if c.PrependShell {
			return fmt.Errorf(
				`ENTRYPOINT: must be a list, as ["/program"]: there is no shell in the image`,
			)
		}
		b.spec.Entrypoint = c.CmdLine
		return nil
	}

	return fmt.Errorf("%s: is not among ARG, COPY, LABEL, USER and ENTRYPOINT",
		strings.ToUpper(command.Name()))
}

// expand substitutes ARGs in a word. An undeclared ARG, for which a container engine inserts an
// empty string, is an error, because it is always a mistake.
func (b *builder) expand(word string) (string, error) {
	env := shell.EnvsFromSlice(environ(b.args))
	result, err := shell.NewLex('\\').ProcessWordWithMatches(word, env)
	if err != nil {
		return "", err
	}
	if len(result.Unmatched) > 0 {
		return "", fmt.Errorf("%s is not declared by ARG above",
			slices.Min(slices.Collect(maps.Keys(result.Unmatched))))
	}

	return result.Result, nil
}

func environ(args map[string]string) []string {
	var env []string
	for name, value := range args {
		env = append(env, name+"="+value)
	}
	return env
}

func (b *builder) arg(c *instructions.ArgCommand) error {
	for _, arg := range c.Args {
		value, ok := b.given[arg.Key]
		if !ok && arg.Value == nil {
			return fmt.Errorf("ARG %s: has neither a default nor a value: give one by "+
				"--build-arg %s=VALUE", arg.Key, arg.Key)
		}

		if !ok {
			value = *arg.Value
		}
		b.args[arg.Key] = value
	}
	return nil
}

func (b *builder) copy(c *instructions.CopyCommand) error {
	if c.From != "" || c.Chown != "" || c.Chmod != "" || len(c.SourceContents) > 0 {
		return fmt.Errorf("COPY: must have sources and a destination only")
	}

	for _, source := range c.SourcePaths {
		if !filepath.IsLocal(source) || strings.ContainsAny(source, "*?[$") {
			return fmt.Errorf("COPY %s: must be the path of a file in the context", source)
		}

		target := c.DestPath
		if strings.HasSuffix(target, "/") {
			target = path.Join(target, filepath.Base(source))
		} else if len(c.SourcePaths) > 1 {
			return fmt.Errorf("COPY: the destination of several files must end with /")
		}

		if !path.IsAbs(target) || target != path.Clean(target) {
			return fmt.Errorf("COPY %s: the destination must be an absolute path", source)
		}

		b.spec.Files = append(b.spec.Files,
			File{Source: filepath.Join(b.context, source), Target: target})
	}

	return nil
}
