// SPDX-License-Identifier: Apache-2.0

// Package e2e runs the story of the demo as tests, and then steps in which something goes wrong.
package e2e

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/e2e/story"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// TestStory runs the story on a cluster of its own, and after each act the steps in which something
// goes wrong.
func TestStory(t *testing.T) {
	world := newWorld(t)
	endAfter(t, world)

	for _, act := range world.Acts() {
		t.Run(act.Title, func(t *testing.T) {
			run(t, slices.Concat(act.Steps, act.Trouble), world)
		})
		if t.Failed() {
			t.FailNow()
		}
	}
}

// upgrades is how often TestUpgrade replaces the product.
var upgrades = flag.Int("upgrades", 4, "how often TestUpgrade replaces the product")

// TestUpgrade replaces the product under pods that come and go.
func TestUpgrade(t *testing.T) {
	world := newWorld(t)
	endAfter(t, world)
	run(t, world.UpgradeSteps(*upgrades), world)
}

// TestSkew runs this version beside the version before.
func TestSkew(t *testing.T) {
	world := newWorld(t)
	world.BeforeBin = filepath.Join(world.Bin, "before")
	if _, err := os.Stat(filepath.Join(world.BeforeBin, "chart.tgz")); err != nil {
		t.Skip("needs the version before, which make before builds from the repository's history")
	}
	endAfter(t, world)
	run(t, world.SkewSteps(), world)
}

// TestFederation runs the story of several clusters.
func TestFederation(t *testing.T) {
	federation := story.NewFederation(*newWorld(t))
	endAfter(t, federation)
	run(t, federation.Steps(), federation.Infra, federation.A, federation.B)
}

// run runs each step as a subtest until a step fails, because each step needs the steps before it.
func run(t *testing.T, steps []story.Step, worlds ...*story.World) {
	t.Helper()
	for _, step := range steps {
		t.Run(step.Title, func(t *testing.T) {
			for _, w := range worlds {
				w.Detail = t.Logf
			}
			if err := step.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
		if t.Failed() {
			t.FailNow()
		}
	}
}

// endAfter ends a world when the test has ended. If the test has failed, it first logs the state of
// the world.
func endAfter(t *testing.T, world interface {
	Diagnose(context.Context) string
	End(context.Context) error
}) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(world.Diagnose(context.Background()))
		}
		if err := world.End(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

// newWorld returns a world with the programs and images that make has built. If they are missing,
// the tests are skipped, because a build takes many minutes.
func newWorld(t *testing.T) *story.World {
	t.Helper()
	needs.Root(t, "for network namespaces and containers")

	source, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}

	bin := filepath.Join(source, "bin")
	needs.Built(t, filepath.Join(bin, "images", "xpu-agent.tar"), "images")

	return &story.World{
		Cluster:  story.Devcluster{Program: filepath.Join(bin, "devcluster"), Name: "e2e"},
		Source:   source,
		Bin:      bin,
		StateDir: t.TempDir(),
	}
}
