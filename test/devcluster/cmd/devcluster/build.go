package main

import (
	"context"
	"errors"
	"fmt"
	"os"

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
CNI plugins from the machine's Debian archive without installing them, and makes the pause image. All of it is kept
in the cache; the first build takes some minutes, the next ones nothing.`,
		Example: `  devcluster build
  devcluster build --bin ./bin && KUBEBUILDER_ASSETS=$PWD/bin go test ./...`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := build(cmd.Context(), o)
			if err != nil {
				return err
			}
			if bin != "" {
				return set.Link(bin)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&bin, "bin", "", "directory to put links to the Kubernetes binaries in")
	return cmd
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
	var spec image.Spec
	cmd := &cobra.Command{
		Use:   "image OUT.tar --name REGISTRY/NAME:TAG --entrypoint /PROGRAM SOURCE=TARGET...",
		Short: "Pack static binaries into a container image",
		Example: `  CGO_ENABLED=0 go build -o app ./cmd/app
  devcluster image app.tar --name devcluster.local/app:1 --entrypoint /app app=/app
  devcluster load app.tar`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			for _, arg := range args[1:] {
				f, err := image.ParseFile(arg)
				if err != nil {
					return err
				}
				spec.Files = append(spec.Files, f)
			}
			if err := image.Write(args[0], spec); err != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "%s: image %s\n", args[0], spec.Name)
			return nil
		},
	}
	cmd.Flags().StringVar(&spec.Name, "name", "", "name of the image with registry and tag")
	cmd.Flags().StringArrayVar(&spec.Entrypoint, "entrypoint", nil, "program in the image; again for each of its fixed arguments")
	cmd.Flags().StringVar(&spec.User, "user", "", "UID or UID:GID (default root)")
	for _, required := range []string{"name", "entrypoint"} {
		if err := cmd.MarkFlagRequired(required); err != nil {
			panic(err) // the flag is defined above
		}
	}
	return cmd
}
