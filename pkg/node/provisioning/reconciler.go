// SPDX-License-Identifier: Apache-2.0

package provisioning

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// lookInterval is the time between two comparisons of the XPUPorts with the journal if no XPUPort
// changes.
const lookInterval = time.Minute

// Run makes the agent's XPUPorts match the journal until ctx ends. It creates an XPUPort again that
// a user deleted, or that was deleted with the Node, as long as the journal has its Port. It
// deletes an XPUPort that the journal does not have, because no other Port could use its Function.
// Start Run after the agent has recovered the attachments of its last run.
func (c *CRD) Run(ctx context.Context) error {
	changes := c.API.Subscribe(ctx)
	if !c.API.Synced(ctx) {
		return nil
	}

	var logged map[function.ID]error // the errors of the last comparison
	for pauses := retries(); ; {
		differing, err := c.differing(ctx)
		if err != nil {
			c.Log.Error(err, "XPUPorts are not compared with the journal; trying again")
		} else {
			logged = c.amendAll(ctx, differing, logged)
		}

		pause := lookInterval
		if err == nil && len(logged) == 0 {
			pauses = retries()
		} else {
			pause = pauses.Step()
		}

		if !loop.Wait(ctx, changes, pause) {
			return nil
		}
	}
}

// amendAll amends the Functions and returns all errors. It logs those that differ from the errors
// of the last comparison.
func (c *CRD) amendAll(
	ctx context.Context, ids []function.ID, logged map[function.ID]error,
) map[function.ID]error {
	wrong := verifyAll(ctx, ids, c.amend)
	for id, err := range wrong {
		if logged[id] == nil || logged[id].Error() != err.Error() {
			c.Log.Error(err, "The XPUPort of a Function is not what the journal says; trying again",
				"function", id)
		}
	}
	return wrong
}

// differing returns the Functions for which [CRD.amend] may find something to do.
func (c *CRD) differing(ctx context.Context) ([]function.ID, error) {
	ports, err := c.API.Ports(ctx)
	if err != nil {
		return nil, err
	}

	var differing []function.ID
	have := map[function.ID]bool{}
	for i := range ports {
		if ports[i].Namespace != c.Namespace || ports[i].Spec.Ahead {
			continue
		}
		id := claim.FunctionOf(ports[i].Spec.Function)
		have[id] = true
		if c.isStray(&ports[i]) {
			differing = append(differing, id)
		}
	}

	for _, a := range c.Journal.All() {
		if wantsPort(a) && !have[a.Function] {
			differing = append(differing, a.Function)
		}
	}

	return differing, nil
}

// isStray reports whether a Port in the agent's namespace was created by this agent for a pod and
// is missing in the journal. It is false while a pod uses the Function, so that the pod keeps its
// Port if the journal was lost.
func (c *CRD) isStray(port *v1alpha1.XPUPort) bool {
	id := claim.FunctionOf(port.Spec.Function)
	if port.Name != c.key(id).Name || port.Spec.Claim.UID != "" ||
		!port.DeletionTimestamp.IsZero() {
		return false
	}
	if a, exists := c.Journal.Get(id); exists {
		return a.Port == nil
	}
	return !c.InUse(id)
}

// amend deletes the Function's XPUPort or creates it again, as the journal requires. It reads the
// journal under the Function's lock, which Provision and Deprovision take after the caller has
// written the journal. So amend neither creates a Port that is being deleted nor deletes a Port
// that is being provisioned. While Provision or Deprovision holds the lock, amend does nothing.
func (c *CRD) amend(ctx context.Context, id function.ID) error {
	unlock, taken := c.functions.TryLock(id)
	if !taken {
		return nil
	}
	defer unlock()

	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()

	own, other, err := c.ports(ctx, id)
	if err != nil {
		return err
	}

	a, _ := c.Journal.Get(id)
	switch {
	case own != nil && c.isStray(own):
		return c.remove(ctx, own)
	case own != nil || !wantsPort(a):
		return nil
	case other != nil:
		return fmt.Errorf("XPUPort %s/%s, for ResourceClaim %q, is in the way; it must be gone first",
			other.Namespace, other.Name, other.Spec.Claim.Name)
	}

	want, err := c.wanted(ctx, a)
	if err != nil {
		return err
	}

	key := c.key(id)
	err = c.API.CreatePort(ctx, want)
	if apierrors.IsAlreadyExists(err) {
		return nil // the cache does not show the Port yet
	}
	if err != nil {
		return fmt.Errorf("create XPUPort %s: %w", key, err)
	}

	c.Log.Info("Created XPUPort that the journal has and the API server had not", "port", key,
		"state", a.State, "pod", a.Pod.Namespace+"/"+a.Pod.Name)
	return nil
}

// remove requests the deletion of a Port and waits until the cache shows it as deleted or being
// deleted.
func (c *CRD) remove(ctx context.Context, port *v1alpha1.XPUPort) error {
	id := claim.FunctionOf(port.Spec.Function)
	key := c.key(id)
	if _, err := c.deletePort(ctx, key, port.UID); err != nil {
		return err
	}

	c.Log.Info("Deleting XPUPort that the journal knows nothing of", "port", key, "network",
		port.Spec.Network,
		"created", port.CreationTimestamp.Time)

	return converge(ctx, c.API.Subscribe, func(ctx context.Context) error {
		own, _, err := c.ports(ctx, id)
		if err != nil {
			return refused(err)
		}
		if own != nil && own.UID == port.UID && own.DeletionTimestamp.IsZero() {
			return fmt.Errorf("XPUPort %s is not known to be deleted yet", key)
		}
		return nil
	})
}
