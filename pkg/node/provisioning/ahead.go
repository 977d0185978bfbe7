// SPDX-License-Identifier: Apache-2.0

package provisioning

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Ahead keeps some XPUPorts of pools with provision: Ahead, for Functions that no pod has.
// xpu-controller deletes such an XPUPort once a claim's XPUPort has taken its place, and Ahead
// makes another one for the next free Function. All fields must be set.
type Ahead struct {
	API API
	// Pools returns the current pools of the node; known is false until they have been read once.
	Pools func() (pools []pool.Pool, known bool)
	// Free reports whether a Function has no owner and no problem.
	Free func(function.Function) bool
	// OwnMAC returns the permanent MAC address of a Function, or "" if it is not known.
	OwnMAC func(function.ID) function.MAC
	// Node is the name of the node that has the Functions.
	Node string
	// Namespace is the namespace of the agent and of the XPUPorts.
	Namespace string
	Log       logr.Logger
}

// Run makes and deletes XPUPorts at once and after every change until ctx ends. It tries again
// while the API server refuses.
func (a *Ahead) Run(ctx context.Context, changes <-chan struct{}) error {
	if !a.API.Synced(ctx) {
		return nil
	}
	for pauses := retries(); ; {
		pause := time.Duration(0) // 0 waits for the next change
		if err := a.keep(ctx); err != nil && ctx.Err() == nil {
			pause = pauses.Step()
			a.Log.Error(err, "XPUPorts are not made ahead; trying again", "after", pause.String())
		} else {
			pauses = retries()
		}

		if !loop.Wait(ctx, changes, pause) {
			return nil
		}
	}
}

// keep makes missing XPUPorts and deletes surplus ones.
func (a *Ahead) keep(ctx context.Context) error {
	pools, known := a.Pools()
	if !known {
		return nil
	}

	ports, err := a.API.Ports(ctx)
	if err != nil {
		return err
	}

	there := map[function.ID][]*v1alpha1.XPUPort{}
	for i := range ports {
		id := claim.FunctionOf(ports[i].Spec.Function)
		there[id] = append(there[id], &ports[i])
	}

	kept := sets.New[types.UID]()
	var errs []error
	for _, p := range pools {
		if p.Spec.Provision != v1alpha1.ProvisionAhead {
			continue
		}
		for pf, functions := range p.ByPF() {
			errs = append(errs, a.keepAt(ctx, p, pf, functions, there, kept))
		}
	}

	for i := range ports {
		if p := &ports[i]; p.Spec.Ahead && p.Namespace == a.Namespace &&
			p.DeletionTimestamp.IsZero() && !kept.Has(p.UID) {
			errs = append(errs, a.remove(ctx, p))
		}
	}

	return errors.Join(errs...)
}

// keepAt does the work of keep for a pool's Functions of one PF. It adds the XPUPorts to keep to
// its argument.
func (a *Ahead) keepAt(
	ctx context.Context, p pool.Pool, pf pci.Address, functions []function.Function,
	there map[function.ID][]*v1alpha1.XPUPort, kept sets.Set[types.UID],
) error {
	xpu, err := a.API.XPUOf(ctx, pf)
	if err != nil {
		return err
	}
	if xpu == nil || !xpu.DeletionTimestamp.IsZero() {
		return nil
	}

	// Ports that the xPU refuses do not count, because it may serve other Functions. But there are
	// at most twice as many Ports in all.
	left := int(ptr.Deref(p.Spec.PortsAhead, v1alpha1.DefaultPortsAhead))
	room := 2 * left
	for _, f := range functions {
		ports := there[f.ID]
		if left == 0 || room == 0 || len(ports) != 1 || !a.serves(ports[0], xpu.Name, p) {
			continue
		}

		kept.Insert(ports[0].UID)
		room--

		if !v1alpha1.Refused(v1alpha1.ReadyOf(ports[0].Status.Conditions).Reason) {
			left--
		}
	}

	for _, f := range functions {
		if left == 0 || room == 0 {
			return nil
		}
		// An InfiniBand Function can have no Port: see [function.Function.CheckLinkType].
		if len(there[f.ID]) > 0 || !a.Free(f) || f.LinkType == function.InfiniBand {
			continue
		}
		if err := a.make(ctx, p, f, xpu); err != nil {
			return err
		}

		left, room = left-1, room-1
	}

	return nil
}

// serves reports whether a Port that was made ahead still matches the pool.
func (a *Ahead) serves(port *v1alpha1.XPUPort, xpu string, p pool.Pool) bool {
	return port.Spec.Ahead && port.Namespace == a.Namespace && port.DeletionTimestamp.IsZero() &&
		port.Spec.XPU == xpu && port.Spec.Network == p.Spec.Network &&
		port.Labels[v1alpha1.LabelPool] == p.Name
}

// make creates the Port. Its MAC address is permanent or derived from the Function, which
// xpu-controller checks. While the permanent address is not known, there is no Port.
func (a *Ahead) make(
	ctx context.Context, p pool.Pool, f function.Function, xpu *v1alpha1.XPU,
) error {
	mac := MAC(a.Node, f.ID)
	if needsOwnMAC(string(xpu.Spec.Dialect)) {
		if mac = a.OwnMAC(f.ID); mac == "" {
			return nil
		}
	}

	port := claim.NewPort(a.Namespace, f.ID, p.Name, v1alpha1.XPUPortSpec{
		NodeName: a.Node, XPU: xpu.Name, Network: p.Spec.Network, MAC: string(mac), Ahead: true,
	})

	err := a.API.CreatePort(ctx, port)
	if apierrors.IsAlreadyExists(err) {
		return nil // the cache does not show the Port yet
	}
	if err != nil {
		return fmt.Errorf("create XPUPort %s: %w", client.ObjectKeyFromObject(port), err)
	}

	a.Log.Info("Created XPUPort ahead", "port", client.ObjectKeyFromObject(port), "pool", p.Name,
		"network", p.Spec.Network)
	return nil
}

func (a *Ahead) remove(ctx context.Context, port *v1alpha1.XPUPort) error {
	key := client.ObjectKeyFromObject(port)
	if err := a.API.DeletePort(ctx, key, port.UID); err != nil && !apierrors.IsNotFound(err) &&
		!apierrors.IsConflict(err) {
		return fmt.Errorf("delete XPUPort %s, which was made ahead: %w", key, err)
	}
	a.Log.Info("Deleting XPUPort that was made ahead and is not wanted", "port", key)
	return nil
}
