package image

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// ReadContainerfile makes a Spec, but for the name, of a Containerfile and the directory that its COPY takes files from.
// It knows what an image of static binaries needs, one stage "FROM scratch" with COPY, USER and ENTRYPOINT, and refuses
// everything else, so that a container engine makes the same of it.
func ReadContainerfile(file, context string) (Spec, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return Spec{}, err
	}
	parsed, err := parser.Parse(bytes.NewReader(text))
	if err != nil {
		return Spec{}, fmt.Errorf("%s: %w", file, err)
	}
	stages, _, err := instructions.Parse(parsed.AST, nil)
	if err != nil {
		return Spec{}, fmt.Errorf("%s: %w", file, err)
	}
	if len(stages) != 1 || stages[0].BaseName != "scratch" {
		return Spec{}, fmt.Errorf("%s: must have one stage, FROM scratch", file)
	}
	var spec Spec
	for _, command := range stages[0].Commands {
		if err := spec.apply(command, context); err != nil {
			return Spec{}, fmt.Errorf("%s: line %d: %w", file, command.Location()[0].Start.Line, err)
		}
	}
	return spec, nil
}

func (s *Spec) apply(command instructions.Command, context string) error {
	switch c := command.(type) {
	case *instructions.CopyCommand:
		return s.copy(c, context)
	case *instructions.UserCommand:
		s.User = c.User
		return nil
	case *instructions.EntrypointCommand:
		if c.PrependShell {
			return fmt.Errorf(`ENTRYPOINT: must be a list, as ["/program"]: there is no shell in the image`)
		}
		s.Entrypoint = c.CmdLine
		return nil
	}
	return fmt.Errorf("%s: is not among COPY, USER and ENTRYPOINT", strings.ToUpper(command.Name()))
}

func (s *Spec) copy(c *instructions.CopyCommand, context string) error {
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
		s.Files = append(s.Files, File{Source: filepath.Join(context, source), Target: target})
	}
	return nil
}
