// SPDX-License-Identifier: Apache-2.0

package artifact

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/image"
)

func (c Cache) pause(goVersion string) (artifact, error) {
	inputs, err := c.inputs("cmd/pause/main.go")
	if err != nil {
		return artifact{}, err
	}

	return artifact{
		name:   "image " + PauseImage,
		dir:    "pause",
		inputs: append(inputs, goVersion, PauseImage),
		make:   c.makePause,
	}, nil
}

func (c Cache) makePause(ctx context.Context, target string) error {
	binary := filepath.Join(target, "pause")
	if err := c.buildCommand(ctx, "pause", binary); err != nil {
		return err
	}
	defer os.Remove(binary)

	return image.Write(filepath.Join(target, "pause.tar"), PauseImage, time.Unix(0, 0), image.Spec{
		Arch:       runtime.GOARCH,
		Entrypoint: []string{"/pause"},
		Files:      []image.File{{Source: binary, Target: "/pause"}},
	})
}

// buildCommand builds a command of this module without dependencies: cmd/NAME/main.go.
func (c Cache) buildCommand(ctx context.Context, name, binary string) error {
	source, err := os.MkdirTemp("", "devcluster-"+name+"-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(source)

	if err := c.extract(source, "go.mod", "go.sum", "cmd/"+name+"/main.go"); err != nil {
		return err
	}

	output, err := c.goCommand(ctx, source, "build", "-ldflags", "-s -w", "-o", binary,
		"./cmd/"+name).CombinedOutput()
	if err != nil {
		return fmt.Errorf("go build: %w\n%s", err, lastLines(output))
	}

	return nil
}
