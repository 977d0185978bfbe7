// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/controlplane"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/report"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// serveOptions are the options of xpuctl serve.
type serveOptions struct {
	assets, kubeconfig string
	files              []string
}

func serveCommand() *cobra.Command {
	var o serveOptions
	c := &cobra.Command{
		Use:   "serve [-f FILE|DIRECTORY|-]",
		Short: "Run an API server and the scheduler on this machine, to try claims on",
		Long: `Runs etcd, kube-apiserver, kube-scheduler and the controller of ResourceClaims as processes of yours, on the loopback
interface, until it is interrupted. There are no kubelets: pods get a node and devices, and never run. All files are in a
temporary directory, which is removed at the end. So is the kubeconfig that --write-kubeconfig names,
which must be a new file.

The programs are those of a release of Kubernetes, or of "make images" in bin/kubernetes.`,
		Example: `  # Three hosts whose VFs can be claimed:
  xpuctl generate sriov --nodes 3 | xpuctl serve --assets bin/kubernetes -f -

  # In another terminal:
  export KUBECONFIG=$PWD/xpuctl.kubeconfig
  kubectl apply -f pod.yaml
  kubectl get pods,resourceclaims -o wide
  xpuctl schedule`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}

	c.Flags().StringVar(&o.assets, "assets",
		"", "directory with etcd, kube-apiserver, kube-scheduler and kube-controller-manager; "+
			"$KUBEBUILDER_ASSETS or bin/kubernetes if empty")
	c.Flags().StringVar(&o.kubeconfig, "write-kubeconfig", "xpuctl.kubeconfig",
		"new file to write the kubeconfig to, for you alone; removed at the end")
	c.Flags().StringArrayVarP(&o.files, "filename", "f", nil,
		"file or directory with objects to create first, or - for standard input")

	return c
}

func (o serveOptions) run(c *cobra.Command) (err error) {
	begin := time.Now()
	if _, err := os.Lstat(o.kubeconfig); err == nil {
		return o.exists()
	}

	assets, err := controlplane.Find(cmp.Or(o.assets, os.Getenv("KUBEBUILDER_ASSETS"),
		filepath.Join("bin", "kubernetes")))
	if err != nil {
		return fmt.Errorf("%w: name a directory with --assets", err)
	}

	reader, err := snapshot.NewReader(c.InOrStdin(), report.GroupVersionKind())
	if err != nil {
		return err
	}

	objects, err := reader.Read(o.files...)
	if err != nil {
		return err
	}

	dir, err := os.MkdirTemp("", "xpuctl-serve-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	ctx, stop := context.WithCancel(c.Context())
	defer stop()

	plane, err := controlplane.Start(ctx, assets, dir)
	if err != nil {
		return err
	}

	if err := o.fill(ctx, plane, objects); err != nil {
		stop()
		return errors.Join(plane.Wait(), err)
	}

	remove, err := o.writeKubeconfig(plane.Kubeconfig)
	if err != nil {
		stop()
		return errors.Join(plane.Wait(), err)
	}
	defer func() { err = errors.Join(err, remove()) }()

	terminal.Line(c.OutOrStdout(), "ready after %.1fs: export KUBECONFIG=%s",
		time.Since(begin).Seconds(), o.kubeconfig)
	return plane.Wait()
}

// fill creates the objects.
func (o serveOptions) fill(
	ctx context.Context, plane *controlplane.ControlPlane, objects *snapshot.Snapshot,
) error {
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), resourceapi.AddToScheme(scheme)); err != nil {
		return err
	}

	api, err := client.New(plane.Config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	return controlplane.Load(ctx, api, objects)
}

func (o serveOptions) exists() error {
	return fmt.Errorf("--write-kubeconfig: %s exists already: remove it, or name another file",
		o.kubeconfig)
}

// writeKubeconfig creates the file, which only its owner can read, because it has an
// administrator's credentials. It fails if the file exists. remove deletes the file, unless another
// one has replaced it.
func (o serveOptions) writeKubeconfig(content []byte) (remove func() error, err error) {
	file, err := os.OpenFile(o.kubeconfig, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil, o.exists()
	}
	if err != nil {
		return nil, fmt.Errorf("--write-kubeconfig: %w", err)
	}
	defer file.Close()

	ours, err := file.Stat()
	if err == nil {
		_, err = file.Write(content)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("--write-kubeconfig: %w", err), os.Remove(o.kubeconfig))
	}

	return func() error {
		now, err := os.Lstat(o.kubeconfig)
		switch {
		case errors.Is(err, fs.ErrNotExist), err == nil && !os.SameFile(ours, now):
			return nil
		case err != nil:
			return fmt.Errorf("--write-kubeconfig: remove it: %w", err)
		}
		return os.Remove(o.kubeconfig)
	}, nil
}
