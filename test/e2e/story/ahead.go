// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// portsAhead is how many Ports are made ahead.
const portsAhead = 2

// takePortsMadeAhead makes pool careful create Ports ahead, and starts pods that take them one
// after the other.
func (w *World) takePortsMadeAhead(ctx context.Context) error {
	patch := fmt.Sprintf(`{"spec": {"provision": "Ahead", "portsAhead": %d, "network": "blue"}}`,
		portsAhead)
	if _, err := w.Cluster.Kubectl(ctx, "patch", "devicepool", "careful", "--type=merge", "--patch",
		patch); err != nil {
		return err
	}

	watching, stop := context.WithTimeout(ctx, 90*time.Second)
	defer stop()

	watcher, err := newWatcher(watching, w.client, "default")
	if err != nil {
		return err
	}
	defer watcher.stop()

	names := []string{"ahead-1", "ahead-2", "ahead-3"}
	for _, name := range names {
		ahead, err := w.waitForPortsAhead(ctx, portsAhead)
		if err != nil {
			return err
		}

		created := time.Now()
		if err := w.createPodWithClaimsOfClass(ctx, "xpu-careful", name, "node1",
			`"network": "blue"`); err != nil {
			return err
		}

		err = watcher.wait(watching, "Ready with its status in the claim", []string{name},
			readyAndAttached)
		if err != nil {
			return errors.Join(err, w.explain(ctx, name))
		}

		life := *watcher.lives[name]
		life.Created = created
		if err := w.showAhead(ctx, name, life, ahead); err != nil {
			return err
		}
	}

	if _, err := w.waitForPortsAhead(ctx, portsAhead); err != nil {
		return err
	}

	const back = `{"spec": {"provision": "BeforeBind", "portsAhead": null, "network": null}}`
	if _, err := w.Cluster.Kubectl(ctx, "patch", "devicepool", "careful", "--type=merge", "--patch",
		back); err != nil {
		return err
	}

	return w.deletePodsAndWait(ctx, names...)
}

// showAhead checks that a pod got a Function whose Port had been made ahead, and prints the times
// of its stages.
func (w *World) showAhead(
	ctx context.Context, pod string, life Life, ahead []v1alpha1.XPUPort,
) error {
	c, device, err := w.claimOf(ctx, pod)
	if err != nil {
		return err
	}

	devices, err := claim.Devices(c)
	if err != nil {
		return err
	}

	i := slices.IndexFunc(ahead, func(p v1alpha1.XPUPort) bool {
		return p.Spec.NodeName == devices[0].ID.Node &&
			claim.FunctionOf(p.Spec.Function) == devices[0].Function
	})

	switch {
	case i < 0:
		return fmt.Errorf("pod %s has VF %s, for which no Port had been made ahead",
			pod, devices[0].Function)
	case devices[0].BeforeBind:
		return fmt.Errorf("pod %s waited for binding conditions of VF %s", pod, devices[0].Function)
	case device.NetworkData == nil || device.NetworkData.HardwareAddress != ahead[i].Spec.MAC:
		return fmt.Errorf("pod %s: network data %+v, want MAC address %s of the Port made ahead",
			pod, device.NetworkData, ahead[i].Spec.MAC)
	}

	since := func(t time.Time) time.Duration { return t.Sub(life.Created).Round(time.Millisecond) }
	w.Detail("%s (Ahead): VF %s: allocated %s, bound %s, xPU up %s, Ready %s", pod,
		devices[0].Function,
		since(life.Allocated), since(life.Bound), since(life.Provisioned), since(life.Ready))

	return nil
}

// waitForPortsAhead waits until that many devices of node1's pool careful have no binding
// conditions and come first. It returns their Ports.
func (w *World) waitForPortsAhead(
	ctx context.Context, want int,
) (ports []v1alpha1.XPUPort, err error) {
	err = poll(ctx, 30*time.Second,
		fmt.Sprintf("%d Functions of node1 have a Port made ahead", want),
		func(ctx context.Context) error {
			var all v1alpha1.XPUPortList
			if err := w.client.List(ctx, &all); err != nil {
				return err
			}

			ports = slices.DeleteFunc(all.Items, func(p v1alpha1.XPUPort) bool {
				return !p.Spec.Ahead ||
					p.Spec.NodeName != "node1"
			})

			devices, err := w.devicesOf(ctx, "node1")
			if err != nil {
				return err
			}

			devices = slices.DeleteFunc(devices, func(d resourceapi.Device) bool {
				pool := d.Attributes["pool"].StringValue
				return pool == nil || *pool != "careful"
			})

			first := slices.IndexFunc(devices, func(d resourceapi.Device) bool {
				return len(d.BindingConditions) > 0
			})
			if first != want || len(ports) != want {
				return fmt.Errorf("%d XPUPorts, and device %d of %d is the first with binding "+
					"conditions", len(ports), first, len(devices))
			}

			return nil
		})
	return ports, err
}
