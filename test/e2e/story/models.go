// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// chooseModels lets a DevicePool publish a PF in other ways than by VFs: as ports that claims
// share, and as a whole or its VFs.
func (w *World) chooseModels(ctx context.Context) error {
	manifest := filepath.Join(w.Source, "test/e2e/manifests/models.yaml")
	if _, err := w.Cluster.Kubectl(ctx, "apply", "-f", manifest); err != nil {
		return err
	}

	missing, err := w.unsupported(ctx, "modelled")
	if err != nil {
		return err
	}

	if missing != "" {
		w.Detail("DevicePool modelled: Supported is False: %s", missing)
	} else if err := errors.Join(w.sharePF(ctx), w.takeWholePF(ctx)); err != nil {
		return err
	}

	if _, err := w.Cluster.Kubectl(ctx, "delete", "-f", manifest, "--timeout=60s"); err != nil {
		return err
	}

	return w.waitForBaseline(ctx)
}

// waitForDevices waits until node1 publishes that many devices of the DevicePool.
func (w *World) waitForDevices(ctx context.Context, want int) error {
	return poll(ctx, 30*time.Second, fmt.Sprintf("node1 offers %d devices of pool modelled", want),
		func(ctx context.Context) error { return w.hasDevices(ctx, want) })
}

// hasDevices returns an error if node1 does not publish that many devices of the DevicePool.
func (w *World) hasDevices(ctx context.Context, want int) error {
	devices, err := w.devicesOf(ctx, "node1")
	if err != nil {
		return err
	}

	devices = slices.DeleteFunc(devices, func(d resourceapi.Device) bool {
		pool := d.Attributes["pool"].StringValue
		return pool == nil || *pool != "modelled"
	})
	if len(devices) != want {
		return fmt.Errorf("there are %d", len(devices))
	}

	return nil
}

// waitForWholePF waits until node1 publishes a PF beside its VFs. If this Kubernetes must not have
// counters, it waits for the VFs alone and returns what the DevicePool's condition Supported says.
func (w *World) waitForWholePF(ctx context.Context) (missing string, err error) {
	err = poll(ctx, 30*time.Second, "node1 offers a PF beside its VFs, or cannot",
		func(ctx context.Context) error {
			missing = ""
			offered := w.hasDevices(ctx, 1+vfsOfPF)
			if offered == nil || w.hasDevices(ctx, vfsOfPF) != nil {
				return offered
			}

			var known error
			if missing, known = w.lackOf(ctx, "modelled"); known != nil || missing != "" {
				return known
			}
			return offered
		})
	return missing, err
}

// quotaCounts waits until the quota's status counts that many used devices. The API server enforces
// no quota without a status. kube-controller-manager, which writes the first status, pauses for
// seconds whenever it finds new kinds of objects, such as those of CustomResourceDefinitions.
func (w *World) quotaCounts(ctx context.Context, used string) error {
	return poll(ctx, 60*time.Second, "quota modelled counts "+used+" devices",
		func(ctx context.Context) error {
			var quota corev1.ResourceQuota
			if err := w.client.Get(ctx, client.ObjectKey{
				Namespace: corev1.NamespaceDefault, Name: "modelled",
			}, &quota); err != nil {
				return err
			}

			got, counted := quota.Status.Used["xpu-modelled.deviceclass.resource.k8s.io/devices"]
			if !counted || got.String() != used {
				return fmt.Errorf("its status is %+v", quota.Status)
			}

			return nil
		})
}

// sharePF starts two pods that take a port each of a PF, and checks that a quota rejects a third.
func (w *World) sharePF(ctx context.Context) error {
	if err := errors.Join(w.waitForDevices(ctx, 1), w.quotaCounts(ctx, "0")); err != nil {
		return err
	}

	var chosen []function.ID
	for _, name := range []string{"ports-1", "ports-2"} {
		if err := w.createPodWithClaimsOfClass(ctx, "xpu-modelled", name, "node1",
			`"network": "blue"`); err != nil {
			return err
		}
		if err := w.waitForPod(ctx, name); err != nil {
			return err
		}

		f, device, err := w.share(ctx, name)
		if err != nil {
			return err
		}
		if slices.Contains(chosen, f) {
			return fmt.Errorf("pod %s has VF %s, which another pod has", name, f)
		}

		chosen = append(chosen, f)
		w.Detail("model: Ports: %s has a port of PF %s, and on it VF %s", name, device, f)
	}

	if err := w.quotaCounts(ctx, "2"); err != nil {
		return err
	}

	_, err := w.buildPodWithClaims(ctx, "xpu-modelled", "ports-3", "node1", `"network": "blue"`)
	if !apierrors.IsForbidden(err) {
		return fmt.Errorf("a third claim: error %w, want the quota to refuse it", err)
	}

	w.Detail("a third claim: %s", cutTo(err.Error(), "exceeded quota"))
	return w.end(ctx, "ports-1", "ports-2")
}

// share returns the VF that the agent chose for a pod's claim, and the device that the scheduler
// chose.
func (w *World) share(ctx context.Context, pod string) (function.ID, string, error) {
	var c resourceapi.ResourceClaim
	if err := w.client.Get(ctx, client.ObjectKey{Namespace: "default", Name: pod + "-nic-0"},
		&c); err != nil {
		return function.ID{}, "", err
	}

	devices, err := claim.Devices(&c)
	if err != nil {
		return function.ID{}, "", err
	}
	if d := devices[0]; d.Share == "" || d.Function.Address == "" || d.Function.Address == d.ID.PF {
		return function.ID{}, "",
			fmt.Errorf("claim %s has %+v, want a VF that was chosen for a share", c.Name, d)
	}

	return devices[0].Function, devices[0].Name, nil
}

// takeWholePF starts a pod that wants a PF while another has one of its VFs, and checks that it
// gets the PF when that pod is gone.
func (w *World) takeWholePF(ctx context.Context) error {
	patch := `{"spec": {"model": "` + string(v1alpha1.ModelCounters) + `"}}`
	if _, err := w.Cluster.Kubectl(ctx, "patch", "devicepool", "modelled", "--type=merge",
		"--patch", patch); err != nil {
		return err
	}
	missing, err := w.waitForWholePF(ctx)
	if err != nil {
		return err
	}
	if missing != "" {
		w.Detail("model: Counters: Supported is False: %s", missing)
		return nil
	}
	if err := w.createPodWithClaimsOfClass(ctx, "xpu-modelled-vf", "one-vf", "node1",
		`"network": "blue"`); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "one-vf"); err != nil {
		return err
	}
	if err := w.createPodWithClaimsOfClass(ctx, "xpu-modelled-pf", "whole", "node1",
		`"interfaceName": "net1"`); err != nil {
		return err
	}

	const short = "short of counter functions"
	out, err := w.xpuctl(ctx, "explain", "pod", "whole", "--namespace=default")
	if err == nil || !strings.Contains(out, short) {
		return fmt.Errorf("xpuctl explain pod whole says %w\n%s", err, out)
	}

	verdict, _, _ := strings.Cut(out, "\n")
	w.Detail("model: Counters: %s", verdict)
	if err := w.end(ctx, "one-vf"); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "whole"); err != nil {
		return err
	}

	w.Detail("one-vf is gone: whole has the PF")
	return w.end(ctx, "whole")
}

// monitorAll starts a pod that observes all VFs of a pool on a node, while another pod uses one,
// and checks that it takes none.
func (w *World) monitorAll(ctx context.Context) error {
	const label = resourceapi.DRAAdminNamespaceLabelKey
	if _, err := w.Cluster.Kubectl(ctx, "label", "namespace", "default",
		label+"=true"); err != nil {
		return err
	}
	if err := w.createPodWithClaims(ctx, "user", "node1", `"network": "blue"`); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "user"); err != nil {
		return err
	}

	all := &resourceapi.ResourceClaim{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
		Name: "all", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "xpu-fast", AllocationMode: resourceapi.DeviceAllocationModeAll,
			AdminAccess: ptr.To(true),
		},
	}}}}}

	all.Namespace, all.Name = "default", "monitor-nic-0"
	pod := podSpec{name: "monitor", node: "node1"}.pod()
	pod.Spec.ResourceClaims[0].ResourceClaimTemplateName, pod.Spec.ResourceClaims[0].ResourceClaimName = nil, &all.Name
	for _, o := range []client.Object{all, pod} {
		if err := w.client.Create(ctx, o); err != nil {
			return err
		}
	}

	if err := w.waitForPod(ctx, "monitor"); err != nil {
		return err
	}
	if err := w.client.Get(ctx, client.ObjectKeyFromObject(all), all); err != nil {
		return err
	}

	devices, err := claim.Devices(all)
	if err != nil {
		return err
	}

	if len(devices) != poolSize || slices.ContainsFunc(devices, func(d claim.Device) bool {
		return !d.Admin
	}) {
		return fmt.Errorf("the monitor has %+v, want to look at all %d VFs", devices, poolSize)
	}

	said := meta.FindStatusCondition(all.Status.Devices[0].Conditions,
		v1alpha1.ConditionProvisioned)
	if said == nil || said.Reason != v1alpha1.ReasonNoPortNeeded {
		return fmt.Errorf("the monitor is told %+v, want that it takes nothing", said)
	}

	w.Detail("monitor sees %d VFs, of which a pod has one: %s", len(devices), said.Message)
	if err := w.end(ctx, "monitor", "user"); err != nil {
		return err
	}
	if _, err := w.Cluster.Kubectl(ctx, "label", "namespace", "default", label+"-"); err != nil {
		return err
	}

	return w.waitForBaseline(ctx)
}

// end deletes pods with their claims, and waits until they are gone.
func (w *World) end(ctx context.Context, names ...string) error {
	var errs []error
	for _, name := range names {
		errs = append(errs, w.removePod(ctx, name))
	}
	return errors.Join(append(errs, w.claimsGone(ctx, names))...)
}

func (w *World) claimsGone(ctx context.Context, pods []string) error {
	return poll(ctx, 30*time.Second, "the pods' claims are gone", func(ctx context.Context) error {
		for _, name := range pods {
			var c resourceapi.ResourceClaim
			err := w.client.Get(ctx,
				client.ObjectKey{Namespace: corev1.NamespaceDefault, Name: name + "-nic-0"}, &c)
			if !apierrors.IsNotFound(err) {
				return errors.Join(fmt.Errorf("claim %s is still there", c.Name), err)
			}
		}
		return nil
	})
}

// cutTo returns the text from the mark on.
func cutTo(text, mark string) string {
	if i := strings.Index(text, mark); i >= 0 {
		return text[i:]
	}
	return text
}

// unsupported returns the message of a DevicePool's condition Supported if that is False, and "" if
// it is True.
func (w *World) unsupported(ctx context.Context, name string) (message string, err error) {
	err = poll(ctx, 30*time.Second, "DevicePool "+name+" has the condition Supported",
		func(ctx context.Context) (err error) {
			message, err = w.lackOf(ctx, name)
			return err
		})
	return message, err
}

// lackOf returns the same as unsupported, or an error if the condition is not there yet.
func (w *World) lackOf(ctx context.Context, name string) (message string, err error) {
	var pool v1alpha1.DevicePool
	if err := w.client.Get(ctx, types.NamespacedName{Name: name}, &pool); err != nil {
		return "", err
	}

	c := meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionSupported)
	switch {
	case c == nil || pool.Status.Functions == 0:
		return "", fmt.Errorf("conditions are %v, with %d Functions", pool.Status.Conditions,
			pool.Status.Functions)
	case c.Status == metav1.ConditionFalse:
		return c.Message, nil
	}
	return "", nil
}
