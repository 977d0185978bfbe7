// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/artifact"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/image"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/preflight"
)

func buildCommand(o *options) *cobra.Command {
	var bin string
	cmd := &cobra.Command{
		Use:   "build",
		Short: "Build what a cluster runs, as far as it is missing",
		Long: `Build compiles Kubernetes, etcd, Multus and some CNI plugins from Go modules, unpacks containerd, runc and other
CNI plugins from the machine's Debian archive without installing them (--runtime has others built), and makes the pause image. All of it is kept
in the cache; the first build takes some minutes, the next ones nothing. It ends with the versions of Kubernetes and of the
runtime.`,
		Example: `  devcluster build
  devcluster build --bin ./bin && KUBEBUILDER_ASSETS=$PWD/bin go test ./...`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := build(cmd.Context(), o)
			if err != nil {
				return err
			}
			versions, err := set.Versions(cmd.Context())
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), versions)
			if bin != "" {
				return set.Link(bin)
			}
			return nil
		},
	}

	cmd.Flags().StringVar(&bin, "bin", "", "directory to put links to the Kubernetes binaries in")
	return o.versionFlags(cmd)
}

func build(ctx context.Context, o *options) (artifact.Set, error) {
	cache, err := o.artifacts()
	if err != nil {
		return artifact.Set{}, err
	}
	if set, err := cache.Find(ctx); err == nil || !errors.Is(err, artifact.ErrMissing) {
		return set, err
	}
	if err := preflight.Build(cache.Dir); err != nil {
		return artifact.Set{}, err
	}

	return cache.Build(ctx)
}

func imageCommand() *cobra.Command {
	var (
		ref       string
		source    image.Source
		platforms []string
		timestamp int64
		sbom      string
	)

	cmd := &cobra.Command{
		Use:   "image OUT.tar --name REGISTRY/NAME:TAG --file CONTAINERFILE [CONTEXT]",
		Short: "Make a container image of static binaries",
		Long: `Image does what a container engine does with a Containerfile of one stage "FROM scratch" with ARG, COPY, LABEL, USER and
ENTRYPOINT, and refuses one with anything else. Files are copied from the directory CONTEXT, which is "." if it is not
given. OUT.tar is an OCI image layout with an index of the platforms. Equal input gives an equal file.`,
		Example: `  CGO_ENABLED=0 go build -o bin/app ./cmd/app
  devcluster image app.tar --name devcluster.local/app:1 --file images/app/Containerfile bin
  devcluster load app.tar`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(_ *cobra.Command, args []string) error {
			source.Context = "."
			if len(args) > 1 {
				source.Context = args[1]
			}

			specs, err := readPlatforms(source, platforms)
			if err != nil {
				return err
			}

			if sbom != "" {
				if err := image.WriteSBOM(sbom, ref, specs...); err != nil {
					return err
				}
			}

			if err := image.Write(args[0], ref, time.Unix(timestamp, 0), specs...); err != nil {
				return err
			}

			fmt.Fprintf(os.Stderr, "%s: image %s for %s\n", args[0], ref,
				strings.Join(platforms, ", "))
			return nil
		},
	}

	cmd.Flags().StringVar(&ref, "name", "", "name of the image with registry and tag")
	cmd.Flags().StringVar(&source.Containerfile, "file", "", "the Containerfile")
	cmd.Flags().StringSliceVar(&platforms, "platform", []string{"linux/" + runtime.GOARCH},
		"what the image is for: linux/amd64, linux/arm64 or both")
	cmd.Flags().StringToStringVar(&source.Args, "build-arg", nil, "values of ARGs, as NAME=VALUE")
	cmd.Flags().Int64Var(&timestamp, "timestamp", 0,
		"the time that the image and its files bear, in seconds since 1970")
	cmd.Flags().StringVar(&sbom, "sbom", "",
		"file to write the bill of materials to, as CycloneDX in JSON")

	for _, required := range []string{"name", "file"} {
		if err := cmd.MarkFlagRequired(required); err != nil {
			panic(err) // the flag is defined above
		}
	}

	return cmd
}

func readPlatforms(source image.Source, platforms []string) ([]image.Spec, error) {
	var specs []image.Spec
	for _, platform := range platforms {
		arch, ok := strings.CutPrefix(platform, "linux/")
		if !ok || arch == "" {
			return nil, fmt.Errorf("--platform %s: want linux/ARCHITECTURE, for example "+
				"linux/arm64", platform)
		}

		spec, err := source.Read(arch)
		if err != nil {
			return nil, err
		}

		specs = append(specs, spec)
	}

	return specs, nil
}
