// SPDX-License-Identifier: Apache-2.0

package provisioning

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// API is the part of the API server that [CRD] uses. Reads come from a cache. The caller must not
// change the returned objects.
type API interface {
	// Synced waits until the cache has been filled. It returns false if ctx ended before.
	Synced(ctx context.Context) bool
	// Subscribe returns a channel that receives a value after every change of an XPU or a Port,
	// until ctx ends.
	Subscribe(ctx context.Context) <-chan struct{}
	// XPUOf returns the XPU that serves a PF of the node, or nil if there is none.
	XPUOf(ctx context.Context, pf pci.Address) (*v1alpha1.XPU, error)
	// XPUAway returns why the OPI agent of the Function's xPU cannot be reached, or "" if it can.
	XPUAway(f function.Function) string
	// Ports returns the Ports of the node.
	Ports(ctx context.Context) ([]v1alpha1.XPUPort, error)
	// PortsOf returns the Ports of a Function: at most one in each namespace, and at most one that
	// was made ahead.
	PortsOf(ctx context.Context, f function.ID) ([]v1alpha1.XPUPort, error)
	// CreatePort creates a Port that the garbage collector deletes with the Node.
	CreatePort(ctx context.Context, port *v1alpha1.XPUPort) error
	// DeletePort requests the deletion of a Port. If uid is not empty, only the Port with this uid
	// is deleted. The error is NotFound if there is no such Port.
	DeletePort(ctx context.Context, key types.NamespacedName, uid types.UID) error
}

// CRD is the [Provisioner] that writes XPUPorts. xpu-controller has the OPI agents serve them. Like
// [Direct], CRD trusts the journal. [CRD.Run] restores the XPUPorts that CRD created. All fields
// must be set.
type CRD struct {
	API API
	// Journal has the Ports that the xPUs must serve.
	Journal *journal.Journal
	// Node is the name of the node that has the Functions.
	Node string
	// Namespace is the namespace of the agent and of the XPUPorts that it creates.
	Namespace string
	// InUse reports whether a pod may have a Function of which the journal has no record. It must
	// not block.
	InUse func(function.ID) bool
	// OwnMAC returns the permanent MAC address of a Function, or "" if it is not known.
	OwnMAC func(function.ID) function.MAC
	Log    logr.Logger

	functions keylock.Locks[function.ID] // held while the Function's XPUPort is written
}

var _ Provisioner = (*CRD)(nil)

// Away returns what xpu-controller reports about the Function's xPU. See [Provisioner].
func (c *CRD) Away(f function.Function) string { return c.API.XPUAway(f) }

// PortID returns "", because xpu-controller chooses the id. See [Provisioner].
func (*CRD) PortID(function.Function) string { return "" }

// NeedsOwnMAC reads the dialect in the XPU. See [Provisioner].
func (c *CRD) NeedsOwnMAC(pf pci.Address) bool {
	xpu, err := c.API.XPUOf(context.Background(), pf)
	return err == nil && xpu != nil && needsOwnMAC(string(xpu.Spec.Dialect))
}

// cacheLag is how long a Port that was just created may be missing in the cache.
const cacheLag = time.Second

// Provision makes sure that an XPUPort asks for exactly this attachment, and waits until the Port
// is ready. See [Provisioner].
func (c *CRD) Provision(ctx context.Context, a journal.Attachment) (done Provisioned, err error) {
	key := c.key(a.Function)
	var created time.Time // when this call created the XPUPort
	err = c.work(ctx, a.Function, func(ctx context.Context) error {
		want, err := c.wanted(ctx, a)
		if err != nil {
			return err
		}

		own, other, err := c.ports(ctx, a.Function)
		if err != nil {
			return refused(err)
		}

		switch {
		case own != nil && !own.DeletionTimestamp.IsZero():
			return fmt.Errorf("the Function's last XPUPort %s is not gone yet%s", key, why(own))
		case own != nil && !serves(own, &want.Spec):
			if _, err := c.deletePort(ctx, key, own.UID); err != nil {
				return refused(err)
			}
			c.Log.Info("Replacing an XPUPort that is another one", "port", key, "has", own.Spec)
			return fmt.Errorf("the Function's last XPUPort %s, in network %s, is not gone yet",
				key, own.Spec.Network)
		case own != nil:
			if err := readiness(key, own); err != nil {
				return err
			}
			done, err = provisioned(own)
			return err
		case other != nil:
			return fmt.Errorf("the Function still has XPUPort %s/%s of another namespace, for "+
				"ResourceClaim %q; it must be gone first",
				other.Namespace, other.Name, other.Spec.Claim.Name)
		case time.Since(created) >= cacheLag:
			if err := c.API.CreatePort(ctx, want); err != nil && !apierrors.IsAlreadyExists(err) {
				return refused(fmt.Errorf("create XPUPort %s: %w", key, err))
			}
			created = time.Now()
			c.Log.V(1).Info("Created XPUPort", "port", key, "xpu", want.Spec.XPU, "network",
				a.Port.Network)
		}

		return fmt.Errorf("XPUPort %s is waiting for XPU %s", key, want.Spec.XPU)
	})

	if err != nil {
		return Provisioned{}, fmt.Errorf("the xPU does not serve Function %s in network %s: %w",
			a.Function, a.Port.Network, err)
	}

	return done, nil
}

// provisioned returns what the pod's interface must know of a Port that is ready.
func provisioned(port *v1alpha1.XPUPort) (Provisioned, error) {
	done := Provisioned{MTU: int(port.Status.MTU)}
	for _, text := range port.Status.Addresses {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			return done, obstacle{
				error: fmt.Errorf("XPUPort %s/%s: %w", port.Namespace, port.Name, err), never: true,
			}
		}
		done.Addresses = append(done.Addresses, address)
	}

	return done, nil
}

// readiness returns nil if xpu-controller reports that the Port is served or stands by. A Port
// stands by while a virtual machine migrates to a pod that runs already.
func readiness(key types.NamespacedName, port *v1alpha1.XPUPort) error {
	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	if ready.Status == metav1.ConditionTrue || ready.Reason == v1alpha1.ReasonStandby {
		return nil
	}

	return obstacle{
		error: fmt.Errorf("XPUPort %s is waiting for XPU %s%s", key, port.Spec.XPU, why(port)),
		undeclared: ready.Reason == v1alpha1.ReasonNetworkNotFound ||
			ready.Reason == v1alpha1.ReasonNoXPU ||
			ready.Reason == v1alpha1.ReasonForbidden,
	}
}

// Deprovision deletes the XPUPort and waits until it is gone. See [Provisioner].
func (c *CRD) Deprovision(ctx context.Context, a journal.Attachment) error {
	key := c.key(a.Function)
	asked := false
	err := c.work(ctx, a.Function, func(ctx context.Context) error {
		own, _, err := c.ports(ctx, a.Function)
		if err != nil {
			return refused(err)
		}

		// The cache may lack a Port that was created a moment ago. Therefore the API server must
		// confirm that the Port is gone.
		if !asked || own == nil {
			gone, err := c.deletePort(ctx, key, "")
			if err != nil {
				return refused(err)
			}
			if gone && own == nil {
				return nil
			}
			asked = true
		}

		if own == nil {
			return fmt.Errorf("xpu-controller has not taken XPUPort %s from its xPU yet", key)
		}

		return fmt.Errorf("xpu-controller has not taken XPUPort %s from XPU %s yet%s", key,
			own.Spec.XPU, why(own))
	})

	if err != nil {
		return fmt.Errorf("the xPU may still serve Function %s: %w", a.Function, err)
	}

	return nil
}

// deletePort requests the deletion of the XPUPort. It reports the Port as gone if no such Port
// exists, or if a Port with another uid has taken its place.
func (c *CRD) deletePort(
	ctx context.Context, key types.NamespacedName, uid types.UID,
) (gone bool, err error) {
	err = c.API.DeletePort(ctx, key, uid)
	if apierrors.IsNotFound(err) || uid != "" && apierrors.IsConflict(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("delete XPUPort %s: %w", key, err)
	}
	return false, nil
}

// work repeats the step as [converge] does, under the lock of the Function.
func (c *CRD) work(ctx context.Context, f function.ID, step func(context.Context) error) error {
	unlock, err := c.functions.Lock(ctx, f)
	if err != nil {
		return fmt.Errorf("other work on its XPUPort is not done yet: %w", err)
	}
	defer unlock()

	if !c.API.Synced(ctx) {
		return errors.New("the API server has not been read yet; check that it can be reached " +
			"from this node")
	}

	return converge(ctx, c.API.Subscribe, step)
}

func (c *CRD) key(f function.ID) types.NamespacedName {
	return types.NamespacedName{Namespace: c.Namespace, Name: claim.PortName(c.Node, f)}
}

func refused(err error) error {
	return obstacle{
		error: fmt.Errorf("the API server does not do what is needed: %w", err), refused: true,
	}
}

// ports returns the Port of the Function in the agent's namespace and a Port of the Function in
// another namespace, or nil for each that does not exist. It ignores Ports that were made ahead.
func (c *CRD) ports(ctx context.Context, f function.ID) (own, other *v1alpha1.XPUPort, err error) {
	all, err := c.API.PortsOf(ctx, f)
	for i := range all {
		switch {
		case all[i].Spec.Ahead:
		case all[i].Namespace == c.Namespace:
			own = &all[i]
		default:
			other = &all[i]
		}
	}

	return own, other, err
}

// wanted returns the XPUPort for the attachment. An error is an [obstacle].
func (c *CRD) wanted(ctx context.Context, a journal.Attachment) (*v1alpha1.XPUPort, error) {
	xpu, err := c.API.XPUOf(ctx, a.PF)
	if err != nil {
		return nil, refused(err)
	}
	if xpu == nil {
		err = fmt.Errorf("%s: %s", v1alpha1.ReasonNoXPU, claim.NoXPU(c.Node, a.PF))
		return nil, obstacle{error: err, undeclared: true}
	}

	if !xpu.DeletionTimestamp.IsZero() {
		return nil, obstacle{
			error:      fmt.Errorf("%s: XPU %s is being deleted", v1alpha1.ReasonNoXPU, xpu.Name),
			undeclared: true,
		}
	}

	if needsOwnMAC(string(xpu.Spec.Dialect)) {
		own := c.OwnMAC(a.Function)
		if err := checkOwnMAC(xpu.Name, a.Function, own, a.Port.MAC); err != nil {
			return nil, obstacle{error: err, undeclared: own == "", never: own != ""}
		}
	}

	spec := v1alpha1.XPUPortSpec{
		NodeName: c.Node, XPU: xpu.Name, Network: a.Port.Network, MAC: string(a.Port.MAC),
		AssignAddresses: a.Port.AssignAddresses,
		Rate:            claim.RateOf(a.Interface.VF),
	}

	for _, address := range a.Port.Addresses {
		spec.Addresses = append(spec.Addresses, address.String())
	}

	if a.Pod.Name != "" {
		spec.Pod = new(v1alpha1.PodRef(a.Pod))
	}

	return claim.NewPort(c.Namespace, a.Function, a.Port.DevicePool, spec), nil
}

// serves reports whether an existing Port can be used in place of the wanted one. Another rate makes
// no difference, because the xPU does not know it: Ports of older agents and of Allocate have none.
func serves(port *v1alpha1.XPUPort, want *v1alpha1.XPUPortSpec) bool {
	have := &port.Spec
	addresses := have.AssignAddresses == want.AssignAddresses && (len(want.Addresses) == 0 ||
		slices.Equal(have.Addresses, want.Addresses) ||
		slices.Equal(port.Status.Addresses, want.Addresses))
	return have.XPU == want.XPU && have.Network == want.Network && have.MAC == want.MAC &&
		addresses && forPod(have.Pod, want.Pod)
}

// forPod reports whether a Port that was created for one pod can be used for another. A Port that
// Allocate created has no pod and can be used for any pod.
func forPod(have, want *v1alpha1.PodRef) bool {
	switch {
	case have == nil:
		return true
	case want == nil:
		return false
	case have.UID != "" && want.UID != "":
		return have.UID == want.UID
	}
	return have.Namespace == want.Namespace && have.Name == want.Name
}

// why returns the reason and message of a Port that is not ready, as the end of a sentence, or ""
// if the Port has none.
func why(port *v1alpha1.XPUPort) string {
	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	if ready.Status == "" || ready.Status == metav1.ConditionTrue {
		return ""
	}
	return fmt.Sprintf(": %s: %s", ready.Reason, ready.Message)
}
