// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// measureProvision measures an ADD that first makes opi-bridge serve the Function, in both modes.
func measureProvision(ctx context.Context, b *bench) (out []Measurement, err error) {
	p, err := b.newPods(ctx, pfs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.close()) }()

	endpoint, err := freeAddress()
	if err != nil {
		return nil, err
	}

	bridge, err := b.startBridge(ctx, endpoint, p.path("opi-bridge.db"))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, bridge.end()) }()

	direct, err := b.provisionDirect(ctx, p, endpoint)
	if err != nil {
		return nil, fmt.Errorf("direct: %w", err)
	}

	crd, err := b.provisionCRD(ctx, p, endpoint)
	if err != nil {
		return nil, fmt.Errorf("crd: %w", err)
	}

	return []Measurement{direct, crd}, nil
}

const networkName = "blue"

// provisionDirect uses an agent that calls opi-bridge itself.
func (b *bench) provisionDirect(
	ctx context.Context, p *pods, endpoint string,
) (m Measurement, err error) {
	const form = "xpus: [{name: xpu, endpoint: %q, insecure: true}]\nnetworks: {%s: {vlan: 20, " +
		"allowedNamespaces: {from: All}}}\n"
	config := fmt.Sprintf(form, endpoint, networkName)
	file := p.path("direct.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return m, err
	}

	a, err := p.startAgent(func() (*agent, error) {
		return b.startDirect(p.host, "--direct-config="+file)
	})
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, a.end()) }()

	return b.compareProvisioned(ctx, p, a, "ADD with a network, direct, opi-bridge")
}

// provisionCRD uses an agent and a controller that communicate through the API server.
func (b *bench) provisionCRD(
	ctx context.Context, p *pods, endpoint string,
) (m Measurement, err error) {
	c, err := b.startCluster(ctx)
	if err != nil {
		return m, err
	}

	xpu := &v1alpha1.XPU{
		Spec: v1alpha1.XPUSpec{NodeName: nodeName, Endpoint: endpoint, Insecure: true},
	}
	xpu.Name = "xpu"
	// The VLAN differs from direct mode's, whose network stays at the OPI agent, because it belongs
	// to another installation.
	network := &v1alpha1.XPUNetwork{Spec: v1alpha1.XPUNetworkSpec{
		VLAN: 21, AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll},
	}}
	network.Name = networkName
	metrics, err := freeAddress()
	if err != nil {
		return m, err
	}

	controller, err := b.start(b.dir, "xpu-controller", "--kubeconfig="+c.controllerKubeconfig,
		"--namespace="+namespace,
		"--metrics-bind-address="+metrics, "--health-probe-bind-address=0")
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, controller.end()) }()

	// Claims of other benchmarks use the same VFs.
	if err := errors.Join(c.removeClaims(ctx), c.reset(ctx),
		c.publishByDevicePlugin(ctx)); err != nil {
		return m, err
	}
	if err := errors.Join(c.client.Create(ctx, xpu), c.client.Create(ctx, network)); err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, c.remove(ctx, network), c.remove(ctx, xpu)) }()

	a, err := p.startAgent(func() (*agent, error) { return b.startAgent(c, p.host) })
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, a.end()) }()

	return b.compareProvisioned(ctx, p, a, "ADD with a network, crd, opi-bridge")
}

// compareProvisioned attaches and detaches a VF, alternately with a network of the xPU and without.
func (b *bench) compareProvisioned(
	ctx context.Context, p *pods, a *agent, what string,
) (m Measurement, err error) {
	m = Measurement{What: what, Unit: Seconds, Reference: "ADD without"}
	if err := p.serves(ctx, a); err != nil {
		return m, err
	}

	for round := range b.runs(10) + 1 {
		bare, err := p.timeAdd(ctx, a, "")
		if err != nil {
			return m, err
		}

		took, err := p.timeAdd(ctx, a, networkName)
		if err != nil {
			return m, err
		}
		if round == 0 {
			continue // the first round makes the connections and the network
		}

		m.Samples = append(m.Samples, took.Seconds())
		m.ReferenceSamples = append(m.ReferenceSamples, bare.Seconds())
	}

	return m, nil
}

// timeAdd measures a whole ADD, including the shim's start. DEL and the post-delete hooks follow.
func (p *pods) timeAdd(ctx context.Context, a *agent, network string) (time.Duration, error) {
	i, err := p.invoke(0, network)
	if err != nil {
		return 0, err
	}

	took, err := p.run(ctx, "ADD", i)
	if err != nil {
		return 0, fmt.Errorf("%w\n%s", err, a.lastWords())
	}
	if err := sleep(ctx, pause); err != nil {
		return 0, err
	}
	if _, err := p.run(ctx, "DEL", i); err != nil {
		return 0, err
	}

	return took, p.free(ctx, a)
}

// publishByDevicePlugin publishes the DevicePool through the device plugin.
func (c *cluster) publishByDevicePlugin(ctx context.Context) error {
	pool := &v1alpha1.DevicePool{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: poolName}, pool); err != nil {
		return err
	}
	before := client.MergeFrom(pool.DeepCopy()) // the status may be written concurrently
	pool.Spec.Publish = v1alpha1.PublishDevicePlugin
	return c.client.Patch(ctx, pool, before)
}

// removeClaims deletes all ResourceClaims and their XPUPorts. This needs a running controller.
func (c *cluster) removeClaims(ctx context.Context) error {
	claims := c.clientset.ResourceV1().ResourceClaims(metav1.NamespaceDefault)
	if err := claims.DeleteCollection(ctx, metav1.DeleteOptions{},
		metav1.ListOptions{}); err != nil {
		return err
	}

	return wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, patience, true,
		func(ctx context.Context) (bool, error) {
			list, err := claims.List(ctx, metav1.ListOptions{})
			if err != nil || len(list.Items) > 0 {
				return false, err
			}

			var ports v1alpha1.XPUPortList
			if err := c.client.List(ctx, &ports); err != nil || len(ports.Items) == 0 {
				return err == nil, err
			}

			return false, c.client.DeleteAllOf(ctx, &v1alpha1.XPUPort{},
				client.InNamespace(metav1.NamespaceDefault))
		})
}

// remove deletes an object and waits until it is gone.
func (c *cluster) remove(ctx context.Context, object client.Object) error {
	if err := c.client.Delete(ctx, object); err != nil {
		return client.IgnoreNotFound(err)
	}
	return wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, patience, true,
		func(ctx context.Context) (bool, error) {
			err := c.client.Get(ctx, client.ObjectKeyFromObject(object), object)
			if apierrors.IsNotFound(err) {
				return true, nil
			}
			return false, err
		})
}
