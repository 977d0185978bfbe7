// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// SkewSteps mix this version and the previous one, in both directions. In every stage pods start,
// and the pods of the previous stage end, so that each version reads the journals, opi-bridge
// states and objects that the other wrote.
func (w *World) SkewSteps() []Step {
	var stream *packets
	stage := 0
	// lives starts, connects and ends pods in a stage.
	lives := func(enter func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error {
			if err := enter(ctx); err != nil {
				return err
			}
			stage++
			return w.nextGeneration(ctx, stage)
		}
	}

	return []Step{
		{"A cluster with the version before: opi-bridge, agents and controllers",
			func(ctx context.Context) error {
				w.product = w.BeforeBin
				for _, step := range []func(context.Context) error{
					w.bringUp, w.insertCards, w.install, w.declare, w.declareResources,
				} {
					if err := step(ctx); err != nil {
						return err
					}
				}

				return nil
			}},
		{"Pods that stay, and packets between them until the end",
			func(ctx context.Context) (err error) {
				if err := errors.Join(w.startClaimedPeerPods(ctx),
					w.startPeerPods(ctx)); err != nil {
					return err
				}
				stream, err = sendPackets("10.10.0.21", "10.10.0.22")
				return err
			}},
		{"The version before alone", lives(func(context.Context) error { return nil })},
		{"This version's controller beside agents of the version before",
			lives(func(ctx context.Context) error { return w.upgradeTo(ctx, w.Bin, "OnDelete") })},
		{"This version alone", lives(func(ctx context.Context) error {
			return w.upgradeAllTo(ctx,
				w.Bin)
		})},
		{"The controller of the version before beside this version's agents",
			lives(func(ctx context.Context) error {
				return w.upgradeTo(ctx, w.BeforeBin,
					"OnDelete")
			})},
		{"The version before alone again", lives(func(ctx context.Context) error {
			return w.upgradeAllTo(ctx, w.BeforeBin)
		})},
		{"All pods end, no packet was lost, and everything is as it was",
			func(ctx context.Context) error {
				if err := w.checkNoneLost(stream); err != nil {
					return err
				}
				return w.deletePodsAndWait(ctx, "steady", "witness", "here", "there",
					claimedOfStage(stage),
					byPluginOfStage(stage).name)
			}},
	}
}

// upgradeAllTo upgrades everything to a version.
func (w *World) upgradeAllTo(ctx context.Context, product string) error {
	if err := w.upgradeTo(ctx, product, "RollingUpdate"); err != nil {
		return err
	}
	return w.replaceBridges(ctx)
}

// upgradeTo installs a version by Helm. With strategy OnDelete the running agents stay.
func (w *World) upgradeTo(ctx context.Context, product, strategy string) error {
	was := w.product
	w.product = product
	if was != product {
		if _, err := w.Cluster.Run(ctx, "load",
			w.images("xpu-agent", "xpu-controller")...); err != nil {
			return err
		}
	}

	err := w.helm(ctx, "upgrade", "xpu", filepath.Join(product, "chart.tgz"), "--namespace",
		namespace, "--reset-then-reuse-values",
		"--set", "agent.updateStrategy.type="+strategy)
	if err != nil {
		return err
	}

	workloads := []string{"deployment/xpu-controller"}
	if strategy != "OnDelete" {
		workloads = append(workloads, "daemonset/xpu-agent")
	}

	for _, workload := range workloads {
		if _, err := w.Cluster.Kubectl(ctx, "-n", namespace, "rollout", "status", workload,
			"--timeout=90s"); err != nil {
			return err
		}
	}

	return w.waitForProduct(ctx)
}

// replaceBridges replaces the running opi-bridges by the product's, which keep their states.
func (w *World) replaceBridges(ctx context.Context) error {
	for _, x := range w.xpus {
		if err := w.stopProcess(ctx, "opi-bridge-"+x.node.Name, syscall.SIGTERM); err != nil {
			return err
		}
		if err := w.startBridge(ctx, x); err != nil {
			return err
		}
	}
	return nil
}

func claimedOfStage(n int) string { return fmt.Sprintf("claimed-%d", n) }

func byPluginOfStage(n int) resourcePod {
	return onNetwork("blue", fmt.Sprintf("by-plugin-%d", n), "node2", 70+n)
}

// nextGeneration starts the pods of a stage, checks their connectivity, and ends the pods of the
// previous stage.
func (w *World) nextGeneration(ctx context.Context, stage int) error {
	if err := w.printProductImages(ctx); err != nil {
		return err
	}

	begin := time.Now()
	if err := w.createPodWithClaims(ctx, claimedOfStage(stage), "node1",
		`"network": "blue"`); err != nil {
		return err
	}

	byPlugin := byPluginOfStage(stage)
	if err := errors.Join(w.waitForPod(ctx, claimedOfStage(stage)),
		w.startResourcePod(ctx, byPlugin)); err != nil {
		return err
	}

	address, _, _ := strings.Cut(byPlugin.networks[0].IPs[0], "/")
	if err := errors.Join(w.checkConnectivity(ctx,
		connectivityCheck{claimedOfStage(stage), byPlugin.name, true}, address),
		w.checkPeerConnectivity(ctx)); err != nil {
		return err
	}

	if stage > 1 {
		if err := errors.Join(w.removePod(ctx, claimedOfStage(stage-1)),
			w.deletePod(ctx, byPluginOfStage(stage-1).name)); err != nil {
			return err
		}
	}

	w.Detail("pods of this stage run, those of the stage before are gone, after %s",
		time.Since(begin).Round(time.Millisecond))
	return nil
}

// printProductImages prints the images of the product's pods.
func (w *World) printProductImages(ctx context.Context) error {
	var pods corev1.PodList
	if err := w.client.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
		return err
	}
	for _, pod := range pods.Items {
		w.Detail("%s runs %s", pod.Name, filepath.Base(pod.Spec.Containers[0].Image))
	}
	return nil
}
